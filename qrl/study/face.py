"""A whole study from Python, and what it found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qrl import names

if TYPE_CHECKING:
    from qrl.compare import Comparison


@dataclass(frozen=True)
class Study:
    """A finished study; it shows itself as the comparison's tables.

    Attributes:
        run_id: its run in MLflow, which has the report, the tables and the figures as artifacts.
        artifacts: where they are: a folder, or an address if the store is not local.
        comparison: all cells with their gains, gain survival and verdicts.
    """

    run_id: str
    artifacts: str
    comparison: Comparison

    def __str__(self) -> str:
        return str(self.comparison)

    _repr_markdown_ = __str__


def study(recipe: str = "auto", **overrides: object) -> Study:
    """Run a whole study in this process's environment, as `python -m qrl study` does.

    Args:
        recipe: name or file of a recipe.
        overrides: recipe fields by dotted key, such as `**{"train.steps": 50}`.

    Raises:
        QrlError: a step failed, an input is wrong, or a gate refused a promotion; see `qrl.errors`.
    """
    from qrl import compare
    from qrl import recipe as recipes
    from qrl.registry import starting
    from qrl.study import auto, fit, pipeline
    from qrl.tracking import contents, projects

    typed = {key: str(value) for key, value in overrides.items()}
    name = auto.recipe_for(recipe, typed)
    if recipe != recipes.DEFAULT and "model" in typed:
        typed |= fit.replacements(recipe, typed)
    settings = recipes.load(name, typed)
    if settings.model.startswith("models:/"):
        settings = starting.with_version(settings)
        typed["model"] = settings.model
    if "prompt" in typed:  # a file's contents, which the steps then share
        typed["prompt"] = settings.prompt
    run_id = pipeline.study(settings, {"recipe": name, **typed})
    rows = compare.read_questions(contents.artifact(run_id, names.QUESTIONS), whole=False)
    comparison = compare.from_questions(rows, margin=settings.compare.margin)
    return Study(run_id, projects.artifact_location(run_id), comparison)
