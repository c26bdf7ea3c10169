"""What training did to the error of rounding weights to few bits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from qrl.figures.canvas import BLUE, FAINT, GREY, INK, ORANGE, VARIANTS, canvas, finish
from qrl.names import BASE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS = (("attention", r"attn"), ("mlp", r"mlp"), ("other", r""))


def layer_error(weights: pd.DataFrame, path: str | Path) -> None:
    """Relative error of plain rounding per layer, base against the trained variants, and of each tensor the difference base − trained.

    Args:
        weights: a row per variant and tensor: `variant`, `tensor`, `numel`, `w4_relative_mse` (‖W − Q(W)‖² / ‖W‖²), `proxy_bits`.
        path: the PNG to write.
    """
    frame = weights.assign(place=weights["tensor"].map(_place))
    places = sorted(frame["place"].unique(), key=_order)
    x = {place: i for i, place in enumerate(places)}
    variants = [BASE, *sorted(set(frame["variant"]) - {BASE})]
    figure, panels = canvas(7.4, 3.2 * min(2, len(variants)), rows=min(2, len(variants)))
    above, *below = np.atleast_1d(panels)
    for i, variant in enumerate(variants):
        part = frame[frame["variant"] == variant]
        mean = _weighted(part, part["place"].map(x)).sort_index()
        style = {"lw": 5, "alpha": 0.45, "ms": 10} if variant == BASE else {"lw": 1.8, "ms": 5}
        above.plot(mean.index, mean, "o-", color=VARIANTS[i % len(VARIANTS)], label=variant, **style)
    above.set_ylabel("lost energy, ‖Q(W) − W‖² / ‖W‖²")
    above.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(variants), borderaxespad=0.2)
    above.margins(y=0.25)
    if below:
        _changes(below[0], frame, variants, x)
    layers = [place for place in places if isinstance(place, int)]
    shown = [place for place in places if isinstance(place, str) or layers.index(place) % -(-len(layers) // 12) == 0]
    for axes in (above, *below):
        axes.set_xticks(
            [x[place] for place in shown], [place if isinstance(place, int) else f"\n{place}" for place in shown]
        )
    axes.set_xlabel("layer")
    note = f"{frame['tensor'].nunique()} tensors of {', '.join(variants)}. Lines: means over a layer, weighted by size{'; dots: single tensors' if below else ''}."
    finish(figure, above, _error_found(frame, variants), note, path)


def _changes(axes: Axes, frame: pd.DataFrame, variants: list[str], x: dict[int | str, int]) -> None:
    """Base's error less the trained variant's, tensor by tensor, in percent of base's, by kind of module; the maps' sign."""
    base = frame[frame["variant"] == BASE].set_index("tensor")["w4_relative_mse"]
    trained = frame[frame["variant"].isin(variants[1:])]
    change = 100 * (1 - trained["w4_relative_mse"] / trained["tensor"].map(base))
    kinds = trained["tensor"].map(_kind)
    for (kind, _), mark, colour, shift in zip(KINDS, "os^", (BLUE, ORANGE, GREY), (-0.12, 0.12, 0), strict=True):
        if (kinds == kind).any():
            places = trained.loc[kinds == kind, "place"].map(x) + shift
            axes.plot(places, change[kinds == kind], mark, color=colour, ms=6, alpha=0.75, mew=0, label=kind)
    axes.axhline(0, color=INK, lw=1)
    axes.set_ylabel(f"{BASE} − {variants[1] if len(variants) == 2 else 'trained'}, % of {BASE}'s")
    axes.annotate(
        "above 0: smaller after training",
        (1, 1),
        (0, 6),
        xycoords="axes fraction",
        textcoords="offset points",
        ha="right",
        size=9,
        color=FAINT,
    )
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(KINDS), borderaxespad=0.2)


def bits(frame: pd.DataFrame) -> int:
    """Bits of the proxy that a table was measured with; 4 in tables of before it could be told."""
    return int(frame["proxy_bits"].iloc[0]) if "proxy_bits" in frame else 4


def _place(tensor: str) -> int | str:
    """Number of the layer that a tensor belongs to, or the first telling part of its name."""
    layer = re.search(r"\.(\d+)\.", tensor)
    return (
        int(layer[1])
        if layer
        else tensor.removeprefix("model.").removesuffix(".weight").replace("embed_tokens", "embed")
    )


def _order(place: int | str) -> tuple[int, str]:
    """Embeddings before the layers, the head and whatever else after them."""
    if isinstance(place, int):
        return place, ""
    return (-1, place) if place == "embed" else (10**9, place)


def _kind(tensor: str) -> str:
    return next(name for name, pattern in KINDS if re.search(pattern, tensor))


def _weighted(frame: pd.DataFrame, by: Any) -> pd.Series:
    """Relative error over groups of tensors, weighted by their numbers of weights; one of zeros has none and does not count."""
    known = frame["w4_relative_mse"].notna()
    sums = (
        frame.assign(error=frame["w4_relative_mse"] * frame["numel"], numel=frame["numel"].where(known))
        .groupby(by)[["error", "numel"]]
        .sum(min_count=1)
    )
    return sums["error"] / sums["numel"]


def _error_found(frame: pd.DataFrame, variants: list[str]) -> str:
    totals, few = _weighted(frame, frame["variant"]), bits(frame)
    if len(variants) == 1:
        return f"Plain rounding to {few} bits loses {100 * totals[variants[0]]:.4g} % of the energy of {variants[0]}'s weights"
    before, after = 100 * totals[BASE], 100 * totals[variants[1]]
    if not before > 0:  # zeros, or weights that lie on the grid already
        return f"Plain rounding to {few} bits loses {after:.4g} % of the weights' energy after training; before it there was nothing to lose"
    change = 100 * (after / before - 1)
    verb = "as much as" if abs(change) < 0.1 else f"{abs(change):.2g} % {'more' if change > 0 else 'less'} than"
    return f"Plain rounding to {few} bits loses {after:.4g} % of the weights' energy after training, {verb} before it ({before:.4g} %)"
