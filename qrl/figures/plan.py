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
POINTS = 16  # of a curve
STUDIES = 200  # simulated for each point


def chances(plan: Plan, path: str | Path) -> None:
    """Draw the probability to show the gain (dashed) and of the verdict (solid), for the fewest runs and for enough."""
    figure, axes = canvas(7.4, 4.6)
    rows = [plan.rows[0]]
    if len(plan.rows) > 1:
        rows.append(enough(plan) or plan.rows[-1])
    sizes = np.unique(np.geomspace(20, widest(plan.rows), POINTS).astype(int))
    for row, colour in zip(rows, COLOURS, strict=False):
        chances_by_size = [plan.chances(int(n), row.seeds, studies=STUDIES) for n in sizes]
        gain_chances = [chances.shown for chances in chances_by_size]
        verdict_chances = [chances.words[plan.verdict] for chances in chances_by_size]
        runs = f", {row.seeds} runs" if row.seeds > 1 else ""
        axes.plot(sizes, gain_chances, color=colour, lw=1.6, ls=(0, (4, 2)), label=f"gain shown{runs}")
        axes.plot(sizes, verdict_chances, color=colour, lw=2.6, label=f"{plan.verdict}{runs}")
    axes.axhline(plan.power, color=INK, lw=1)
    if plan.n is not None:
        axes.axvline(plan.n, color=GREY, lw=1.4)
        axes.annotate(f"n = {plan.n:,}", (plan.n, 0.02), (4, 0), textcoords="offset points", color=FAINT, size=9.5)
    axes.set_xscale("log")
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("questions of each training run")
    axes.set_ylabel("probability")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5))
    assumed = plan.assumed
    note = (
        f"Assumed: base {assumed.base_accuracy:.2f}, gain {assumed.gain:.3f}, "
        f"loss of gain {signed(assumed.drop).lstrip('+')}, margin {assumed.expected_margin:.3f}, "
        f"correlations {assumed.correlation:.2f} and {assumed.scheme_correlation:.2f}.\n"
        f"Horizontal line: the wanted power, {plan.power:.2f}. Each point is from {STUDIES} simulated studies."
    )
    finish(figure, summary(plan).replace("`", ""), note, path)
