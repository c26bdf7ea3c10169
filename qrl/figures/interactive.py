"""plotly's figures of weights and next-token distributions, as plain mappings; pointing shows matrix and value."""

import pandas as pd

from qrl.figures import divergence, heatmaps
from qrl.figures.canvas import VARIANTS, by_variant
from qrl.figures.page import Section, axis, numbers, plotly_figure
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
    """Return one map, layer × projection."""
    trace = {
        "type": "heatmap",
        "x": [str(layer) for layer in panel.values.columns],
        "y": list(panel.values.index),
        "z": [numbers(row) for row in panel.values.to_numpy(dtype=float)],
        "hovertemplate": "layer %{x}, %{y}: %{z:.4g}<extra></extra>",
    }
    if panel.signed:
        trace |= {"colorscale": DIFFERENCES, "zmid": 0}
    else:
        trace["colorscale"] = "Cividis"
    return plotly_figure(
        [trace],
        panel.title,
        150 + 24 * len(panel.values),
        xaxis=axis("layer", type="category"),
        yaxis={"autorange": "reversed"},
    )


def _outliers(weights: pd.DataFrame) -> dict:
    """Return every matrix: its outliers against the proxy's error."""
    proxy = f"{bits(weights)}-bit"
    hover = f"%{{text}}<br>outliers %{{x:.3g}}, {proxy} error %{{y:.4g}}"
    traces = [
        _matrices(variant, number, hover, rows, "abs_outlier_frac", error_column(weights))
        for number, (variant, rows, *_) in enumerate(by_variant(weights))
    ]
    return plotly_figure(
        traces,
        f"Outliers and {proxy} error of each matrix",
        420,
        xaxis=axis("share of outliers"),
        yaxis=axis(f"relative {proxy} error"),
    )


def _update_survival(stored: pd.DataFrame) -> dict | None:
    """Return update survival and cosine of every matrix, by scheme; None if no update is known."""
    if "update_cosine" not in stored or stored["update_cosine"].notna().sum() == 0:
        return None
    by_scheme = stored.dropna(subset="update_cosine").groupby("scheme", sort=False)
    hover = "%{text}<br>length %{x:.3g}, cosine %{y:.3f}"
    traces = [
        _matrices(str(scheme), number, hover, rows, "update_survival", "update_cosine")
        for number, (scheme, rows) in enumerate(by_scheme, 1)
    ]
    title = "How much of the update each scheme stores, by matrix (1, 1: all of it)"
    return plotly_figure(
        traces,
        title,
        420,
        xaxis=axis("length of the stored update over the true one", type="log"),
        yaxis=axis("cosine with the true update", range=[-0.05, 1.05]),
    )


def _divergence(behaviour: pd.DataFrame) -> list[dict]:
    """Return divergence and agreement by scheme, and divergence by layer, with 95 % intervals over texts."""
    of_models = behaviour[behaviour["layer"] < 0]
    of_layers = behaviour[behaviour["layer"] >= 0]
    plots = []
    if len(of_models):
        plots += [_divergence_by(of_models, "scheme", "scheme", measure) for measure in divergence.AXES]
    if len(of_layers):
        axis_label = "the only layer that is rounded"
        plots += [_divergence_by(of_layers, "layer", axis_label, measure) for measure in divergence.AXES]
    return plots


def _divergence_by(rows: pd.DataFrame, category: str, axis_label: str, measure: str) -> dict:
    """Return one measure over a column of categories, variants next to each other."""
    traces = []
    for number, (variant, variant_rows) in enumerate(rows.groupby("variant", sort=False)):
        intervals = [divergence.interval(row, measure) for row in variant_rows.itertuples()]
        traces.append(bars(variant, number, [str(value) for value in variant_rows[category]], intervals))
    title = f"{divergence.AXES[measure]}; n = {rows['n'].min():,} texts"
    range_mode = "tozero" if measure == "kl" else "normal"
    return plotly_figure(traces, title, 360, xaxis=axis(axis_label, type="category"), yaxis={"rangemode": range_mode})


def bars(name: str, number: int, x: list, intervals: list[tuple[float, float, float]]) -> dict:
    """Return points on a category axis, each with estimate, low and high; `number` selects colour and symbol."""
    values = {
        "x": x,
        "y": [estimate for estimate, _, _ in intervals],
        "error_y": reach(intervals, 2),
        "text": [f"{estimate:.4g} [{low:.4g}, {high:.4g}]" for estimate, low, high in intervals],
    }
    return _dots(name, number, "%{x}: %{text}", values)


def reach(intervals: list[tuple[float, float, float]], thickness: int) -> dict:
    """Return plotly's error bars of estimates, lows and highs."""
    return {
        "type": "data",
        "array": [high - estimate for estimate, _, high in intervals],
        "arrayminus": [estimate - low for estimate, low, _ in intervals],
        "thickness": thickness,
    }


def _matrices(name: str, number: int, hover: str, rows: pd.DataFrame, x: str, y: str) -> dict:
    """Return a dot for each matrix, two columns against each other."""
    values = {"x": numbers(rows[x]), "y": numbers(rows[y]), "text": rows["tensor"].tolist()}
    return _dots(name, number, hover, values)


def _dots(name: str, number: int, hover: str, values: dict) -> dict:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "marker": {
            "color": VARIANTS[number % len(VARIANTS)],
            "symbol": SYMBOLS[number % len(SYMBOLS)],
            "size": 9,
            "opacity": 0.8,
        },
        "hovertemplate": f"{hover}<extra>{name}</extra>",
        **values,
    }
