"""Methods as a forest plot: each one's error against full precision, best first."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from qrl.figures.canvas import BLUE, FAINT, GREEN, GREY, INK, ORANGE, PURPLE, canvas, finish
from qrl.stats import signed

if TYPE_CHECKING:
    from qrl.compare.ranking import Methods

COLOURS = (
    ("base", GREY),
    ("grpo", BLUE),
    ("qat", GREEN),
    ("qad", PURPLE),
    ("", ORANGE),
)  # by how a method's name begins


def methods(found: Methods, finding: str, path: str | Path) -> None:
    """Accuracy of every method minus that of GRPO in full precision, with 95 % intervals; ticks are training runs.

    Args:
        found: of `compare.methods`.
        finding: the title.
        path: the PNG to write.
    """
    rows = [row for row in found.rows if row.error is not None]
    figure, axes = canvas(8.4, 2.0 + 0.3 * len(rows))
    for y, row in enumerate(rows):
        value = row.error
        colour = next(colour for start, colour in COLOURS if row.variant.startswith(start))
        axes.plot([value.low, value.high], [y, y], color=colour, lw=2.2, solid_capstyle="butt")
        axes.plot(value.estimate, y, "o", ms=7, color=colour)
        if value.runs:
            axes.plot(
                [each.estimate for each in value.runs.values],
                [y + 0.28] * value.runs.count,
                "|",
                ms=7,
                mew=1.4,
                color=FAINT,
            )
        text = f"{row.accuracy.estimate:.3f}   {signed(value.estimate)} [{signed(value.low)}, {signed(value.high)}]"
        axes.annotate(
            text, (1.02, y), xycoords=("axes fraction", "data"), va="center", color=INK, size=9, annotation_clip=False
        )
    axes.axvline(0, color=INK, lw=1)
    axes.set_ylim(len(rows) - 0.5, -0.6)
    axes.set_yticks(range(len(rows)), [f"{row.variant} · {row.scheme}" for row in rows], size=10)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("accuracy minus that of grpo in full precision")
    runs = (
        f"mean of {found.runs} training runs, their spread counted in (ticks: each run)"
        if found.runs > 1
        else "one training run each"
    )
    note = (
        f"n = {found.n} held-out questions, paired; {runs}. Bars are 95 % intervals; at the right accuracy and error."
    )
    finish(figure, axes, finding, note, path)
