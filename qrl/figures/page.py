"""The weights of a study as one HTML page that needs nothing else: maps to point at, tables to sort by eye.

plotly's JavaScript lies inside, so that the page opens from MLflow's artifacts, from a mail or from a disk without a network.
"""

from __future__ import annotations

import html
import json
import math
import os
from importlib.resources import files
from itertools import count
from pathlib import Path

import pandas as pd

from qrl.figures import heatmaps
from qrl.figures.canvas import INK, VARIANTS
from qrl.names import BASE

DIFFERENCES = [[0, "#2d004b"], [0.25, "#998ec3"], [0.5, "#f7f7f7"], [0.75, "#f1a340"], [1, "#7f3b08"]]  # PuOr, as in the PNGs
_NUMBERS = count()
CONFIG = {"displaylogo": False, "responsive": True}
STYLE = "body{font:15px/1.5 sans-serif;color:#222;max-width:1100px;margin:2em auto;padding:0 1em}h1{font-size:1.5em}h2{font-size:1.15em;margin-top:2em}p{color:#6b6b6b}"


def write(weights: pd.DataFrame, stored: pd.DataFrame, path: str | Path) -> None:
    """Writes the page.

    Args:
        weights: a row per variant and tensor, as `diagnose` writes them.
        stored: a row per scheme, variant and tensor; may be empty.
        path: the HTML file.
    """
    sections = [("What training moved", heatmaps.movement_found(weights), [*map(_map, heatmaps.movement_panels(weights)), _outliers(weights)])]
    if len(stored):
        found = heatmaps.schemes_found(stored)
        sections.append(("What the schemes store", found, [_survival(stored), *map(_map, heatmaps.scheme_panels(stored))]))
    body = "".join(f"<h2>{title}</h2><h1>{html.escape(found)}</h1>{''.join(_div(figure) for figure in figures if figure)}" for title, found, figures in sections)
    note = html.escape(heatmaps.movement_note(weights)) + " Point at a cell for its matrix and value; drag to enlarge, double-click to return."
    text = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>qrl: weights</title><style>{STYLE}</style><script>{_javascript()}</script></head><body><p>{note}</p>{body}</body></html>'
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def _javascript() -> str:
    """plotly's own, from its package; the rest of that package takes a second to import and is not needed."""
    return (files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")


def _div(figure: dict) -> str:
    name = f"figure{next(_NUMBERS)}"
    data, layout, config = (json.dumps(part, allow_nan=False).replace("</", "<\\/") for part in (figure["data"], figure["layout"], CONFIG))
    return f'<div id="{name}"></div><script>Plotly.newPlot("{name}", {data}, {layout}, {config})</script>'


def _numbers(values) -> list:
    """As JSON knows them: NaN and infinity are null."""
    return [float(value) if math.isfinite(value) else None for value in values]


def _map(panel: heatmaps.Panel):
    values = panel.values
    colours = {"colorscale": DIFFERENCES, "zmid": 0} if panel.signed else {"colorscale": "Cividis"}
    hover = "layer %{x}, %{y}: %{z:.4g}<extra></extra>"
    rows = [_numbers(row) for row in values.to_numpy(dtype=float)]
    drawn = {"type": "heatmap", "z": rows, "x": [str(layer) for layer in values.columns], "y": list(values.index), "hovertemplate": hover, **colours}
    return _laid([drawn], panel.title, 150 + 24 * len(values), yaxis={"autorange": "reversed"}, xaxis={"title": {"text": "layer"}, "type": "category"})


def _outliers(weights: pd.DataFrame):
    """Every matrix: its outliers against its 4-bit error."""
    variants = [BASE, *sorted(set(weights["variant"]) - {BASE})]
    drawn = []
    for variant, colour in zip(variants, VARIANTS, strict=False):
        rows = weights[weights["variant"] == variant]
        place = {"x": _numbers(rows["abs_outlier_frac"]), "y": _numbers(rows["w4_relative_mse"]), "text": rows["tensor"].tolist()}
        hover = "%{text}<br>outliers %{x:.3g}, 4-bit error %{y:.4g}<extra>" + variant + "</extra>"
        drawn.append(_dots(variant, colour, hover, place))
    axes = {"xaxis": {"title": {"text": "share of outliers"}}, "yaxis": {"title": {"text": "relative error of 4 bits"}}}
    return _laid(drawn, "Each matrix: outliers and 4-bit error", 420, **axes)


def _survival(stored: pd.DataFrame):
    """Update survival and cosine of every matrix, by scheme."""
    if "update_cosine" not in stored or stored["update_cosine"].notna().sum() == 0:
        return None
    drawn = []
    for (scheme, rows), colour in zip(stored.dropna(subset="update_cosine").groupby("scheme", sort=False), VARIANTS[1:] * 4, strict=False):
        place = {"x": _numbers(rows["update_survival"]), "y": _numbers(rows["update_cosine"]), "text": rows["tensor"].tolist()}
        hover = "%{text}<br>length %{x:.3g}, cosine %{y:.3f}<extra>" + str(scheme) + "</extra>"
        drawn.append(_dots(str(scheme), colour, hover, place))
    axes = {"xaxis": {"title": {"text": "length of the stored update over the true one"}, "type": "log"}, "yaxis": {"title": {"text": "its cosine with the true one"}, "range": [-0.05, 1.05]}}
    return _laid(drawn, "What each scheme stores of the update, matrix by matrix (1, 1: all of it)", 420, **axes)


def _dots(name: str, colour: str, hover: str, place: dict) -> dict:
    marker = {"color": colour, "size": 8, "opacity": 0.75}
    return {"type": "scatter", "mode": "markers", "name": name, "marker": marker, "hovertemplate": hover, **place}


def _laid(drawn: list[dict], title: str, height: int, **axes) -> dict:
    margin = {"l": 90, "r": 20, "t": 50, "b": 50}
    return {"data": drawn, "layout": {"title": {"text": title, "font": {"size": 15}}, "height": height, "font": {"color": INK}, "margin": margin, **axes}}
