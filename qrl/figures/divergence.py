"""How far quantization moves next-token distributions: divergence and agreement by scheme, and by layer."""

from itertools import cycle
from pathlib import Path
from typing import Any

import pandas as pd

from qrl.figures.canvas import LEGEND, by_variant, dress, finish
from qrl.stats import LEVEL, quantile

AXES = {"kl": "KL to full precision, nats per token", "top1_agreement": "share of tokens with the same top choice"}
MARKS = "os^Dv"  # variants differ by shape too, not by colour alone


def behaviour(rows: pd.DataFrame, path: str | Path) -> None:
    """Draw per-token divergence and top-1 agreement by scheme, and of each layer rounded alone, with 95 % intervals.

    Args:
        rows: a row per variant and scheme, as `diagnose` writes them; rows with a layer ≥ 0 are of that layer alone.
    """
    from matplotlib.figure import Figure

    whole, layers = rows[rows["layer"] < 0], rows[rows["layer"] >= 0]
    schemes = list(dict.fromkeys(whole["scheme"]))
    mosaic = ([["kl", "top1_agreement"]] if schemes else []) + ([["layer", "layer"]] if len(layers) else [])
    size = max(7.4, 1.1 * len(schemes) + 4), 1.2 + 2.9 * len(mosaic)
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    panels = figure.subplot_mosaic(mosaic)
    for axes in panels.values():
        dress(axes)
    for column in AXES if schemes else ():
        _points(panels[column], whole, {scheme: i for i, scheme in enumerate(schemes)}, "scheme", column)
        panels[column].set_xticks(range(len(schemes)), schemes, rotation=0 if len(schemes) <= 4 else 40)
        panels[column].set_xlim(-0.5, len(schemes) - 0.5)
    if len(layers):
        _points(panels["layer"], layers, {layer: layer for layer in layers["layer"]}, "layer", "kl")
        panels["layer"].set_xlabel("the only layer that is rounded")
        panels["layer"].xaxis.get_major_locator().set_params(integer=True)
    first = next(iter(panels.values()))
    first.legend(ncols=rows["variant"].nunique(), **LEGEND)
    sizes = f"n = {rows['n'].min():,} held-out texts, {rows['positions'].min():,} tokens"
    note = f"{sizes}; nothing is sampled. Bars: 95 % intervals over texts."
    finish(figure, behaviour_finding(rows), note, path)


def interval(row: Any, column: str) -> tuple[float, float, float]:
    """Return an estimate and the ends of its 95 % t interval over texts, cut at 0 and for agreement at 1."""
    value, reach = getattr(row, column), quantile((1 + LEVEL) / 2, row.n - 1) * getattr(row, f"{column}_stderr")
    return value, max(0.0, value - reach), value + reach if column == "kl" else min(1.0, value + reach)


def behaviour_finding(rows: pd.DataFrame) -> str:
    """Return the finding, as a title."""
    whole, layers = rows[rows["layer"] < 0], rows[rows["layer"] >= 0]
    parts = []
    if len(whole):
        most = next(whole.loc[[whole["kl"].idxmax()]].itertuples())
        value, low, high = interval(most, "kl")
        kl = f"KL {value:.2g} [{low:.2g}, {high:.2g}] nats per token"
        parts.append(f"Largest divergence from full precision: {most.variant} under {most.scheme}, {kl}")
    if len(layers):
        mean = layers.groupby("layer")["kl"].mean()
        parts.append(f"{'of' if parts else 'Of'} single layers, rounding layer {mean.idxmax()} has the largest effect")
    return "; ".join(parts)


def _points(axes, rows: pd.DataFrame, places: dict, by: str, column: str) -> None:
    """Draw a point with its interval for each row, variants beside each other."""
    for (variant, own, colour, place), mark in zip(by_variant(rows), cycle(MARKS), strict=False):
        values = [interval(row, column) for row in own.itertuples()]
        x = own[by].map(places) + place * 0.22
        reach = [[value - low for value, low, _ in values], [high - value for value, _, high in values]]
        look = {"color": colour, "fmt": mark, "ms": 6, "lw": 1.8, "capsize": 3}
        axes.errorbar(x, [value for value, _, _ in values], yerr=reach, label=variant, **look)
    axes.set_title(AXES[column], loc="left", size=10, pad=20 if by == "scheme" else 4)
    axes.margins(y=0.12)
    if column == "kl":
        axes.set_ylim(bottom=0)
    axes.grid(axis="x", visible=False)
