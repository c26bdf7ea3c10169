"""qrl: does RL post-training change how cleanly a model quantizes?

    import qrl

    model, tokenizer = qrl.load("qrl-tiny", stage="awq")  # a transformers model; gate and digest are checked
    version = qrl.resolve("qrl-tiny", stage="Production")  # number, digest, address; nothing is loaded
    qrl.study("tiny")  # train, quantize, evaluate, compare: what `mlflow run .` does

Importing the package imports nothing heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from qrl.registry.versions import Version

__version__ = "0.1.0"
__all__ = ["load", "resolve", "study"]


def load(
    name: str, stage: str | int, *, device: str = "auto", dtype: str = "auto"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a registered version as a transformers model and its tokenizer, after checking its gate and its digest.

    Args:
        name: name of the registered model, such as "qrl-tiny".
        stage: base, grpo, awq, Staging, Production, or a version number.
        device: auto, cpu or cuda.
        dtype: dtype of activations; auto is bf16 on a GPU and fp32 on a CPU.

    Raises:
        BadInput: the stage is unknown or has no version.
        GateRefused: no gate admitted the version.
        QrlError: its files differ from those that were evaluated.
    """
    from qrl.engine import device as devices
    from qrl.engine import hf
    from qrl.registry import versions

    where = devices.choose(device)
    return hf.load(versions.verify(resolve(name, stage)), where, devices.compute_dtype(dtype, where))


def resolve(name: str, stage: str | int) -> Version:
    """Return the version that a stage points to now; nothing is loaded. Arguments and errors as in `load`."""
    from qrl import registry
    from qrl.tracking import store

    store.prepare()
    return registry.resolve(name, stage)


def study(recipe: str = "auto", **overrides: object) -> None:
    """Run a whole study in this process's environment, as `python -m qrl study` does.

    Args:
        recipe: name or file of a recipe.
        overrides: recipe fields by dotted key, such as `**{"train.steps": 50}`.

    Raises:
        QrlError: a step failed, an input is wrong, or a gate refused a promotion; see `qrl.errors`.
    """
    from qrl import recipe as recipes
    from qrl.study import pipeline, preflight

    typed = {key: str(value) for key, value in overrides.items()}
    recipe = preflight.recipe_for(recipe, typed)
    pipeline.study(recipes.load(recipe, typed), {"recipe": recipe, **typed})
