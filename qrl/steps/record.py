"""A checkpoint in the store: logged once, and found by its digest from then on."""

from pathlib import Path

from qrl import checkpoint, tasks
from qrl.recipe import Recipe
from qrl.tracking import models


def own(recipe: Recipe, path: Path, variant: str, scheme: str, *, parent: str, **facts: object) -> tuple[str, str]:
    """Log a step's own checkpoint by hard links; the step deletes its folder afterwards.

    Args:
        parent: digest of the weights that these were made from; a gate checks the lineage by it.
        facts: further facts, kept with the model.

    Returns:
        "models:/m-…" and the digest.
    """
    digest = checkpoint.digest(path)
    return _log(recipe, path, digest, variant, scheme, move=True, metadata={"parent": parent, **facts}), digest


def given(recipe: Recipe, address: str, weights: checkpoint.Checkpoint, variant: str, scheme: str) -> str:
    """Return the store's address of a user's checkpoint, which is copied there unless it is known by its digest."""
    if address.startswith("models:/m-"):
        return address
    if (known := models.find(weights.digest, _chat(recipe))) is not None:
        return known
    origin = str(Path(address).resolve()) if Path(address).is_dir() else address
    return _log(recipe, weights.path, weights.digest, variant, scheme, move=False, metadata={"source": origin})


def _log(
    recipe: Recipe, path: Path, digest: str, variant: str, scheme: str, *, move: bool, metadata: dict[str, object]
) -> str:
    facts = {"digest": digest, "variant": variant, "scheme": scheme, "task": tasks.label(recipe.task)}
    metadata |= {models.CHAT: _chat(recipe)} if recipe.chat.template_kwargs else {}
    uri, _ = models.log_checkpoint(path, name=f"{variant}-{scheme}", **facts, move=move, metadata=metadata)
    return uri


def _chat(recipe: Recipe) -> str:
    return recipe.flat("chat")["chat.template_kwargs"]
