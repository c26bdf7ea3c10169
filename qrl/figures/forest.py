"""Gain survival on a study's page: a forest plot that shows which bounds decide on each verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from qrl.figures import interactive
from qrl.figures.canvas import GREEN, INK, RED
from qrl.figures.comparison import VERDICTS
from qrl.figures.page import axis, plotly_figure
from qrl.names import FULL
from qrl.stats import signed

if TYPE_CHECKING:
    from qrl.figures.cards import Row

SYMBOLS = {"survives": "circle", "reduced": "diamond", "lost": "square", "inconclusive": "circle"}
TITLE = "Gain survival. Thin: 95 % interval. Dashed: minus the margin. Dotted: half of the gain is lost"
BOUNDS = "Thick: between the one-sided 95 % bounds, which decide"


def forest(rows: Sequence[Row], table: Mapping[str, Any]) -> dict | None:
    """Return gain survival of every quantized row with the lines that decide on its verdict; None without rows.

    Args:
        rows: of table.json, those of quantized schemes.
        table: table.json. Older ones have no one-sided bounds, which are left out then.
    """
    if not rows:
        return None
    traces = []
    shapes = [_vertical(0.0, {"color": INK, "width": 1})]
    notes = []
    for number, row in enumerate(rows):
        margin = row.entry["margin"]
        text = f"{headline(row.entry)}; gain survival {interval(row.entry['gain_survival'])}"
        traces += _marks(row, f"{row.name}: {text}, margin {margin:.3f}", text)

        half_gain = _half_gain(table, row.entry["trained"])
        if half_gain is not None:
            shapes.append(_vertical(-half_gain, {"color": RED, "width": 2, "dash": "dot"}, number))
        shapes.append(_vertical(-margin, {"color": GREEN, "width": 2, "dash": "dash"}, number))
        notes.append(
            {
                "text": f"<b>{row.name}</b>: {text}",
                "xref": "paper",
                "x": 0.02,
                "xanchor": "left",
                "y": row.name,
                "yshift": 20,
                "showarrow": False,
            }
        )

    title = TITLE
    if any(row.entry.get("gain_survival_bounds") for row in rows):
        title += f". {BOUNDS}"
    if any(row.entry.get("per_seed") for row in rows):
        title += ". Strokes: each seed"
    return plotly_figure(
        traces,
        title,
        120 + 80 * len(rows),
        shapes=shapes,
        annotations=notes,
        xaxis=axis("gain survival (accuracy)", nticks=6),
        yaxis={"type": "category", "autorange": "reversed", "showticklabels": False},
        margin={"l": 15, "r": 15, "t": 20, "b": 50},
    )


def headline(entry: Mapping[str, Any]) -> str:
    """Return the verdict with the share of the gain that is kept; of an older table, the verdict alone."""
    return entry.get("headline") or entry["verdict"]


def interval(value: Mapping[str, float]) -> str:
    """Return a difference of table.json with its interval."""
    return f"{signed(value['estimate'])} [{signed(value['low'])}, {signed(value['high'])}]"


def _half_gain(table: Mapping[str, Any], variant: str) -> float | None:
    """Return half of a variant's gain at full precision; None if no gain is shown, or if it is unknown."""
    full = table.get(FULL)
    if full is None:
        return None
    entry = full
    if full["trained"] != variant:
        entry = (full.get("others") or {}).get(variant)
    if not entry or entry["delta"]["low"] <= 0:
        return None
    return entry["delta"]["estimate"] / 2


def _vertical(x: float, line: dict[str, Any], number: int | None = None) -> dict:
    """Return a vertical line, through all rows or through one."""
    height: dict[str, Any] = {"y0": 0, "y1": 1, "yref": "paper"}
    if number is not None:
        height = {"y0": number - 0.5, "y1": number + 0.5}
    return {"type": "line", "x0": x, "x1": x, "line": line} | height


def _marks(row: Row, hover: str, text: str) -> list[dict]:
    """Return a row's thick bar, a stroke for each of several seeds, and its dot with the 95 % interval."""
    value = row.entry["gain_survival"]
    verdict = row.entry["verdict"]
    colour = VERDICTS.get(verdict, INK)
    traces = []
    bounds = row.entry.get("gain_survival_bounds")
    if bounds:
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": bounds,
                "y": [row.name] * 2,
                "line": {"color": colour, "width": 9},
                "opacity": 0.6,
                "showlegend": False,
                "hoverinfo": "skip",
            }
        )
    traces += _strokes(row)
    traces.append(
        {
            "type": "scatter",
            "mode": "markers",
            "x": [value["estimate"]],
            "y": [row.name],
            "text": [text],
            "marker": {"color": colour, "size": 12, "symbol": SYMBOLS.get(verdict, "circle")},
            "error_x": interactive.reach([(value["estimate"], value["low"], value["high"])], 3),
            "showlegend": False,
            "hovertemplate": f"{hover}<extra></extra>",
        }
    )
    return traces


def _strokes(row: Row) -> list[dict]:
    """Return a stroke for each of several seeds, in one trace."""
    seeds = row.entry.get("per_seed") or {}
    by_seed = {seed: values["gain_survival"] for seed, values in seeds.items() if values.get("gain_survival")}
    if not by_seed:
        return []
    strokes = {
        "type": "scatter",
        "mode": "markers",
        "x": [survival["estimate"] for survival in by_seed.values()],
        "y": [row.name] * len(by_seed),
        "text": [f"seed {seed}: {interval(survival)}" for seed, survival in by_seed.items()],
        "marker": {"symbol": "line-ns", "size": 16, "line": {"color": INK, "width": 2}},
        "showlegend": False,
        "hovertemplate": "%{text}<extra></extra>",
    }
    return [strokes]
