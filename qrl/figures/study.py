"""A study as one page: does the gain survive, how training went, what it moved, what the schemes store."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from qrl.figures import interactive, page, rewards
from qrl.figures.canvas import BLUE, INK, RED
from qrl.figures.comparison import VERDICTS
from qrl.figures.page import Section, laid, numbers
from qrl.names import BASE, FULL
from qrl.stats import signed


def weights_page(weights: pd.DataFrame, stored: pd.DataFrame, said: pd.DataFrame, path: str | Path) -> None:
    """What `diagnose` found, alone.

    Args:
        weights, stored, said: as in `interactive.sections`.
        path: the HTML file.
    """
    note = f"{interactive.heatmaps.movement_note(weights)} {interactive.READ}"
    page.write("qrl: weights", note, interactive.sections(weights, stored, said), path)


def report(
    table: Mapping[str, Any],
    sentence: str,
    history: pd.DataFrame | None,
    weights: pd.DataFrame,
    stored: pd.DataFrame,
    said: pd.DataFrame,
    path: str | Path,
) -> None:
    """The whole study.

    Args:
        table: as `table.json` holds it.
        sentence: the verdict.
        history: of the training, a row per step; None: there is none.
        weights, stored, said: as in `interactive.sections`.
        path: the HTML file.
    """
    sections = [Section("Did the gain survive?", sentence, [_matrix(table), _forest(table)])]
    measure = next(
        (name for name in rewards.MEASURES if history is not None and name in history and history[name].notna().any()),
        None,
    )
    if measure:
        sections.append(
            Section(
                "Training",
                rewards.reward_found(history, measure),
                [_curve(history, column, title) for column, title in rewards.shown(history, measure).items()],
            )
        )
    note = f"Bars and brackets are 95 % intervals. {interactive.heatmaps.movement_note(weights)} {interactive.READ}"
    page.write("qrl: study", note, [*sections, *interactive.sections(weights, stored, said)], path)


def _matrix(table: Mapping[str, Any]) -> dict:
    """Accuracy of every cell with its interval."""
    cells = {scheme: entry["cells"] for scheme, entry in table.items()}
    variants = list(next(iter(cells.values())))
    drawn = []
    for number, variant in enumerate(variants):
        ends = [(cell[variant]["accuracy"], cell[variant]["low"], cell[variant]["high"]) for cell in cells.values()]
        drawn.append(interactive.bars(variant, number, list(cells), ends))
    n = min(cell["n"] for by_variant in cells.values() for cell in by_variant.values())
    axes = {"xaxis": {"type": "category"}, "yaxis": {"title": {"text": "accuracy"}}, "scattermode": "group"}
    return laid(drawn, f"Accuracy of every cell; n = {n:,} questions a cell. {_gain(table)}", 420, **axes)


def _gain(table: Mapping[str, Any]) -> str:
    if FULL not in table:
        return ""
    delta, trained = table[FULL]["delta"], table[FULL]["trained"]
    return f"{trained} − {BASE} at full precision: {_interval(delta)}"


def _interval(value: Mapping[str, float]) -> str:
    return f"{signed(value['estimate'])} [{signed(value['low'])}, {signed(value['high'])}]"


def _forest(table: Mapping[str, Any]) -> dict | None:
    """Gain survival of every trained variant and scheme, a row each, and the margin that it must clear."""
    rows = [
        (scheme, each)
        for scheme, entry in table.items()
        for each in (entry, *entry.get("others", {}).values())
        if each.get("gain_survival")
    ]
    if not rows:
        return None
    several = len({each["trained"] for _, each in rows}) > 1
    drawn, shapes = (
        [],
        [{"type": "line", "x0": 0, "x1": 0, "y0": 0, "y1": 1, "yref": "paper", "line": {"color": INK, "width": 1}}],
    )
    for number, (scheme, each) in enumerate(rows):
        value, verdict = each["gain_survival"], each["verdict"]
        name = f"{each['trained']} · {scheme}" if several else scheme
        reach = {
            "type": "data",
            "array": [value["high"] - value["estimate"]],
            "arrayminus": [value["estimate"] - value["low"]],
            "thickness": 3,
        }
        look = {"color": VERDICTS.get(verdict, INK), "size": 12}
        drawn.append({"type": "scatter", "mode": "markers+text", "x": [value["estimate"]], "y": [name], "error_x": reach, "marker": look, "showlegend": False,
                      "text": [f"{verdict}, {_interval(value)}"], "textposition": "top center", "hovertemplate": f"{name}: {verdict}, {_interval(value)}, margin {each['margin']:.3f}<extra></extra>"})  # fmt: skip
        margin = {"type": "line", "x0": -each["margin"], "x1": -each["margin"], "y0": number - 0.5, "y1": number + 0.5}
        shapes.append(margin | {"line": {"color": RED, "width": 2, "dash": "dash"}})
    axes = {
        "yaxis": {"type": "category", "autorange": "reversed"},
        "xaxis": {"title": {"text": "gain survival: gain under the scheme minus gain at full precision"}},
    }
    return laid(
        drawn,
        "Gain survival by scheme; dashed: the margin, right of which the interval must lie",
        190 + 70 * len(rows),
        shapes=shapes,
        **axes,
    )


def _curve(history: pd.DataFrame, column: str, title: str) -> dict:
    """One measure of the training, each logged step and its running mean."""
    part, smooth = rewards.smoothed(history, column)
    look = {"type": "scatter", "x": numbers(part["step"]), "showlegend": False}
    drawn = [
        look | {"y": numbers(part[column]), "mode": "markers", "marker": {"color": BLUE, "opacity": 0.4}},
        look | {"y": numbers(smooth), "mode": "lines", "line": {"color": BLUE, "width": 3}},
    ]
    return laid(drawn, title, 260, xaxis={"title": {"text": "optimizer step"}})
