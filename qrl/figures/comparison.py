"""Cells and verdicts: accuracies with their intervals, gain survival against the margin."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qrl.figures.canvas import FAINT, GREEN, INK, ORANGE, RED, VARIANTS, canvas, finish
from qrl.names import FULL
from qrl.stats import signed

if TYPE_CHECKING:
    from qrl.compare import Comparison

VERDICTS = {"survives": GREEN, "lost": RED, "inconclusive": ORANGE}
LABEL = {"facecolor": "white", "edgecolor": "none", "pad": 1}


def matrix(comparison: Comparison, path: str | Path) -> None:
    """Accuracy of every cell, variants beside each other under each scheme, with 95 % intervals and n.

    Args:
        comparison: of `qrl.compare`.
        path: the PNG to write.
    """
    figure, axes = canvas(6.4 + 0.9 * max(0, len(comparison.schemes) - 3), 4.4)
    spread = 0.24 if len(comparison.variants) == 2 else 0.78 / len(comparison.variants)
    for i, variant in enumerate(comparison.variants):
        offset = (i - (len(comparison.variants) - 1) / 2) * spread
        cells = [comparison.cells[variant, scheme] for scheme in comparison.schemes]
        x = np.arange(len(cells)) + offset
        y = np.array([cell.estimate for cell in cells])
        errors = [[cell.estimate - cell.low for cell in cells], [cell.high - cell.estimate for cell in cells]]
        colour = VARIANTS[i % len(VARIANTS)]
        axes.errorbar(x, y, yerr=errors, fmt="o", ms=8, lw=2, capsize=4, color=colour, label=variant, zorder=3)
        if len(comparison.variants) == 2:  # beside the point, away from the other one
            place = {"xytext": (-9 if i == 0 else 9, 0), "ha": "right" if i == 0 else "left", "va": "center"}
        else:
            place = {"xytext": (0, 4), "ha": "center", "va": "bottom"}
        for px, cell in zip(x, cells, strict=True):
            at = cell.estimate if len(comparison.variants) == 2 else cell.high
            axes.annotate(
                f"{cell.estimate:.3f}", (px, at), textcoords="offset points", color=colour, size=9, bbox=LABEL, **place
            )
    axes.set_xticks(range(len(comparison.schemes)), comparison.schemes, size=12)
    axes.set_xlim(-0.6, len(comparison.schemes) - 0.4)
    axes.margins(y=0.12)
    axes.set_ylabel("accuracy")
    axes.grid(axis="x", visible=False)
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=len(comparison.variants), frameon=False, borderaxespad=0.2
    )
    gain = comparison.row(FULL)
    found = _gain_found(gain.variant, gain.delta)
    runs = len(comparison.runs)
    asked = "the same for all" if comparison.paired else "counted per cell"
    note = f"n = {comparison.n} questions per cell, {asked}; bars are 95 % intervals of each cell (Wilson)"
    if runs > 1:
        note = f"n = {comparison.n} questions, mean of {runs} seeds; bars are 95 % intervals of each cell, seeds' spread counted in"
    note += (
        ".\nDifferences are paired, so their intervals are mostly narrower than these bars suggest."
        if comparison.paired
        else "."
    )
    finish(figure, axes, found, note, path)


def survival(comparison: Comparison, path: str | Path) -> None:
    """Gain survival of every quantized scheme as a forest plot, with the margin beyond which the gain counts as lost.

    Args:
        comparison: of `qrl.compare`, with at least one quantized scheme.
        path: the PNG to write.
    """
    rows = [row for row in comparison.rows if row.verdict]
    if not rows:
        raise ValueError("There is no quantized scheme, so gain survival is not defined: expected one beside full.")
    figure, axes = canvas(7.4, 1.9 + 0.72 * len(rows))
    several = len(comparison.variants) > 2
    each = [abs(alone.estimate) for row in rows if row.gain_survival.runs for alone in row.gain_survival.runs.values]
    reach = (
        max(
            *each,
            *(max(abs(row.gain_survival.low), abs(row.gain_survival.high), row.verdict.margin) for row in rows),
            0,
        )
        * 1.15
    )
    for y, row in enumerate(rows):
        value, colour = row.gain_survival, VERDICTS[row.verdict.verdict]
        axes.fill_betweenx([y - 0.5, y + 0.5], -reach, -row.verdict.margin, color=RED, alpha=0.08, lw=0)
        axes.plot([-row.verdict.margin] * 2, [y - 0.5, y + 0.5], color=RED, lw=1.4, ls=(0, (4, 2)))
        axes.plot([value.low, value.high], [y, y], color=colour, lw=2.2, solid_capstyle="butt")
        axes.plot([value.lower, value.upper], [y, y], color=colour, lw=6, solid_capstyle="butt")
        axes.plot(value.estimate, y, "o", ms=9, color="white", mec=colour, mew=2.4)
        if value.runs:
            axes.plot(
                [alone.estimate for alone in value.runs.values],
                [y + 0.28] * value.runs.count,
                "|",
                ms=9,
                mew=1.6,
                color=FAINT,
            )
        text = f"{row.verdict.verdict}\n{signed(value.estimate)} [{signed(value.low)}, {signed(value.high)}]"
        axes.annotate(
            text, (1.02, y), xycoords=("axes fraction", "data"), va="center", color=INK, size=10, annotation_clip=False
        )
    axes.axvline(0, color=INK, lw=1)
    axes.set_xlim(-reach, reach)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(
        range(len(rows)), [f"{row.variant} · {row.scheme}" if several else row.scheme for row in rows], size=12
    )
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("gain survival: gain under the scheme minus gain at full precision (accuracy)")
    axes.annotate(
        "−margin", (-rows[0].verdict.margin, -0.5), (-4, 3), textcoords="offset points", ha="right", color=RED, size=9.5
    )
    pairing = "paired" if comparison.paired else "independent cells"
    note = f"n = {comparison.n} questions, {pairing}. Thin bar: 95 % interval; thick bar: between the one-sided 95 % bounds,\nwhich must clear the margin (dashed): right of it the gain survives, left of it (shaded) it is lost."
    if len(comparison.runs) > 1:
        note += f"\nMean of {len(comparison.runs)} seeds, their spread counted in; ticks: each seed."
    finish(figure, axes, _survival_found(rows, several), note, path)


def _gain_found(variant: str, gain: Any) -> str:
    interval = f"{signed(gain.estimate)} [{signed(gain.low)}, {signed(gain.high)}]"
    if gain.low > 0:
        return f"{variant} gains {interval} at full precision"
    return (
        f"{variant}: no gain shown at full precision, {interval}"
        if gain.high >= 0
        else f"{variant} loses at full precision, {interval}"
    )


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _survival_found(rows: list, several: bool) -> str:
    by_verdict = {verdict: [row.scheme for row in rows if row.verdict.verdict == verdict] for verdict in VERDICTS}
    if several:
        counts = (f"{verdict} in {len(schemes)}" for verdict, schemes in by_verdict.items() if schemes)
        return f"Gain under {len(rows)} variants and schemes: {', '.join(counts)}"
    says = {
        "survives": "{gain} survives {}",
        "lost": "{gain} is lost under {}",
        "inconclusive": "whether {gain} survives {} is inconclusive",
    }
    parts = [says[verdict].replace("{}", _listed(schemes)) for verdict, schemes in by_verdict.items() if schemes]
    found = "; ".join(part.replace("{gain}", "it" if i else "the gain") for i, part in enumerate(parts))
    return found[0].upper() + found[1:]
