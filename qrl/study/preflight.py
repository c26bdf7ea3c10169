"""What a study or a sweep checks before it trains anything."""

from collections.abc import Sequence
from pathlib import Path

from qrl import checkpoint, source
from qrl.recipe import Recipe


def check(recipe: Recipe, overrides: dict[str, str], *, beside: Sequence[str] = ()) -> tuple[str, str]:
    """Refuse what a later step could not do, and warn of settings that have no effect.

    Args:
        recipe: the resolved settings.
        overrides: as typed.
        beside: schemes that the study makes too, beyond the recipe's.

    Returns:
        The device that models run on, cpu or cuda, and the digest of the base model.

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
    unheeded = choices.unheeded(recipe.quantize, recipe.quantize.schemes, overrides, beside)
    report.warn(unheeded + evaluate.unheeded(recipe.evaluate))
    base = checkpoint.check(source.locate(recipe.model))
    check_schemes(recipe, base.path)
    device = devices.choose(recipe.device)
    rollout.check(recipe.rollout, device, recipe.train)
    return device, base.digest


def check_schemes(recipe: Recipe, base: Path) -> None:
    """Check that every scheme can store the model, whose folder is `base`, with the recipe's settings."""
    from qrl import quantize
    from qrl.quantize import settings as choices

    for scheme in recipe.quantize.schemes:
        settings = choices.of(scheme, recipe.quantize, recipe.seed)
        if recipe.model not in source.SHIPPED:  # the shipped model fits every scheme; the check imports torch
            quantize.check_fit(base, settings)
