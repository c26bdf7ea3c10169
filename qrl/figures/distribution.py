"""How weights are spread in each matrix, outliers and all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from qrl.figures.canvas import INK, VARIANTS, canvas, finish
from qrl.figures.heatmaps import ORDER
from qrl.names import BASE

MINOR = (2, 3, 4, 5, 6, 8)  # what is written between the decades
LEVELS = (("abs_q99", "99 %", 0.9), ("abs_q999", "99.9 %", 0.6), ("abs_q9999", "99.99 %", 0.35))


def spread(weights: pd.DataFrame, path: str | Path, multiplier: float = 6.0) -> None:
    """Quantiles of |w| over its median, matrix by matrix, base beside the trained variant; a dot is the largest weight.

    Args:
        weights: a row per variant and tensor, with `median_abs`, `abs_q99`, `abs_q999`, `abs_q9999` and `max_abs`.
        path: the PNG to write.
        multiplier: what counts as an outlier; drawn as a line.
    """
    kinds = [kind for kind in ORDER if kind in set(weights["projection"])]
    kinds += sorted(set(weights["projection"]) - set(kinds))
    variants = [BASE, *sorted(set(weights["variant"]) - {BASE})]
    figure, axes = canvas(7.4, 4.8)
    for i, variant in enumerate(variants):
        rows, colour = weights[weights["variant"] == variant], VARIANTS[i % len(VARIANTS)]
        offset = (i - (len(variants) - 1) / 2) * 0.8 / len(variants)
        for x, kind in enumerate(kinds):
            _column(axes, rows[rows["projection"] == kind], x + offset, 0.32 / len(variants), colour)
        axes.plot([], [], "s", color=colour, label=variant)
    axes.axhline(multiplier, color=INK, lw=1, ls=(0, (4, 2)))
    axes.annotate(
        f"outliers:\nabove {multiplier:g}",
        (1.01, multiplier),
        xycoords=("axes fraction", "data"),
        va="center",
        size=9,
        color=INK,
        annotation_clip=False,
    )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(lambda x, _: f"{x:g}" if x in MINOR else "")
    axes.set_xlim(-0.5, len(kinds) - 0.5)
    axes.set_xticks(range(len(kinds)), [kind.removesuffix("_proj") for kind in kinds])
    axes.set_ylabel("|w| / median |w|")
    axes.grid(axis="x", visible=False)
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(variants), borderaxespad=0.2)
    shares = ", ".join(name for _, name, _ in LEVELS)
    note = f"{weights['tensor'].nunique()} matrices. Bars: up to where {shares} of the weights lie, ever fainter\n(quantiles of |w|, mean over layers); dots: the largest weight of each matrix."
    finish(figure, axes, spread_found(weights, variants, multiplier), note, path)


def spread_found(weights: pd.DataFrame, variants: list[str], multiplier: float) -> str:
    """The finding, as a title."""
    totals = []
    for variant in variants:
        rows = weights[weights["variant"] == variant]
        share = (rows["abs_outlier_frac"] * rows["numel"]).sum() / rows["numel"].sum()
        totals.append(f"{1e6 * share:,.3g} of a million weights of {variant}")
    return f"Outliers, above {multiplier:g} × the median: {' and '.join(totals)}"


def _column(axes, rows: pd.DataFrame, x: float, half: float, colour: str) -> None:
    if not len(rows):
        return
    bottom = 1.0
    for column, _, alpha in LEVELS:
        top = float(np.mean(rows[column] / rows["median_abs"]))
        axes.fill_betweenx([bottom, max(top, bottom)], x - half, x + half, color=colour, alpha=alpha, lw=0)
        bottom = max(top, bottom)
    axes.plot([x] * len(rows), rows["max_abs"] / rows["median_abs"], "o", ms=4, color=colour, mec="white", mew=0.6)
