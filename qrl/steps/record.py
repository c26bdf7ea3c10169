"""A checkpoint in the store: logged once, found again by its digest."""

from __future__ import annotations

from pathlib import Path

from qrl import checkpoint
from qrl.recipe import Recipe
from qrl.tracking import models


def own(recipe: Recipe, path: Path, variant: str, scheme: str, *, parent: str, **facts: object) -> tuple[str, str]:
    """Logs a step's own checkpoint, whose folder is deleted afterwards, by hard links.

    Args:
        parent: digest of the weights that these were made from, which a gate's lineage check reads.
        facts: further facts, kept with the model.

    Returns:
        "models:/m-…" and the digest.
    """
    digest = checkpoint.digest(path)
    uri, _ = models.log_checkpoint(
        path,
        name=f"{variant}-{scheme}",
        digest=digest,
        variant=variant,
        scheme=scheme,
        task=recipe.task,
        move=True,
        metadata={"parent": parent, **facts},
    )
    return uri, digest


def given(recipe: Recipe, address: str, found: checkpoint.Checkpoint, variant: str, scheme: str) -> str:
    """The address in the store of somebody else's checkpoint: copied there once, found by its digest from then on."""
    if address.startswith("models:/m-"):
        return address
    if (known := models.find(found.digest)) is not None:
        return known
    uri, _ = models.log_checkpoint(
        found.path,
        name=f"{variant}-{scheme}",
        digest=found.digest,
        variant=variant,
        scheme=scheme,
        task=recipe.task,
        move=False,
        metadata={"source": address},
    )
    return uri
