"""What training did to the error of rounding weights to few bits, and how the weights are distributed."""

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from qrl.figures.canvas import BLUE, FAINT, GREY, INK, LEGEND, ORANGE, base_first, by_variant, canvas, finish, shortened
from qrl.names import BASE

KINDS = (("attention", r"attn"), ("mlp", r"mlp"), ("other", r""))  # of tensors, by their names
ORDER = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MINOR = (2, 3, 4, 5, 6, 8)  # labelled between the decades
LEVELS = (("abs_q99", "99 %", 0.9), ("abs_q999", "99.9 %", 0.6), ("abs_q9999", "99.99 %", 0.35))  # column, name, alpha
MOST_TICKS = 12  # layers that are labelled


def layer_error(weights: pd.DataFrame, path: str | Path) -> None:
    """Draw the relative error of rounding by layer, and for each tensor the difference of errors base − trained.

    Args:
        weights: a row per variant and tensor: `variant`, `tensor`, `numel`, `proxy_bits`, and ‖W − Q(W)‖² / ‖W‖² as
            `w4_relative_mse` or `rtn_relative_mse`.
    """
    frame = weights.assign(position=weights["tensor"].map(_position))
    positions = sorted(frame["position"].unique(), key=_order)
    x = {position: i for i, position in enumerate(positions)}
    frame["x"] = frame["position"].map(x)
    variants = base_first(frame["variant"])
    has_trained = len(variants) > 1
    panel_count = 2 if has_trained else 1
    figure, panels = canvas(7.4, 3.2 * panel_count, rows=panel_count)
    panels = np.atleast_1d(panels)

    means_panel = panels[0]
    for variant, rows, colour, _ in by_variant(frame):
        mean = _weighted(rows, rows["x"]).sort_index()
        # Base is a wide line under the others, since training changes the error by so little that lines coincide.
        style = {"lw": 5, "alpha": 0.45, "ms": 10} if variant == BASE else {"lw": 1.8, "ms": 5}
        means_panel.plot(mean.index, mean, "o-", color=colour, label=shortened(variant), **style)
    means_panel.set_ylabel("lost energy, ‖Q(W) − W‖² / ‖W‖²")
    means_panel.legend(ncols=len(variants), **LEGEND)
    means_panel.margins(y=0.25)
    if has_trained:
        _draw_changes(panels[1], frame, variants)

    shown_positions = _labelled(positions)
    labels = [position if isinstance(position, int) else f"\n{position}" for position in shown_positions]
    for axes in panels:
        axes.set_xticks([x[position] for position in shown_positions], labels)
    panels[-1].set_xlabel("layer")

    dots = "; dots: single tensors" if has_trained else ""
    note = (
        f"{frame['tensor'].nunique()} tensors of {', '.join(map(shortened, variants))}. "
        f"Lines: means over a layer, weighted by size{dots}."
    )
    finish(figure, error_finding(frame, variants), note, path)


def _labelled(positions: list[int | str]) -> list[int | str]:
    """Return the positions that get a label: all names, and every so many layers."""
    layers = [position for position in positions if isinstance(position, int)]
    step = math.ceil(len(layers) / MOST_TICKS)
    labelled_layers = set(layers[:: max(1, step)])
    return [position for position in positions if isinstance(position, str) or position in labelled_layers]


def _draw_changes(axes, frame: pd.DataFrame, variants: list[str]) -> None:
    """Draw base's error minus the trained variant's, tensor by tensor, in percent of base's; the sign of the maps."""
    error = error_column(frame)
    base_error = frame[frame["variant"] == BASE].set_index("tensor")[error]
    trained = frame[frame["variant"].isin(variants[1:])]
    change = 100 * (1 - trained[error] / trained["tensor"].map(base_error))
    kinds = trained["tensor"].map(_kind)
    for (kind, _), mark, colour, shift in zip(KINDS, "os^", (BLUE, ORANGE, GREY), (-0.12, 0.12, 0), strict=True):
        is_kind = kinds == kind
        if is_kind.any():
            x = trained.loc[is_kind, "x"] + shift
            axes.plot(x, change[is_kind], mark, label=kind, color=colour, ms=6, alpha=0.75, mew=0)
    axes.axhline(0, color=INK, lw=1)
    trained_label = shortened(variants[1]) if len(variants) == 2 else "trained"
    axes.set_ylabel(f"{BASE} − {trained_label}, % of {BASE}'s")
    axes.annotate(
        "above 0: smaller after training",
        (1, 1),
        (0, 6),
        size=9,
        color=FAINT,
        xycoords="axes fraction",
        textcoords="offset points",
        ha="right",
    )
    axes.legend(ncols=len(KINDS), **LEGEND)


def bits(frame: pd.DataFrame) -> int:
    """Return the bits of the proxy that a table was measured with; 4 in old tables, which do not name them."""
    return int(frame["proxy_bits"].iloc[0]) if "proxy_bits" in frame else 4


def error_column(frame: pd.DataFrame) -> str:
    """Return the column of the proxy's relative error: `w4_…` for 4 bits and in old tables, else `rtn_…`."""
    return "w4_relative_mse" if "w4_relative_mse" in frame else "rtn_relative_mse"


def _position(tensor: str) -> int | str:
    """Return the number of a tensor's layer, or the name of a tensor outside of the layers."""
    if match := re.search(r"\.(\d+)\.", tensor):
        return int(match[1])
    return tensor.removeprefix("model.").removesuffix(".weight").replace("embed_tokens", "embed")


def _order(position: int | str) -> tuple[int, str]:
    """Sort embeddings before the layers, the head and anything else after them."""
    if isinstance(position, int):
        return position, ""
    if position == "embed":
        return -1, position
    return 10**9, position


def _kind(tensor: str) -> str:
    return next(name for name, pattern in KINDS if re.search(pattern, tensor))


def _weighted(frame: pd.DataFrame, by: Any) -> pd.Series:
    """Return relative error over groups of tensors, weighted by size; a tensor of zeros has none and does not count."""
    error = frame[error_column(frame)]
    numel = frame["numel"]
    sums = frame.assign(error=error * numel, numel=numel.where(error.notna()))
    sums = sums.groupby(by)[["error", "numel"]].sum(min_count=1)
    return sums["error"] / sums["numel"]


def error_finding(frame: pd.DataFrame, variants: list[str]) -> str:
    """Return the finding, as a title."""
    totals = _weighted(frame, frame["variant"])
    rounding = f"Rounding to {bits(frame)} bits loses"
    if len(variants) == 1:
        return f"{rounding} {100 * totals[variants[0]]:.4g} % of the energy of {variants[0]}'s weights"
    before = 100 * totals[BASE]
    after = 100 * totals[variants[1]]
    loss = f"{rounding} {after:.4g} % of the weights' energy after training"
    if not before > 0:  # zeros, or weights that are multiples of their scales
        return f"{loss}; before training nothing was lost"
    change = 100 * (after / before - 1)
    if abs(change) < 0.1:
        return f"{loss}, as much as before ({before:.4g} %)"
    direction = "more" if change > 0 else "less"
    return f"{loss}, {abs(change):.2g} % {direction} than before ({before:.4g} %)"


def in_order(projections: Iterable[str]) -> list[str]:
    """Return the projections in a layer's order, others after them by name."""
    present = set(projections)
    of_layers = [name for name in ORDER if name in present]
    return [*of_layers, *sorted(present - set(of_layers))]


def spread(weights: pd.DataFrame, path: str | Path, multiplier: float = 6.0) -> None:
    """Draw quantiles of |w| over its median by projection, base next to the trained variant; dots: the largest weights.

    Args:
        weights: a row per variant and tensor, with `median_abs`, `abs_q99`, `abs_q999`, `abs_q9999` and `max_abs`.
        multiplier: the threshold of outliers, drawn as a line.
    """
    projections = in_order(weights["projection"])
    variants = base_first(weights["variant"])
    figure, axes = canvas(7.4, 4.8)
    half_width = 0.32 / len(variants)
    for variant, rows, colour, offset in by_variant(weights):
        for i, projection in enumerate(projections):
            middle = i + offset * 0.8 / len(variants)
            _draw_column(axes, rows[rows["projection"] == projection], middle, half_width, colour)
        axes.plot([], [], "s", color=colour, label=shortened(variant))  # for the legend alone

    axes.axhline(multiplier, color=INK, lw=1, ls=(0, (4, 2)))
    axes.annotate(
        f"outliers:\nabove {multiplier:g}",
        (1.01, multiplier),
        size=9,
        color=INK,
        xycoords=("axes fraction", "data"),
        va="center",
        annotation_clip=False,
    )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(lambda x, _: f"{x:g}" if x in MINOR else "")
    axes.set_xlim(-0.5, len(projections) - 0.5)
    axes.set_xticks(range(len(projections)), [projection.removesuffix("_proj") for projection in projections])
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
        totals.append(f"{1e6 * share:,.3g} in {shortened(variant)}")
    title = f"Outliers per million weights (above {multiplier:g} × the median): {', '.join(totals)}"
    finish(figure, title, note, path)


def _draw_column(axes, rows: pd.DataFrame, x: float, half_width: float, colour: str) -> None:
    """Draw the quantiles of one variant and projection as stacked bars, and the largest weights as dots."""
    if not len(rows):
        return
    bottom = 1.0  # the median
    for column, _, alpha in LEVELS:
        top = max(bottom, float(np.mean(rows[column] / rows["median_abs"])))
        axes.fill_betweenx([bottom, top], x - half_width, x + half_width, color=colour, alpha=alpha, lw=0)
        bottom = top
    axes.plot([x] * len(rows), rows["max_abs"] / rows["median_abs"], "o", ms=4, color=colour, mec="white", mew=0.6)
