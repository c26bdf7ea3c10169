"""Cells with answers that quantization made unhealthy: they count, and the tables mark them.

`evaluate` writes the reason into the rows of such a cell. Without that column, unfinished answers are counted.
"""

from collections.abc import Mapping

import pandas as pd

from qrl import names, stats
from qrl.compare.evidence import Cell
from qrl.recipe import Evaluate
from qrl.stats.text import percent

MARK = "†"
MOST_UNFINISHED: float = Evaluate.model_fields["max_truncation_rate"].default


def notes(frame: pd.DataFrame) -> dict[Cell, str]:
    """Return what quantization did to the answers of cells, such as `16 % unfinished, 3 % at full precision`.

    Args:
        frame: columns variant, scheme, and `unhealthy` or `finish_reason`, if either is known; a row per answer.

    Returns:
        Only cells under a scheme that are marked in their rows. In a table without marks: cells for which the share of
        unfinished answers is shown to be above 5 %, while that of the same variant at full precision is not.
    """
    if names.UNHEALTHY not in frame:
        return _unfinished(frame) if "finish_reason" in frame else {}
    rows = pd.DataFrame(frame[frame[names.UNHEALTHY].notna()])
    marks: dict[Cell, dict[str, None]] = {}  # in the order of the rows, each text once
    for variant, scheme, text in rows[["variant", "scheme", names.UNHEALTHY]].astype(str).itertuples(index=False):
        marks.setdefault((variant, scheme), {})[text] = None
    return {cell: "; ".join(texts) for cell, texts in marks.items()}


def _unfinished(frame: pd.DataFrame) -> dict[Cell, str]:
    rows = pd.DataFrame(frame[frame["finish_reason"].isin(["stop", "length"])])
    rows = rows.assign(cut=rows["finish_reason"] == "length")
    counts = rows.groupby(["variant", "scheme"], observed=True)["cut"].agg(["sum", "size"])

    by_cell: dict[Cell, str] = {}
    for (variant, scheme), (cut, n) in zip(counts.index, counts.to_numpy(), strict=True):
        if scheme == names.FULL or (variant, names.FULL) not in counts.index:
            continue
        cut_full, n_full = counts.loc[(variant, names.FULL)]
        # Only a change is quantization's doing: a variant that is cut off at full precision too stays unmarked.
        if _is_above_limit(cut, n) and not _is_above_limit(cut_full, n_full):
            shares = f"{percent(cut / n)} unfinished, {percent(cut_full / n_full)} at full precision"
            by_cell[str(variant), str(scheme)] = shares
    return by_cell


def _is_above_limit(count: int, n: int) -> bool:
    """Return whether the 95 % interval of a share of unfinished answers is above the default limit."""
    return n > 1 and stats.accuracy(int(count), int(n)).low > MOST_UNFINISHED


def section(unhealthy: Mapping[str, str]) -> list[str]:
    """Return the lines on such cells, below the table that marks them; by the cell's name."""
    if not unhealthy:
        return []
    lines = [f"- {name}: {note}" for name, note in unhealthy.items()]
    meaning = f"{MARK} Quantization changed how answers end, or whether they can be read, beyond the limits of health"
    remark = f"{meaning}. The cell counts, with unfinished answers as wrong; no gate lets it pass."
    return [remark, "", *lines, ""]
