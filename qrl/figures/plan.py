"""A plan as curves: the probability of a verdict over the number of questions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from qrl.figures.canvas import BLUE, FAINT, GREEN, GREY, INK, canvas, finish
from qrl.plan.table import enough, summary, widest
from qrl.stats.estimate import signed

if TYPE_CHECKING:
    from qrl.plan import Plan

COLOURS = (BLUE, GREEN)
SIZES, STUDIES = 16, 200  # points of a curve, and simulated studies behind each


def chances(plan: Plan, path: str | Path) -> None:
    """Draw the probability to show the gain (dashed) and of the verdict (solid), for the fewest runs and for enough."""
    figure, axes = canvas(7.4, 4.6)
    rows = [plan.rows[0]]
    if len(plan.rows) > 1:
        rows.append(enough(plan) or plan.rows[-1])
    sizes = np.unique(np.geomspace(20, widest(plan.rows), SIZES).astype(int))
    for row, colour in zip(rows, COLOURS, strict=False):
        of_sizes = [plan.chances(int(n), row.seeds, studies=STUDIES) for n in sizes]
        shown = [of_size.shown for of_size in of_sizes]
        decided = [of_size.words[plan.verdict] for of_size in of_sizes]
        runs = f", {row.seeds} runs" if row.seeds > 1 else ""
        axes.plot(sizes, shown, color=colour, lw=1.6, ls=(0, (4, 2)), label=f"gain shown{runs}")
        axes.plot(sizes, decided, color=colour, lw=2.6, label=f"{plan.verdict}{runs}")
    axes.axhline(plan.power, color=INK, lw=1)
    if plan.n is not None:
        axes.axvline(plan.n, color=GREY, lw=1.4)
        axes.annotate(f"n = {plan.n:,}", (plan.n, 0.02), (4, 0), textcoords="offset points", color=FAINT, size=9.5)
    axes.set_xscale("log")
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("questions of each training run")
    axes.set_ylabel("probability")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5))
    a = plan.assumed
    note = (
        f"Assumed: base {a.base_accuracy:.2f}, gain {a.gain:.3f}, loss of gain {signed(a.drop).lstrip('+')}, "
        f"margin {a.expected_margin:.3f}, correlations {a.correlation:.2f} and {a.scheme_correlation:.2f}.\n"
        f"Horizontal line: the wanted power, {plan.power:.2f}. Each point is from {STUDIES} simulated studies."
    )
    finish(figure, summary(plan).replace("`", ""), note, path)
