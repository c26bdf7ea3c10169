"""Check that what a library stored still has the original's output head, which no scheme quantizes.

Layer errors end below the head, so that a head that was dropped, tied or exchanged would not show in them.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from qrl import checkpoint
from qrl.checkpoint import head, header
from qrl.checkpoint.header import Entry
from qrl.checkpoint.stream import Rows
from qrl.errors import BadInput, QrlError
from qrl.formats import rotation

LAST_NORM = "model.norm.weight"
_MAX_ROW_ERROR = 1 / 32  # ‖row − row'‖ / ‖row‖; rounding to bfloat16 changes at most 1/256 of it
_BLOCK_ROWS = 4096


def check_stored(source: Path, out: Path) -> checkpoint.Checkpoint:
    """Check a quantized checkpoint as `checkpoint.check` does, and its head against the original's; return it.

    Raises:
        QrlError: the folder is no whole checkpoint, or loaders would use another head than the original's.
    """
    try:
        stored = checkpoint.check(out)
    except BadInput as error:
        raise QrlError(f"A library stored a checkpoint that qrl does not read: {error}") from None
    row = other_row(source, out)
    if row is not None:
        raise QrlError(
            f"The quantized copy of {source} has another output head than the original, from row {row} on: nothing was "
            "kept. Report it, and use another scheme, such as nf4."
        )
    return stored


def other_row(source: Path, out: Path) -> int | None:
    """Return the first row, a token's, in which a copy's head differs from the original's by more than rounding.

    None where there is none, or where a head is stored as codes. SpinQuant turns the head's inputs and moves the last
    norm's weight into it; both are undone first.
    """
    original = _head(source)
    copied = _head(out)
    if original is None or copied is None:
        return None
    if original.shape != copied.shape:
        return 0
    stream = rotation.of(checkpoint.config(out).get("quantization_config") or {}).get(rotation.STREAM)
    norm = dict(checkpoint.tensors(source, [LAST_NORM]))[LAST_NORM].float() if stream else None
    row_count = original.shape[0]
    with closing(Rows(source)) as original_rows, closing(Rows(out)) as copied_rows:
        for first in range(0, row_count, _BLOCK_ROWS):
            last = min(row_count, first + _BLOCK_ROWS)
            expected = original_rows.read(original, first, last).float()
            found = copied_rows.read(copied, first, last).float()
            if norm is not None:
                expected *= norm
                found = rotation.turned(found, stream["head_dim"])
            errors = (found - expected).norm(dim=-1)
            differs = ~(errors <= _MAX_ROW_ERROR * expected.norm(dim=-1))  # NaN differs
            if differs.any():
                return first + int(differs.nonzero()[0, 0])
    return None


def _head(folder: Path) -> Entry | None:
    """Return the entry of the matrix that logits are computed with; None where it is unknown or stored as codes."""
    entry_of = checkpoint.entries(folder)
    name = head.used(checkpoint.config(folder), entry_of)
    entry = entry_of.get(name) if name else None
    return entry if entry is not None and entry.dtype in header.FLOATS else None
