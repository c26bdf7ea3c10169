"""Typed recipes, the one source of parameters: their sections, their files, and the loader that checks both."""

from qrl.recipe.load import DEFAULT, NAMED, Recipe, fields, load, names, type_name
from qrl.recipe.sections import (
    PACKED,
    Benchmark,
    Compare,
    Diagnose,
    Evaluate,
    Merge,
    Promote,
    Quantize,
    Rollout,
    Section,
    Train,
    Watch,
)

__all__ = [
    "DEFAULT",
    "NAMED",
    "PACKED",
    "Benchmark",
    "Compare",
    "Diagnose",
    "Evaluate",
    "Merge",
    "Promote",
    "Quantize",
    "Recipe",
    "Rollout",
    "Section",
    "Train",
    "Watch",
    "fields",
    "load",
    "names",
    "type_name",
]
