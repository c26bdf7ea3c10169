"""How far quantization moves next-token distributions: divergence and agreement by scheme, and by layer."""

from itertools import cycle
from pathlib import Path
from typing import Any

import pandas as pd

from qrl.figures.canvas import LEGEND, TICK_CHARACTERS, by_variant, dress, finish, shortened
from qrl.stats import LEVEL, quantile

AXES = {"kl": "KL to full precision, nats per token", "top1_agreement": "share of tokens with the same top choice"}
MARKS = "os^Dv"  # variants differ by shape too, not by colour alone
UNROTATED_CHARACTERS = 12  # of a scheme's name that fits below its points without rotation


def behaviour(rows: pd.DataFrame, path: str | Path) -> None:
    """Draw per-token divergence and top-1 agreement by scheme, and of each layer rounded alone, with 95 % intervals.

    Args:
        rows: a row per variant and scheme, as `diagnose` writes them; rows with a layer ≥ 0 are of that layer alone.
    """
    from matplotlib.figure import Figure

    of_models, of_layers = _split(rows)
    schemes = list(dict.fromkeys(of_models["scheme"]))
    mosaic = []
    if schemes:
        mosaic.append(["kl", "top1_agreement"])
    if len(of_layers):
        mosaic.append(["layer", "layer"])
    size = max(7.4, 1.1 * len(schemes) + 4), 1.2 + 2.9 * len(mosaic)
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    panels = figure.subplot_mosaic(mosaic)
    for axes in panels.values():
        dress(axes)

    if schemes:
        x_of_scheme = {scheme: i for i, scheme in enumerate(schemes)}
        labels = [shortened(scheme, TICK_CHARACTERS) for scheme in schemes]
        has_long_labels = len(schemes) > 4 or max(map(len, labels)) > UNROTATED_CHARACTERS
        for measure, title in AXES.items():
            axes = panels[measure]
            _draw_points(axes, of_models, of_models["scheme"].map(x_of_scheme), measure)
            axes.set_title(title, loc="left", size=10, pad=20)
            axes.set_xticks(range(len(schemes)), labels, rotation=40 if has_long_labels else 0)
            axes.set_xlim(-0.5, len(schemes) - 0.5)
    if len(of_layers):
        axes = panels["layer"]
        _draw_points(axes, of_layers, of_layers["layer"], "kl")
        axes.set_title(AXES["kl"], loc="left", size=10, pad=4)
        axes.set_xlabel("the only layer that is rounded")
        axes.xaxis.get_major_locator().set_params(integer=True)

    first = next(iter(panels.values()))
    first.legend(ncols=rows["variant"].nunique(), **LEGEND)
    sizes = f"n = {rows['n'].min():,} held-out texts, {rows['positions'].min():,} tokens"
    note = f"{sizes}; nothing is sampled. Bars: 95 % intervals over texts."
    finish(figure, behaviour_finding(rows), note, path)


def interval(row: Any, measure: str) -> tuple[float, float, float]:
    """Return an estimate and the ends of its 95 % t interval over texts, cut at 0 and for agreement at 1."""
    estimate = getattr(row, measure)
    reach = quantile((1 + LEVEL) / 2, row.n - 1) * getattr(row, f"{measure}_stderr")
    low = max(0.0, estimate - reach)
    high = estimate + reach
    if measure == "top1_agreement":
        high = min(1.0, high)
    return estimate, low, high


def behaviour_finding(rows: pd.DataFrame) -> str:
    """Return the finding, as a title."""
    of_models, of_layers = _split(rows)
    clauses = []
    if len(of_models):
        largest = next(of_models.loc[[of_models["kl"].idxmax()]].itertuples())
        estimate, low, high = interval(largest, "kl")
        model = f"{shortened(largest.variant)} under {shortened(largest.scheme)}"
        kl = f"KL {estimate:.2g} [{low:.2g}, {high:.2g}] nats per token"
        clauses.append(f"Largest divergence from full precision: {model}, {kl}")
    if len(of_layers):
        mean_kl = of_layers.groupby("layer")["kl"].mean()
        start = "of" if clauses else "Of"
        clauses.append(f"{start} single layers, rounding layer {mean_kl.idxmax()} has the largest effect")
    return "; ".join(clauses)


def _split(rows: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the rows of whole models, and those of models with one layer rounded."""
    return rows[rows["layer"] < 0], rows[rows["layer"] >= 0]


def _draw_points(axes, rows: pd.DataFrame, x: pd.Series, measure: str) -> None:
    """Draw a point with its interval for each row, variants next to each other.

    Args:
        axes: the panel.
        rows: as for `behaviour`.
        x: (rows,) where each row is drawn, before variants are moved apart.
        measure: a column.
    """
    for (variant, variant_rows, colour, offset), mark in zip(by_variant(rows), cycle(MARKS), strict=False):
        intervals = [interval(row, measure) for row in variant_rows.itertuples()]
        estimates = [estimate for estimate, _, _ in intervals]
        below = [estimate - low for estimate, low, _ in intervals]
        above = [high - estimate for estimate, _, high in intervals]
        axes.errorbar(
            x[variant_rows.index] + offset * 0.22,
            estimates,
            yerr=[below, above],
            label=shortened(variant),
            color=colour,
            fmt=mark,
            ms=6,
            lw=1.8,
            capsize=3,
        )
    axes.margins(y=0.12)
    if measure == "kl":
        axes.set_ylim(bottom=0)
    axes.grid(axis="x", visible=False)
