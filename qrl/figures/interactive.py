"""plotly's figures of weights and next-token distributions, as plain mappings; pointing shows matrix and value."""

import pandas as pd

from qrl.figures import divergence, heatmaps
from qrl.figures.canvas import VARIANTS, by_variant
from qrl.figures.page import Section, axis, laid, numbers
from qrl.figures.weights import bits, error_column

DIFFERENCES = [[0, "#2d004b"], [0.25, "#998ec3"], [0.5, "#f7f7f7"], [0.75, "#f1a340"], [1, "#7f3b08"]]  # PuOr
SYMBOLS = ("circle", "square", "triangle-up", "diamond", "cross")
READ = "In the figures, point at a mark for its values; drag to enlarge, double-click to go back."


def sections(weights: pd.DataFrame, stored: pd.DataFrame, behaviour: pd.DataFrame) -> list[Section]:
    """Return the parts of a page that show the tables that `diagnose` wrote; the last two may be empty."""
    maps = [*map(_map, heatmaps.movement_panels(weights)), _outliers(weights)]
    parts = [Section("Weights", heatmaps.movement_finding(weights), maps)]
    if len(stored):
        maps = [_update_survival(stored), *map(_map, heatmaps.scheme_panels(stored))]
        parts.append(Section("Schemes", heatmaps.schemes_finding(stored), maps))
    if len(behaviour):
        title = divergence.behaviour_finding(behaviour)
        parts.append(Section("Next-token distributions", title, _divergence(behaviour)))
    return parts


def _map(panel: heatmaps.Panel) -> dict:
    values = panel.values
    drawn = {"type": "heatmap", "z": [numbers(row) for row in values.to_numpy(dtype=float)]}
    drawn |= {"x": [str(layer) for layer in values.columns], "y": list(values.index)}
    drawn["hovertemplate"] = "layer %{x}, %{y}: %{z:.4g}<extra></extra>"
    drawn |= {"colorscale": DIFFERENCES, "zmid": 0} if panel.signed else {"colorscale": "Cividis"}
    axes = {"yaxis": {"autorange": "reversed"}, "xaxis": axis("layer", type="category")}
    return laid([drawn], panel.title, 150 + 24 * len(values), **axes)


def _outliers(weights: pd.DataFrame) -> dict:
    """Return every matrix: its outliers against the proxy's error."""
    proxy, error = f"{bits(weights)}-bit", error_column(weights)
    hover = f"%{{text}}<br>outliers %{{x:.3g}}, {proxy} error %{{y:.4g}}"
    drawn = [
        _matrices(variant, number, hover, rows, "abs_outlier_frac", error)
        for number, (variant, rows, *_) in enumerate(by_variant(weights))
    ]
    axes = {"xaxis": axis("share of outliers"), "yaxis": axis(f"relative {proxy} error")}
    return laid(drawn, f"Outliers and {proxy} error of each matrix", 420, **axes)


def _update_survival(stored: pd.DataFrame) -> dict | None:
    """Return update survival and cosine of every matrix, by scheme."""
    if "update_cosine" not in stored or stored["update_cosine"].notna().sum() == 0:
        return None
    by_scheme = stored.dropna(subset="update_cosine").groupby("scheme", sort=False)
    hover = "%{text}<br>length %{x:.3g}, cosine %{y:.3f}"
    drawn = [
        _matrices(str(scheme), number, hover, rows, "update_survival", "update_cosine")
        for number, (scheme, rows) in enumerate(by_scheme, 1)
    ]
    axes = {
        "xaxis": axis("length of the stored update over the true one", type="log"),
        "yaxis": axis("cosine with the true update", range=[-0.05, 1.05]),
    }
    return laid(drawn, "How much of the update each scheme stores, by matrix (1, 1: all of it)", 420, **axes)


def _divergence(behaviour: pd.DataFrame) -> list[dict]:
    """Return divergence and agreement by scheme, and divergence by layer, with 95 % intervals over texts."""
    figures = []
    whole, layers = behaviour[behaviour["layer"] < 0], behaviour[behaviour["layer"] >= 0]
    for rows, by, where in ((whole, "scheme", "scheme"), (layers, "layer", "the only layer that is rounded")):
        for column in divergence.AXES if len(rows) else ():
            drawn = []
            for number, (variant, own) in enumerate(rows.groupby("variant", sort=False)):
                ends = [divergence.interval(row, column) for row in own.itertuples()]
                drawn.append(bars(variant, number, [str(place) for place in own[by]], ends))
            title = f"{divergence.AXES[column]}; n = {rows['n'].min():,} texts"
            lowest = "tozero" if column == "kl" else "normal"
            axes = {"xaxis": axis(where, type="category"), "yaxis": {"rangemode": lowest}}
            figures.append(laid(drawn, title, 360, **axes))
    return figures


def bars(name: str, number: int, x: list, ends: list[tuple[float, float, float]]) -> dict:
    """Return points on a category axis, each with estimate, low and high; `number` is of the colour and symbol."""
    text = [f"{value:.4g} [{low:.4g}, {high:.4g}]" for value, low, high in ends]
    place = {"x": x, "y": [value for value, _, _ in ends], "error_y": reach(ends, 2), "text": text}
    return _dots(name, number, "%{x}: %{text}", place)


def reach(ends: list[tuple[float, float, float]], thickness: int) -> dict:
    """Return plotly's error bars of estimates, lows and highs."""
    above, below = [high - value for value, _, high in ends], [value - low for value, low, _ in ends]
    return {"type": "data", "array": above, "arrayminus": below, "thickness": thickness}


def _matrices(name: str, number: int, hover: str, rows: pd.DataFrame, x: str, y: str) -> dict:
    place = {"x": numbers(rows[x]), "y": numbers(rows[y]), "text": rows["tensor"].tolist()}
    return _dots(name, number, hover, place)


def _dots(name: str, number: int, hover: str, place: dict) -> dict:
    look = {"color": VARIANTS[number % len(VARIANTS)], "symbol": SYMBOLS[number % len(SYMBOLS)]}
    dots = {"type": "scatter", "mode": "markers", "name": name, "marker": {**look, "size": 9, "opacity": 0.8}}
    return {**dots, "hovertemplate": f"{hover}<extra>{name}</extra>", **place}
