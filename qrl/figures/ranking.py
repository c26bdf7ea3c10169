"""Methods as a forest plot: each one's difference from full precision, best first."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from qrl.figures.canvas import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, canvas, finish
from qrl.figures.comparison import draw_runs
from qrl.stats.text import interval

if TYPE_CHECKING:
    from qrl.compare.ranking import Methods

COLOURS = {"base": GREY, "grpo": BLUE, "qat": GREEN, "qad": PURPLE, "": ORANGE}  # by the prefix of a method's name


def methods(measured: Methods, title: str, path: str | Path) -> None:
    """Draw the accuracy of every method − that of GRPO at full precision, with 95 % intervals and a tick per run."""
    rows = [(row, row.error) for row in measured.rows if row.error is not None]
    figure, axes = canvas(8.4, 2.0 + 0.3 * len(rows))
    beside = {"xycoords": ("axes fraction", "data"), "va": "center", "color": INK, "size": 9, "annotation_clip": False}
    for y, (row, error) in enumerate(rows):
        colour = next(colour for prefix, colour in COLOURS.items() if row.variant.startswith(prefix))
        axes.plot([error.low, error.high], [y, y], color=colour, lw=2.2, solid_capstyle="butt")
        axes.plot(error.estimate, y, "o", ms=7, color=colour)
        draw_runs(axes, y, error)
        axes.annotate(f"{row.accuracy.estimate:.3f}   {interval(error)}", (1.02, y), **beside)
    axes.axvline(0, color=INK, lw=1)
    axes.set_ylim(len(rows) - 0.5, -0.6)
    axes.set_yticks(range(len(rows)), [measured.shown(row.cell) for row, _ in rows], size=10)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("accuracy − accuracy of grpo at full precision")
    runs = "one training run each"
    if measured.runs > 1:
        runs = f"mean of {measured.runs} training runs, intervals include their spread (ticks: each run)"
    note = f"n = {measured.n} held-out questions, paired; {runs}. Bars: 95 % intervals. Right: accuracy, difference."
    finish(figure, axes, title, note, path)
