"""What quantization does to what a model says: divergence and agreement by scheme, and layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from qrl.figures.canvas import VARIANTS, dress, finish
from qrl.names import BASE
from qrl.stats import LEVEL, quantile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

AXES = {"kl": "KL to full precision, nats a token", "top1_agreement": "share of tokens with the same likeliest one"}
MARKS = "os^Dv"  # told apart without colours, too


def behaviour(said: pd.DataFrame, path: str | Path) -> None:
    """Per-token divergence and top-1 agreement of every scheme, and of full precision with one layer rounded, with 95 % intervals.

    Args:
        said: a row per variant and scheme, as `diagnose` writes them; rows with a layer ≥ 0 are that layer's alone.
        path: the PNG to write.
    """
    from matplotlib.figure import Figure

    whole, layers = said[said["layer"] < 0], said[said["layer"] >= 0]
    schemes = list(dict.fromkeys(whole["scheme"]))
    above = [["kl", "top1_agreement"]] if schemes else []
    below = [["layer", "layer"]] if len(layers) else []
    figure = Figure(
        figsize=(max(7.4, 1.1 * len(schemes) + 4), 1.2 + 2.9 * (len(above) + len(below))),
        layout="constrained",
        facecolor="white",
    )
    panels = figure.subplot_mosaic([*above, *below])
    for axes in panels.values():
        dress(axes)
    for column in above[0] if above else ():
        _points(panels[column], whole, {scheme: i for i, scheme in enumerate(schemes)}, "scheme", column)
        panels[column].set_xticks(range(len(schemes)), schemes, rotation=0 if len(schemes) <= 4 else 40)
        panels[column].set_xlim(-0.5, len(schemes) - 0.5)
    if below:
        _points(panels["layer"], layers, {layer: layer for layer in layers["layer"]}, "layer", "kl")
        panels["layer"].set_xlabel("this layer alone rounded to the proxy's bits")
        panels["layer"].xaxis.get_major_locator().set_params(integer=True)
    first = next(iter(panels.values()))
    first.legend(
        frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=said["variant"].nunique(), borderaxespad=0.2
    )
    note = f"n = {said['n'].min():,} held-out texts, {said['positions'].min():,} tokens; nothing is sampled. Bars: 95 % intervals over texts."
    finish(figure, first, behaviour_found(said), note, path)


def interval(row, column: str) -> tuple[float, float, float]:
    """Estimate and ends of its 95 % t interval over texts; neither measure can be below 0, nor agreement above 1."""
    value, reach = getattr(row, column), quantile((1 + LEVEL) / 2, row.n - 1) * getattr(row, f"{column}_stderr")
    return value, max(0.0, value - reach), value + reach if column == "kl" else min(1.0, value + reach)


def behaviour_found(said: pd.DataFrame) -> str:
    """The finding, as a title."""
    whole, layers = said[said["layer"] < 0], said[said["layer"] >= 0]
    parts = []
    if len(whole):
        most = next(whole.loc[[whole["kl"].idxmax()]].itertuples())
        value, low, high = interval(most, "kl")
        parts.append(
            f"Farthest from full precision: {most.variant} under {most.scheme}, KL {value:.2g} [{low:.2g}, {high:.2g}] nats a token"
        )
    if len(layers):
        mean = layers.groupby("layer")["kl"].mean()
        parts.append(f"rounding layer {mean.idxmax()} alone does most")
    found = "; ".join(parts)
    return found[0].upper() + found[1:]


def _points(axes: Axes, rows: pd.DataFrame, places: dict, by: str, column: str) -> None:
    """A point with its interval for each row, variants beside each other."""
    variants = [BASE, *sorted(set(rows["variant"]) - {BASE})]
    for i, variant in enumerate(variants):
        own = list(rows[rows["variant"] == variant].itertuples())
        values = [interval(row, column) for row in own]
        x = [places[getattr(row, by)] + (i - (len(variants) - 1) / 2) * 0.22 for row in own]
        reach = [[value - low for value, low, _ in values], [high - value for value, _, high in values]]
        look = {
            "color": VARIANTS[i % len(VARIANTS)],
            "fmt": MARKS[i % len(MARKS)],
            "ms": 6,
            "lw": 1.8,
            "capsize": 3,
            "label": variant,
        }
        axes.errorbar(x, [value for value, _, _ in values], yerr=reach, **look)
    axes.set_title(AXES[column], loc="left", size=10, pad=20 if by == "scheme" else 4)
    axes.margins(y=0.12)
    if column == "kl":
        axes.set_ylim(bottom=0)
    axes.grid(axis="x", visible=False)
