"""Typed recipes, the one source of parameters: their sections, and the loader that reads and checks their files."""

from qrl.recipe.load import (
    DEFAULT,
    RENAMED,
    about,
    change,
    default,
    fields,
    is_whole,
    load,
    names,
    needs_gpu,
    stored,
    type_name,
)
from qrl.recipe.sections import Benchmark, Evaluate, Quantize, Recipe
from qrl.recipe.training import PACKED, Rollout, Train, Watch, reward_name
