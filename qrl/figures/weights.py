"""What training did to the error of rounding weights to few bits, and how the weights are distributed."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from qrl.figures.canvas import BLUE, FAINT, GREY, INK, LEGEND, ORANGE, base_first, by_variant, canvas, finish
from qrl.names import BASE

KINDS = (("attention", r"attn"), ("mlp", r"mlp"), ("other", r""))
ORDER = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MINOR = (2, 3, 4, 5, 6, 8)  # labelled between the decades
LEVELS = (("abs_q99", "99 %", 0.9), ("abs_q999", "99.9 %", 0.6), ("abs_q9999", "99.99 %", 0.35))


def layer_error(weights: pd.DataFrame, path: str | Path) -> None:
    """Draw the relative error of rounding by layer, and for each tensor the difference of errors base − trained.

    Args:
        weights: a row per variant and tensor: `variant`, `tensor`, `numel`, `proxy_bits`, and ‖W − Q(W)‖² / ‖W‖² as
            `w4_relative_mse` or `rtn_relative_mse`.
    """
    frame = weights.assign(place=weights["tensor"].map(_place))
    places = sorted(frame["place"].unique(), key=_order)
    x = {place: i for i, place in enumerate(places)}
    frame["x"] = frame["place"].map(x)
    variants = base_first(frame["variant"])
    figure, panels = canvas(7.4, 3.2 * min(2, len(variants)), rows=min(2, len(variants)))
    above, *below = np.atleast_1d(panels)
    for variant, rows, colour, _ in by_variant(frame):
        mean = _weighted(rows, rows["x"]).sort_index()
        style = {"lw": 5, "alpha": 0.45, "ms": 10} if variant == BASE else {"lw": 1.8, "ms": 5}
        above.plot(mean.index, mean, "o-", color=colour, label=variant, **style)
    above.set_ylabel("lost energy, ‖Q(W) − W‖² / ‖W‖²")
    above.legend(ncols=len(variants), **LEGEND)
    above.margins(y=0.25)
    if below:
        _changes(below[0], frame, variants)
    layers = [place for place in places if isinstance(place, int)]
    shown = [place for place in places if isinstance(place, str) or layers.index(place) % -(-len(layers) // 12) == 0]
    labels = [place if isinstance(place, int) else f"\n{place}" for place in shown]
    for axes in (above, *below):
        axes.set_xticks([x[place] for place in shown], labels)
    axes.set_xlabel("layer")
    note = (
        f"{frame['tensor'].nunique()} tensors of {', '.join(variants)}. "
        f"Lines: means over a layer, weighted by size{'; dots: single tensors' if below else ''}."
    )
    finish(figure, error_finding(frame, variants), note, path)


def _changes(axes, frame: pd.DataFrame, variants: list[str]) -> None:
    """Draw base's error minus the trained variant's, tensor by tensor, in percent of base's; the sign of the maps."""
    error = error_column(frame)
    base = frame[frame["variant"] == BASE].set_index("tensor")[error]
    trained = frame[frame["variant"].isin(variants[1:])]
    change = 100 * (1 - trained[error] / trained["tensor"].map(base))
    kinds = trained["tensor"].map(_kind)
    for (kind, _), mark, colour, shift in zip(KINDS, "os^", (BLUE, ORANGE, GREY), (-0.12, 0.12, 0), strict=True):
        if (own := kinds == kind).any():
            look = {"color": colour, "ms": 6, "alpha": 0.75, "mew": 0}
            axes.plot(trained.loc[own, "x"] + shift, change[own], mark, label=kind, **look)
    axes.axhline(0, color=INK, lw=1)
    axes.set_ylabel(f"{BASE} − {variants[1] if len(variants) == 2 else 'trained'}, % of {BASE}'s")
    corner = {"xycoords": "axes fraction", "textcoords": "offset points", "ha": "right"}
    axes.annotate("above 0: smaller after training", (1, 1), (0, 6), size=9, color=FAINT, **corner)
    axes.legend(ncols=len(KINDS), **LEGEND)


def bits(frame: pd.DataFrame) -> int:
    """Return the bits of the proxy that a table was measured with; 4 in old tables, which do not name them."""
    return int(frame["proxy_bits"].iloc[0]) if "proxy_bits" in frame else 4


def error_column(frame: pd.DataFrame) -> str:
    """Return the column of the proxy's relative error: `w4_…` for 4 bits and in old tables, else `rtn_…`."""
    return "w4_relative_mse" if "w4_relative_mse" in frame else "rtn_relative_mse"


def _place(tensor: str) -> int | str:
    """Return the number of a tensor's layer, or the name of what lies outside of the layers."""
    if layer := re.search(r"\.(\d+)\.", tensor):
        return int(layer[1])
    return tensor.removeprefix("model.").removesuffix(".weight").replace("embed_tokens", "embed")


def _order(place: int | str) -> tuple[int, str]:
    """Sort embeddings before the layers, the head and anything else after them."""
    if isinstance(place, int):
        return place, ""
    return (-1, place) if place == "embed" else (10**9, place)


def _kind(tensor: str) -> str:
    return next(name for name, pattern in KINDS if re.search(pattern, tensor))


def _weighted(frame: pd.DataFrame, by: Any) -> pd.Series:
    """Return relative error over groups of tensors, weighted by size; a tensor of zeros has none and does not count."""
    error, numel = frame[error_column(frame)], frame["numel"]
    sums = frame.assign(error=error * numel, numel=numel.where(error.notna()))
    sums = sums.groupby(by)[["error", "numel"]].sum(min_count=1)
    return sums["error"] / sums["numel"]


def error_finding(frame: pd.DataFrame, variants: list[str]) -> str:
    """Return the finding, as a title."""
    totals, rounding = _weighted(frame, frame["variant"]), f"Rounding to {bits(frame)} bits loses"
    if len(variants) == 1:
        return f"{rounding} {100 * totals[variants[0]]:.4g} % of the energy of {variants[0]}'s weights"
    before, after = 100 * totals[BASE], 100 * totals[variants[1]]
    loss = f"{rounding} {after:.4g} % of the weights' energy after training"
    if not before > 0:  # zeros, or weights that are multiples of their scales
        return f"{loss}; before training nothing was lost"
    change = 100 * (after / before - 1)
    if abs(change) < 0.1:
        return f"{loss}, as much as before ({before:.4g} %)"
    return f"{loss}, {abs(change):.2g} % {'more' if change > 0 else 'less'} than before ({before:.4g} %)"


def in_order(projections: Iterable[str]) -> list[str]:
    """Return the projections in a layer's order, others after them by name."""
    present = set(projections)
    known = [name for name in ORDER if name in present]
    return [*known, *sorted(present - set(known))]


def spread(weights: pd.DataFrame, path: str | Path, multiplier: float = 6.0) -> None:
    """Draw quantiles of |w| over its median by projection, base beside the trained variant; dots: the largest weights.

    Args:
        weights: a row per variant and tensor, with `median_abs`, `abs_q99`, `abs_q999`, `abs_q9999` and `max_abs`.
        multiplier: the threshold of outliers, drawn as a line.
    """
    kinds = in_order(weights["projection"])
    variants = base_first(weights["variant"])
    figure, axes = canvas(7.4, 4.8)
    for variant, rows, colour, place in by_variant(weights):
        for x, kind in enumerate(kinds):
            middle, half = x + place * 0.8 / len(variants), 0.32 / len(variants)
            _column(axes, rows[rows["projection"] == kind], middle, half, colour)
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
    totals = []
    for variant, rows, *_ in by_variant(weights):
        share = (rows["abs_outlier_frac"] * rows["numel"]).sum() / rows["numel"].sum()
        totals.append(f"{1e6 * share:,.3g} in {variant}")
    title = f"Outliers per million weights (above {multiplier:g} × the median): {', '.join(totals)}"
    finish(figure, title, note, path)


def _column(axes, rows: pd.DataFrame, x: float, half: float, colour: str) -> None:
    if not len(rows):
        return
    bottom = 1.0
    for column, _, alpha in LEVELS:
        top = float(np.mean(rows[column] / rows["median_abs"]))
        axes.fill_betweenx([bottom, max(top, bottom)], x - half, x + half, color=colour, alpha=alpha, lw=0)
        bottom = max(top, bottom)
    axes.plot([x] * len(rows), rows["max_abs"] / rows["median_abs"], "o", ms=4, color=colour, mec="white", mew=0.6)
