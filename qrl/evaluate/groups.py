"""Accuracy by subject and level, where the questions say what they are about and how hard they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qrl import names, stats

if TYPE_CHECKING:
    import pandas as pd

GROUPS = ("subject", "level")


def markdown(frame: pd.DataFrame) -> str:
    """A table per kind of group: a row a group, a column a cell, each rate with its 95 % interval and its n.

    Several samples or training seeds are averaged question by question; the intervals are then those of the questions alone.

    Args:
        frame: a row per cell and question, with variant, scheme, question and correct (0/1); `subject` and `level` where known.

    Returns:
        Markdown; empty where no question has either.
    """
    return "\n".join(
        table for kind in GROUPS if kind in frame and frame[kind].notna().any() for table in _table(frame, kind)
    )


def _table(frame: pd.DataFrame, kind: str) -> list[str]:
    known = frame[frame[kind].notna()]
    cells = list(dict.fromkeys(zip(known["variant"], known["scheme"], strict=True)))
    lines = [
        f"## By {kind}",
        "",
        f"| {kind} | {' | '.join(names.cell_name(*cell) for cell in cells)} |",
        "|---|" + "---:|" * len(cells),
    ]
    for group in sorted(known[kind].unique()):
        here = known[known[kind] == group]
        rates = [_rate(here[(here["variant"] == variant) & (here["scheme"] == scheme)]) for variant, scheme in cells]
        lines.append(f"| {f'{group:g}' if kind == 'level' else group} | {' | '.join(rates)} |")
    return [*lines, ""]


def _rate(rows: pd.DataFrame) -> str:
    correct = rows.groupby("question")[
        "correct"
    ].mean()  # a question counts once, however many samples or seeds answered it
    if len(correct) < 2:
        return f"{correct.sum():g} of {len(correct)}"  # no interval stands on one answer
    if len(correct) < len(rows):
        return _shown(stats.rate(correct))
    return _shown(stats.accuracy(int(correct.sum()), len(correct)))


def _shown(found: stats.Estimate) -> str:
    return f"{found.estimate:.3f} [{found.low:.3f}, {found.high:.3f}] (n = {found.n})"
