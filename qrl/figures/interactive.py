"""plotly's figures of weights and of what models say, as plain mappings: maps to point at, dots that tell their matrix."""

from __future__ import annotations

import pandas as pd

from qrl.figures import divergence as speech
from qrl.figures import heatmaps
from qrl.figures.canvas import VARIANTS
from qrl.figures.page import Section, laid, numbers
from qrl.figures.weights import bits
from qrl.names import BASE

DIFFERENCES = [
    [0, "#2d004b"],
    [0.25, "#998ec3"],
    [0.5, "#f7f7f7"],
    [0.75, "#f1a340"],
    [1, "#7f3b08"],
]  # PuOr, as in the PNGs
SYMBOLS = ("circle", "square", "triangle-up", "diamond", "cross")
READ = "Point at a cell for its matrix and value; drag to enlarge, double-click to return."


def sections(weights: pd.DataFrame, stored: pd.DataFrame, said: pd.DataFrame) -> list[Section]:
    """The parts of a page that `diagnose` knows of.

    Args:
        weights: a row per variant and tensor, as `diagnose` writes them.
        stored: a row per scheme, variant and tensor; may be empty.
        said: a row per variant and scheme or layer; may be empty.
    """
    moved = [*map(_map, heatmaps.movement_panels(weights)), _outliers(weights)]
    found = [Section("What training moved", heatmaps.movement_found(weights), moved)]
    if len(stored):
        found.append(
            Section(
                "What the schemes store",
                heatmaps.schemes_found(stored),
                [_survival(stored), *map(_map, heatmaps.scheme_panels(stored))],
            )
        )
    if len(said):
        found.append(Section("What the models say", speech.behaviour_found(said), _said(said)))
    return found


def _map(panel: heatmaps.Panel) -> dict:
    values = panel.values
    colours = {"colorscale": DIFFERENCES, "zmid": 0} if panel.signed else {"colorscale": "Cividis"}
    hover = "layer %{x}, %{y}: %{z:.4g}<extra></extra>"
    rows = [numbers(row) for row in values.to_numpy(dtype=float)]
    drawn = {
        "type": "heatmap",
        "z": rows,
        "x": [str(layer) for layer in values.columns],
        "y": list(values.index),
        "hovertemplate": hover,
        **colours,
    }
    return laid(
        [drawn],
        panel.title,
        150 + 24 * len(values),
        yaxis={"autorange": "reversed"},
        xaxis={"title": {"text": "layer"}, "type": "category"},
    )


def _outliers(weights: pd.DataFrame) -> dict:
    """Every matrix: its outliers against the proxy's error."""
    few = bits(weights)
    variants = [BASE, *sorted(set(weights["variant"]) - {BASE})]
    drawn = []
    for number, variant in enumerate(variants):
        rows = weights[weights["variant"] == variant]
        place = {
            "x": numbers(rows["abs_outlier_frac"]),
            "y": numbers(rows["w4_relative_mse"]),
            "text": rows["tensor"].tolist(),
        }
        hover = f"%{{text}}<br>outliers %{{x:.3g}}, {few}-bit error %{{y:.4g}}<extra>{variant}</extra>"
        drawn.append(_dots(variant, number, hover, place))
    axes = {
        "xaxis": {"title": {"text": "share of outliers"}},
        "yaxis": {"title": {"text": f"relative error of {few} bits"}},
    }
    return laid(drawn, f"Each matrix: outliers and {few}-bit error", 420, **axes)


def _survival(stored: pd.DataFrame) -> dict | None:
    """Update survival and cosine of every matrix, by scheme."""
    if "update_cosine" not in stored or stored["update_cosine"].notna().sum() == 0:
        return None
    drawn = []
    for number, (scheme, rows) in enumerate(stored.dropna(subset="update_cosine").groupby("scheme", sort=False)):
        place = {
            "x": numbers(rows["update_survival"]),
            "y": numbers(rows["update_cosine"]),
            "text": rows["tensor"].tolist(),
        }
        hover = "%{text}<br>length %{x:.3g}, cosine %{y:.3f}<extra>" + str(scheme) + "</extra>"
        drawn.append(_dots(str(scheme), number + 1, hover, place))
    axes = {
        "xaxis": {"title": {"text": "length of the stored update over the true one"}, "type": "log"},
        "yaxis": {"title": {"text": "its cosine with the true one"}, "range": [-0.05, 1.05]},
    }
    return laid(drawn, "What each scheme stores of the update, matrix by matrix (1, 1: all of it)", 420, **axes)


def _said(said: pd.DataFrame) -> list[dict]:
    """Divergence and agreement by scheme, and divergence by layer, with 95 % intervals over texts."""
    found = []
    for rows, by, where in (
        (said[said["layer"] < 0], "scheme", "scheme"),
        (said[said["layer"] >= 0], "layer", "this layer alone rounded"),
    ):
        for column in ("kl", "top1_agreement") if len(rows) else ():
            drawn = []
            for number, (variant, own) in enumerate(rows.groupby("variant", sort=False)):
                ends = [speech.interval(row, column) for row in own.itertuples()]
                drawn.append(bars(variant, number, [str(place) for place in own[by]], ends))
            axes = {
                "xaxis": {"title": {"text": where}, "type": "category"},
                "yaxis": {"rangemode": "tozero" if column == "kl" else "normal"},
            }
            found.append(laid(drawn, f"{speech.AXES[column]}; n = {rows['n'].min():,} texts", 360, **axes))
    return found


def bars(name: str, number: int, x: list, ends: list[tuple[float, float, float]]) -> dict:
    """Points with their intervals, a place on a category axis each, variants beside each other.

    Args:
        name: in the legend.
        number: of the colour and symbol.
        x: category of each.
        ends: estimate, low and high of each.
    """
    reach = {
        "type": "data",
        "array": [high - value for value, _, high in ends],
        "arrayminus": [value - low for value, low, _ in ends],
        "thickness": 2,
    }
    text = [f"{value:.4g} [{low:.4g}, {high:.4g}]" for value, low, high in ends]
    place = {"x": x, "y": [value for value, _, _ in ends], "error_y": reach, "text": text}
    return _dots(name, number, "%{x}: %{text}<extra>" + name + "</extra>", place)


def _dots(name: str, number: int, hover: str, place: dict) -> dict:
    marker = {
        "color": VARIANTS[number % len(VARIANTS)],
        "symbol": SYMBOLS[number % len(SYMBOLS)],
        "size": 9,
        "opacity": 0.8,
    }
    return {"type": "scatter", "mode": "markers", "name": name, "marker": marker, "hovertemplate": hover, **place}
