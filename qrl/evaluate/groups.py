"""Accuracy by subject and level, if the questions have them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qrl import names, stats
from qrl.stats.text import table

if TYPE_CHECKING:
    import pandas as pd


def markdown(frame: pd.DataFrame) -> str:
    """Return a table per kind of group: a row per group, a column per cell, rates with 95 % interval and n.

    Several samples or training seeds are averaged per question; the intervals then cover question sampling only.

    Args:
        frame: a row per cell and question: variant, scheme, question, correct (0/1), perhaps subject, level and dtype.

    Returns:
        Markdown; empty if no question has a subject or level.
    """
    lines: list[str] = []
    for kind in ("subject", "level"):
        if kind in frame and frame[kind].notna().any():
            lines += [f"## By {kind}", "", *_table(frame, kind), ""]
    return "\n".join(lines)


def _table(frame: pd.DataFrame, kind: str) -> list[str]:
    grouped = frame[frame[kind].notna()]
    groups = sorted(grouped[kind].unique())
    columns = {kind: [f"{group:g}" if kind == "level" else group for group in groups]}
    for (variant, scheme), rows in grouped.groupby(["variant", "scheme"], sort=False):
        name = names.cell_name(variant, names.shown(scheme, rows.get(names.DTYPE, ())))
        columns[name] = [_rate(rows[rows[kind] == group]) for group in groups]
    return table(columns, zip(*columns.values(), strict=True))


def _rate(rows: pd.DataFrame) -> str:
    correct = rows.groupby("question")["correct"].mean()  # a question counts once, whatever its samples or seeds
    n = len(correct)
    if n < 2:
        return f"{correct.sum():g} of {n}"  # no interval from one answer
    rate = stats.rate(correct) if n < len(rows) else stats.accuracy(int(correct.sum()), n)
    return f"{rate.estimate:.3f} [{rate.low:.3f}, {rate.high:.3f}] (n = {n})"
