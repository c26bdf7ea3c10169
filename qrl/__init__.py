"""qrl: does RL post-training change how cleanly a model quantizes?

    import qrl

    model, tokenizer = qrl.load("qrl-tiny", stage="awq")  # gate and digest checked
    version = qrl.resolve("qrl-tiny", stage="Production")  # number, digest, address; nothing is loaded
    qrl.study("tiny")  # what `mlflow run .` does

Importing this imports nothing heavy.
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
    """A registered version as a transformers model and its tokenizer, after its gate and digest were checked.

    Args:
        name: the registered model, "qrl-tiny" say.
        stage: base, grpo, awq, Staging, Production, or a version number.
        device: auto, cpu or cuda.
        dtype: of activations; auto is bf16 on a GPU and fp32 on a CPU.

    Raises:
        BadInput: unknown stage, or a stage without a version.
        GateRefused: no gate let the version in.
        QrlError: its files are not those that were evaluated.
    """
    from qrl.engine import device as devices
    from qrl.engine import hf
    from qrl.registry import versions

    where = devices.choose(device)
    return hf.load(versions.verify(resolve(name, stage)), where, devices.compute_dtype(dtype, where))


def resolve(name: str, stage: str | int) -> Version:
    """The version behind a stage, resolved once; nothing is loaded."""
    from qrl import registry
    from qrl.tracking import store

    store.prepare()
    return registry.resolve(name, stage)


def study(recipe: str = "auto", **overrides: str) -> None:
    """Runs a whole study in this process's environment, as `python -m qrl study` does.

    Args:
        recipe: a recipe's name or file.
        overrides: recipe fields by dotted key, `**{"train.steps": "50"}`.
    """
    from qrl import recipe as recipes
    from qrl.study import pipeline

    given = {key: str(value) for key, value in overrides.items()}
    pipeline.study(recipes.load(recipe, given), {"recipe": recipe, **given})
