"""The distribution of weights in each matrix, outliers included."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from qrl.figures.canvas import INK, LEGEND, VARIANTS, base_first, canvas, finish
from qrl.figures.heatmaps import in_order

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MINOR = (2, 3, 4, 5, 6, 8)  # labelled between the decades
LEVELS = (("abs_q99", "99 %", 0.9), ("abs_q999", "99.9 %", 0.6), ("abs_q9999", "99.99 %", 0.35))


def spread(weights: pd.DataFrame, path: str | Path, multiplier: float = 6.0) -> None:
    """Draw quantiles of |w| over its median by projection, base beside the trained variant; dots: the largest weights.

    Args:
        weights: a row per variant and tensor, with `median_abs`, `abs_q99`, `abs_q999`, `abs_q9999` and `max_abs`.
        path: the PNG to write.
        multiplier: the threshold of outliers, drawn as a line.
    """
    kinds = in_order(weights["projection"])
    variants = base_first(weights["variant"])
    figure, axes = canvas(7.4, 4.8)
    for i, variant in enumerate(variants):
        rows, colour = weights[weights["variant"] == variant], VARIANTS[i % len(VARIANTS)]
        offset = (i - (len(variants) - 1) / 2) * 0.8 / len(variants)
        for x, kind in enumerate(kinds):
            _column(axes, rows[rows["projection"] == kind], x + offset, 0.32 / len(variants), colour)
        axes.plot([], [], "s", color=colour, label=variant)
    axes.axhline(multiplier, color=INK, lw=1, ls=(0, (4, 2)))
    beside = {"xycoords": ("axes fraction", "data"), "va": "center", "annotation_clip": False}
    axes.annotate(f"outliers:\nabove {multiplier:g}", (1.01, multiplier), size=9, color=INK, **beside)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(lambda x, _: f"{x:g}" if x in MINOR else "")
    axes.set_xlim(-0.5, len(kinds) - 0.5)
    axes.set_xticks(range(len(kinds)), [kind.removesuffix("_proj") for kind in kinds])
    axes.set_ylabel("|w| / median |w|")
    axes.grid(axis="x", visible=False)
    axes.legend(ncols=len(variants), **LEGEND)
    shares = ", ".join(name for _, name, _ in LEVELS)
    note = (
        f"{weights['tensor'].nunique()} matrices. Bars end where {shares} of weights are smaller, from dark to light\n"
        "(quantiles of |w|, mean over layers). Dots: the largest weight of each matrix."
    )
    finish(figure, axes, spread_finding(weights, variants, multiplier), note, path)


def spread_finding(weights: pd.DataFrame, variants: list[str], multiplier: float) -> str:
    """Return the finding, as a title."""
    totals = []
    for variant in variants:
        rows = weights[weights["variant"] == variant]
        share = (rows["abs_outlier_frac"] * rows["numel"]).sum() / rows["numel"].sum()
        totals.append(f"{1e6 * share:,.3g} in {variant}")
    return f"Outliers per million weights (above {multiplier:g} × the median): {', '.join(totals)}"


def _column(axes: Axes, rows: pd.DataFrame, x: float, half: float, colour: str) -> None:
    if not len(rows):
        return
    bottom = 1.0
    for column, _, alpha in LEVELS:
        top = float(np.mean(rows[column] / rows["median_abs"]))
        axes.fill_betweenx([bottom, max(top, bottom)], x - half, x + half, color=colour, alpha=alpha, lw=0)
        bottom = max(top, bottom)
    axes.plot([x] * len(rows), rows["max_abs"] / rows["median_abs"], "o", ms=4, color=colour, mec="white", mew=0.6)
