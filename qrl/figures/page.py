"""The weights of a study as one HTML page that needs nothing else: maps to point at, tables to sort by eye.

plotly's JavaScript lies inside, so that the page opens from MLflow's artifacts, from a mail or from a disk without a network.
"""

from __future__ import annotations

import html
import os
from pathlib import Path

import pandas as pd

from qrl.figures import heatmaps
from qrl.figures.canvas import INK, VARIANTS
from qrl.names import BASE

CONFIG = {"displaylogo": False, "responsive": True}
STYLE = "body{font:15px/1.5 sans-serif;color:#222;max-width:1100px;margin:2em auto;padding:0 1em}h1{font-size:1.5em}h2{font-size:1.15em;margin-top:2em}p{color:#6b6b6b}"


def write(weights: pd.DataFrame, stored: pd.DataFrame, path: str | Path) -> None:
    """Writes the page.

    Args:
        weights: a row per variant and tensor, as `diagnose` writes them.
        stored: a row per scheme, variant and tensor; may be empty.
        path: the HTML file.
    """
    from plotly.offline import get_plotlyjs

    sections = [("What training moved", heatmaps.movement_found(weights), [*map(_map, heatmaps.movement_panels(weights)), _outliers(weights)])]
    if len(stored):
        found = heatmaps.schemes_found(stored)
        sections.append(("What the schemes store", found, [_survival(stored), *map(_map, heatmaps.scheme_panels(stored))]))
    body = "".join(f"<h2>{title}</h2><h1>{html.escape(found)}</h1>{''.join(_div(figure) for figure in figures if figure)}" for title, found, figures in sections)
    note = html.escape(heatmaps.movement_note(weights)) + " Point at a cell for its matrix and value; drag to enlarge, double-click to return."
    text = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>qrl: weights</title><style>{STYLE}</style><script>{get_plotlyjs()}</script></head><body><p>{note}</p>{body}</body></html>'
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def _div(figure) -> str:
    return figure.to_html(full_html=False, include_plotlyjs=False, config=CONFIG)


def _map(panel: heatmaps.Panel):
    import plotly.graph_objects as go

    values = panel.values
    colours = {"colorscale": "PuOr", "reversescale": True, "zmid": 0} if panel.signed else {"colorscale": "Cividis"}
    hover = "layer %{x}, %{y}: %{z:.4g}<extra></extra>"
    drawn = go.Heatmap(z=values.to_numpy().tolist(), x=[str(layer) for layer in values.columns], y=list(values.index), hovertemplate=hover, **colours)
    return _laid(go.Figure(drawn), panel.title, 150 + 24 * len(values), yaxis={"autorange": "reversed"}, xaxis={"title": "layer", "type": "category"})


def _outliers(weights: pd.DataFrame):
    """Every matrix: its outliers against its 4-bit error."""
    import plotly.graph_objects as go

    variants = [BASE, *sorted(set(weights["variant"]) - {BASE})]
    figure = go.Figure()
    for variant, colour in zip(variants, VARIANTS, strict=False):
        rows = weights[weights["variant"] == variant]
        place = {"x": rows["abs_outlier_frac"].tolist(), "y": rows["w4_relative_mse"].tolist(), "text": rows["tensor"].tolist()}
        hover = "%{text}<br>outliers %{x:.3g}, 4-bit error %{y:.4g}<extra>" + variant + "</extra>"
        figure.add_scatter(mode="markers", name=variant, marker={"color": colour, "size": 8, "opacity": 0.75}, hovertemplate=hover, **place)
    axes = {"xaxis": {"title": "share of outliers"}, "yaxis": {"title": "relative error of 4 bits"}}
    return _laid(figure, "Each matrix: outliers and 4-bit error", 420, **axes)


def _survival(stored: pd.DataFrame):
    """Update survival and cosine of every matrix, by scheme."""
    import plotly.graph_objects as go

    if "update_cosine" not in stored or stored["update_cosine"].notna().sum() == 0:
        return None
    figure = go.Figure()
    for (scheme, rows), colour in zip(stored.dropna(subset="update_cosine").groupby("scheme", sort=False), VARIANTS[1:] * 4, strict=False):
        place = {"x": rows["update_survival"].tolist(), "y": rows["update_cosine"].tolist(), "text": rows["tensor"].tolist()}
        hover = "%{text}<br>length %{x:.3g}, cosine %{y:.3f}<extra>" + str(scheme) + "</extra>"
        figure.add_scatter(mode="markers", name=str(scheme), marker={"color": colour, "size": 8, "opacity": 0.75}, hovertemplate=hover, **place)
    axes = {"xaxis": {"title": "length of the stored update over the true one", "type": "log"}, "yaxis": {"title": "its cosine with the true one", "range": [-0.05, 1.05]}}
    return _laid(figure, "What each scheme stores of the update, matrix by matrix (1, 1: all of it)", 420, **axes)


def _laid(figure, title: str, height: int, **axes):
    figure.update_layout(
        title={"text": title, "font": {"size": 15}}, height=height, template="plotly_white", font={"color": INK},
        margin={"l": 90, "r": 20, "t": 50, "b": 50}, **axes,
    )  # fmt: skip
    return figure
