"""A checkpoint in the store: logged once, and found by its digest from then on."""

from pathlib import Path

from qrl import checkpoint, tasks
from qrl.recipe import Recipe
from qrl.tracking import models


def log_own(recipe: Recipe, path: Path, variant: str, scheme: str, *, parent: str, **facts: object) -> tuple[str, str]:
    """Log a step's own checkpoint by hard links; the step deletes its folder afterwards.

    Args:
        parent: digest of the weights that these were made from; a gate checks the lineage by it.
        facts: further facts, kept with the model.

    Returns:
        "models:/m-…" and the digest.
    """
    digest = checkpoint.digest(path)
    uri = _log(recipe, path, digest, variant, scheme, move=True, metadata={"parent": parent, **facts})
    return uri, digest


def log_given(recipe: Recipe, address: str, weights: checkpoint.Checkpoint, variant: str, scheme: str) -> str:
    """Return the store's address of a user's checkpoint; it is copied there unless the store has its digest."""
    if address.startswith("models:/m-"):
        return address
    logged_address = models.find(weights.digest, _chat(recipe))
    if logged_address is not None:
        return logged_address
    origin = str(Path(address).resolve()) if Path(address).is_dir() else address
    return _log(recipe, weights.path, weights.digest, variant, scheme, move=False, metadata={"source": origin})


def _log(
    recipe: Recipe, path: Path, digest: str, variant: str, scheme: str, *, move: bool, metadata: dict[str, object]
) -> str:
    if recipe.chat.template_kwargs:
        metadata = metadata | {models.CHAT: _chat(recipe)}
    uri, _ = models.log_checkpoint(
        path,
        name=f"{variant}-{scheme}",
        digest=digest,
        variant=variant,
        scheme=scheme,
        task=tasks.label(recipe.task),
        move=move,
        metadata=metadata,
    )
    return uri


def _chat(recipe: Recipe) -> str:
    """Return the variables of the chat template: the same weights under others are another model in the store."""
    return recipe.flat("chat")["chat.template_kwargs"]
