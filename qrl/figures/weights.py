"""What training did to the error of rounding weights to few bits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from qrl.figures.canvas import BLUE, FAINT, GREY, INK, LEGEND, ORANGE, VARIANTS, base_first, canvas, finish
from qrl.names import BASE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS = (("attention", r"attn"), ("mlp", r"mlp"), ("other", r""))


def layer_error(weights: pd.DataFrame, path: str | Path) -> None:
    """Draw the relative error of rounding by layer, and for each tensor the difference of errors base − trained.

    Args:
        weights: a row per variant and tensor: `variant`, `tensor`, `numel`, `proxy_bits`, and ‖W − Q(W)‖² / ‖W‖² as
            `w4_relative_mse` or `rtn_relative_mse`.
        path: the PNG to write.
    """
    frame = weights.assign(place=weights["tensor"].map(_place))
    places = sorted(frame["place"].unique(), key=_order)
    x = {place: i for i, place in enumerate(places)}
    variants = base_first(frame["variant"])
    figure, panels = canvas(7.4, 3.2 * min(2, len(variants)), rows=min(2, len(variants)))
    above, *below = np.atleast_1d(panels)
    for i, variant in enumerate(variants):
        part = frame[frame["variant"] == variant]
        mean = _weighted(part, part["place"].map(x)).sort_index()
        style = {"lw": 5, "alpha": 0.45, "ms": 10} if variant == BASE else {"lw": 1.8, "ms": 5}
        above.plot(mean.index, mean, "o-", color=VARIANTS[i % len(VARIANTS)], label=variant, **style)
    above.set_ylabel("lost energy, ‖Q(W) − W‖² / ‖W‖²")
    above.legend(ncols=len(variants), **LEGEND)
    above.margins(y=0.25)
    if below:
        _changes(below[0], frame, variants, x)
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
    finish(figure, above, error_finding(frame, variants), note, path)


def _changes(axes: Axes, frame: pd.DataFrame, variants: list[str], x: dict[int | str, int]) -> None:
    """Draw base's error minus the trained variant's, tensor by tensor, in percent of base's; the sign of the maps."""
    error = error_column(frame)
    base = frame[frame["variant"] == BASE].set_index("tensor")[error]
    trained = frame[frame["variant"].isin(variants[1:])]
    change = 100 * (1 - trained[error] / trained["tensor"].map(base))
    kinds = trained["tensor"].map(_kind)
    for (kind, _), mark, colour, shift in zip(KINDS, "os^", (BLUE, ORANGE, GREY), (-0.12, 0.12, 0), strict=True):
        if (kinds == kind).any():
            places = trained.loc[kinds == kind, "place"].map(x) + shift
            axes.plot(places, change[kinds == kind], mark, color=colour, ms=6, alpha=0.75, mew=0, label=kind)
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
