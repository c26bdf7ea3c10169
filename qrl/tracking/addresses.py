"""Where the address of a model or an adapter leads: the store, a folder, or the hub."""

from pathlib import Path

from qrl import checkpoint, names, process, source
from qrl.errors import BadInput
from qrl.formats import kind
from qrl.tracking import contents, models, store


def folder(address: str) -> Path:
    """Return the folder of a model or an adapter: `models:/…`, `runs:/RUN/PATH`, or what `source.locate` finds.

    Raises:
        BadInput: nothing is there, or the store cannot be used.
    """
    if not address.startswith(("models:/", "runs:/")):
        return source.locate(address)
    store.prepare()
    if address.startswith("models:/"):
        return models.local_path(address)
    run_id, _, path = address.removeprefix("runs:/").partition("/")
    return contents.artifact(run_id, path)


def scheme(address: str) -> str | None:
    """Return the scheme of a model in the store that `quantize` made; None for any other address."""
    if not address.startswith("models:/m-"):
        return None
    params = models.params(address)
    return names.scheme(params["scheme"]) if names.SETTINGS in params else None


def stored_as(cell: tuple[str, str], address: str) -> checkpoint.Checkpoint:
    """Return a cell's checkpoint, after checking that it is stored under the cell's scheme.

    Args:
        cell: variant and scheme.
        address: of the model, as in `folder`.

    Raises:
        BadInput: it is stored otherwise, or there is no such model.
    """
    stored_scheme = names.stored(cell[1])
    weights = checkpoint.check(folder(address))
    mismatch = _mismatch(weights, stored_scheme, scheme(address))
    if mismatch is None:
        return weights
    actual, expected = mismatch
    raise BadInput(
        f"Cell {':'.join(cell)} was given {address}, which is stored as {actual}: expected {expected}; correct the "
        f"label or the model (`{process.command('quantize', {})}` stores a model under a scheme)."
    )


def _mismatch(
    weights: checkpoint.Checkpoint, stored_scheme: str, recorded_scheme: str | None
) -> tuple[str, str] | None:
    """Return how a checkpoint is stored and how its scheme would store it, in words; None if both are the same."""
    method = names.STORED_AS[stored_scheme]
    if weights.quantization != method:
        return weights.quantization or "full precision", method or "full precision"

    # Several schemes share one method; the kinds of codes tell most of them apart, and the store's record the rest.
    kinds = kind.of(checkpoint.config(weights.path).get("quantization_config") or {})
    expected_kinds = kind.KINDS.get(stored_scheme, ())
    is_mixed = len(kinds) > 1  # linears in a format of their own, beside those of the scheme
    if not (kinds & set(expected_kinds) if is_mixed else kinds <= set(expected_kinds)):
        return " and ".join(sorted(kinds)), " or ".join(expected_kinds)
    if recorded_scheme not in (None, stored_scheme):
        return recorded_scheme, stored_scheme
    return None
