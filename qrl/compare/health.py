"""Cells whose answers quantization made unhealthy: they count, and whoever reads their accuracy is told.

`evaluate` says so in the rows of such a cell. In a file without that column, answers that do not end are looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pandas as pd

from qrl import names, stats
from qrl.recipe import Evaluate
from qrl.stats.text import percent

if TYPE_CHECKING:
    from qrl.compare.evidence import Cell

MARK = "†"
MOST_UNFINISHED: float = Evaluate.model_fields["max_truncation_rate"].default


def notes(frame: pd.DataFrame) -> dict[Cell, str]:
    """Return what quantization did to the answers of cells, such as `16 % unfinished, 3 % at full precision`.

    Args:
        frame: columns variant, scheme, and `unhealthy` or `finish_reason`, if either is known; a row per answer.

    Returns:
        Only cells under a scheme that are marked in their rows. In a table without marks: whose share of unfinished
        answers is shown to be above 5 %, where that of the same variant at full precision is not.
    """
    if names.UNHEALTHY in frame:
        rows = pd.DataFrame(frame[frame[names.UNHEALTHY].notna()])
        marks: dict[Cell, dict[str, None]] = {}  # in the order of the rows, each text once
        for variant, scheme, text in rows[["variant", "scheme", names.UNHEALTHY]].astype(str).itertuples(index=False):
            marks.setdefault((variant, scheme), {})[text] = None
        return {cell: "; ".join(texts) for cell, texts in marks.items()}
    return _unfinished(frame) if "finish_reason" in frame else {}


def _unfinished(frame: pd.DataFrame) -> dict[Cell, str]:
    known = pd.DataFrame(frame[frame["finish_reason"].isin(["stop", "length"])])
    cut = known.assign(cut=known["finish_reason"] == "length")
    shares = cut.groupby(["variant", "scheme"], observed=True)["cut"].agg(["sum", "size"])
    found: dict[Cell, str] = {}
    for (variant, scheme), (count, n) in zip(shares.index, shares.to_numpy(), strict=True):
        full = shares.loc[(variant, names.FULL)] if (variant, names.FULL) in shares.index else None
        if scheme == names.FULL or full is None or _is_above(*full) or not _is_above(count, n):
            continue
        at_full = percent(full["sum"] / full["size"])
        found[str(variant), str(scheme)] = f"{percent(count / n)} unfinished, {at_full} at full precision"
    return found


def _is_above(count: int, n: int) -> bool:
    """Return whether the 95 % interval of a share of unfinished answers lies above the default limit."""
    return n > 1 and stats.accuracy(int(count), int(n)).low > MOST_UNFINISHED


def section(marked: Mapping[str, str]) -> list[str]:
    """Return the lines that tell of such cells, below the table that marks them; by the cell's name."""
    if not marked:
        return []
    lines = [f"- {name}: {note}" for name, note in marked.items()]
    meaning = f"{MARK} Quantization changed how answers end, or whether they can be read, beyond the limits of health"
    remark = f"{meaning}. The cell counts, with unfinished answers as wrong; no gate lets it pass."
    return [remark, "", *lines, ""]
