"""What a study or a sweep checks before it trains anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qrl import checkpoint, source
from qrl.recipe import Recipe


@dataclass(frozen=True)
class Start:
    """Where a study starts: the device that models run on, and the checked base model."""

    device: str  # cpu or cuda
    base: checkpoint.Checkpoint


def check(recipe: Recipe, overrides: dict[str, str], *, beside: Sequence[str] = ()) -> Start:
    """Refuse what a later step could not do, and warn of settings that have no effect.

    Args:
        recipe: the resolved settings.
        overrides: as typed.
        beside: schemes that the study makes too, beyond the recipe's.

    Raises:
        BadInput: the prompt, the model, a scheme or the rollouts do not fit the rest.
    """
    from qrl import evaluate
    from qrl.engine import device as devices
    from qrl.quantize import settings as choices
    from qrl.study import report
    from qrl.tasks import prompt
    from qrl.train import rollout

    prompt.check(recipe.task, recipe.prompt)
    report.warn(
        choices.unheeded(recipe.quantize, recipe.quantize.schemes, overrides, beside)
        + evaluate.unheeded(recipe.evaluate)
    )
    base = checkpoint.check(source.locate(recipe.model))
    check_schemes(recipe, base.path)
    device = devices.choose(recipe.device)
    rollout.check(recipe.rollout, device, recipe.train)
    return Start(device, base)


def check_schemes(recipe: Recipe, base: Path) -> None:
    """Check, before anything is trained, that every scheme fits its settings and the model.

    Args:
        recipe: its section `quantize` lists the schemes.
        base: the model's checkpoint folder.

    Raises:
        BadInput: a scheme cannot store the model, or a setting is not one of the scheme's.
    """
    from qrl import quantize
    from qrl.quantize import settings as choices

    for scheme in recipe.quantize.schemes:
        settings = choices.of(scheme, recipe.quantize, recipe.seed)
        if recipe.model not in source.SHIPPED:  # the shipped model fits every scheme; the check imports torch
            quantize.check_fit(base, settings)
