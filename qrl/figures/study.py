"""A study as one page to send to a colleague: does the gain survive, at what size, and how do we know?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from qrl.figures import interactive, page, rewards
from qrl.figures.canvas import BLUE, INK, RED
from qrl.figures.comparison import VERDICTS
from qrl.figures.heatmaps import movement_note
from qrl.figures.page import Section, laid, numbers
from qrl.names import BASE, FULL, scheme
from qrl.stats import signed

HOW_TO_READ = (
    "Square brackets and bars are 95 % intervals. Accuracy is the share of held-out questions answered correctly. "
    "The gain is the accuracy of the trained model minus that of the base model. Gain survival is the gain under a "
    "quantization scheme minus the gain at full precision: 0 means that quantization leaves the gain intact, below 0 "
    "that it costs some of it. The gain survives where the one-sided 95 % lower bound of gain survival lies above minus the "
    "margin, and is lost where the upper bound lies below; otherwise the sample is too small to decide."
)


@dataclass(frozen=True)
class Gate:
    """What a gate decided about one stage."""

    stage: str
    version: str  # empty where none holds the stage
    cell: str
    decision: str  # passed or refused
    reason: str


@dataclass(frozen=True)
class Study:
    """What the page shows. Whatever is missing or empty is left out.

    `table` is as `table.json` holds it; `facts` is the head of the page, label → text; `sizes` are bytes of weights by
    `variant:scheme`. `history` has a row per training step; `weights`, `stored` and `behaviour` are what `diagnose`
    writes.
    """

    table: Mapping[str, Any]
    facts: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    gates: Sequence[Gate] = ()
    history: pd.DataFrame = field(default_factory=pd.DataFrame)
    weights: pd.DataFrame = field(default_factory=pd.DataFrame)
    stored: pd.DataFrame = field(default_factory=pd.DataFrame)
    behaviour: pd.DataFrame = field(default_factory=pd.DataFrame)


@dataclass(frozen=True)
class _Row:
    """One trained variant under one scheme."""

    scheme: str
    entry: Mapping[str, Any]  # of table.json
    name: str  # with its variant where there are several


def weights_page(weights: pd.DataFrame, stored: pd.DataFrame, behaviour: pd.DataFrame, path: str | Path) -> None:
    """Write what `diagnose` measured as a page of its own.

    Args:
        weights, stored, behaviour: as in `interactive.sections`.
        path: the HTML file.
    """
    head = f'<h1>What training and quantization did to the weights</h1><p class="faint">{movement_note(weights)}</p>'
    foot = f'<p class="faint small">{interactive.READ}</p>'
    page.write("qrl: weights", head, interactive.sections(weights, stored, behaviour), path, foot)


def report(study: Study, path: str | Path) -> None:
    """Write the page of a whole study.

    Args:
        study: what is known of it.
        path: the HTML file.
    """
    table = {scheme(name): entry for name, entry in study.table.items()}  # older tables say fp16
    rows = _rows(table)
    quantized = [row for row in rows if row.entry.get("gain_survival")]
    cards = "".join(_card(row, study.sizes) for row in quantized) or (
        "<p>This study has no quantized scheme, so gain survival is not defined.</p>"
    )
    sections = [
        Section("Verdicts", "", [f'<div class="cards">{cards}</div>']),
        Section("Cells", "", [_cells_table(table, rows, study.sizes), _forest(quantized)]),
    ]
    if study.gates:
        decisions = f'<div class="cards">{"".join(map(_gate, study.gates))}</div>'
        sections.append(Section("Gates and versions", _gates_finding(study.gates), [decisions]))
    sections += [Section("Accuracy of every cell", "", [_matrix(table)], folded=True), *_training(study.history)]
    if len(study.weights):
        parts = interactive.sections(study.weights, study.stored, study.behaviour)
        sections += [part._replace(folded=True) for part in parts]
    note = f"{movement_note(study.weights)} {interactive.READ}" if len(study.weights) else interactive.READ
    foot = f'<h2>How to read this page</h2><p>{HOW_TO_READ}</p><p class="faint small">{escape(note)}</p>'
    page.write(f"qrl: {headline(table)}", _head(table, study.facts), sections, path, foot)


def headline(table: Mapping[str, Any]) -> str:
    """Return the study's finding as a title: `The gain survives nf4; it is lost under awq`."""
    table = {scheme(name): entry for name, entry in table.items()}
    rows = [row for row in _rows(table) if row.entry.get("verdict")]
    if not rows:
        return (
            f"Accuracy changes by {_interval(table[FULL]['delta'])} at full precision"
            if FULL in table
            else "No verdict"
        )
    if len({row.entry["trained"] for row in rows}) > 1:
        counts = ((verdict, sum(row.entry["verdict"] == verdict for row in rows)) for verdict in VERDICTS)
        listed = ", ".join(f"{verdict} in {number}" for verdict, number in counts if number)
        return f"The gain under {len(rows)} variants and schemes: {listed}"
    says = {
        "survives": "{} survives {}",
        "lost": "{} is lost under {}",
        "inconclusive": "whether {} survives {} is open",
    }
    parts = []
    for verdict, sentence in says.items():
        if schemes := [row.name for row in rows if row.entry["verdict"] == verdict]:
            listed = " and ".join(filter(None, (", ".join(schemes[:-1]), schemes[-1])))
            parts.append(sentence.format("it" if parts else "the gain", listed))
    finding = "; ".join(parts)
    return finding[0].upper() + finding[1:]


def _rows(table: Mapping[str, Any]) -> list[_Row]:
    entries = [
        (name, entry) for name, first in table.items() for entry in (first, *(first.get("others") or {}).values())
    ]
    several = len({entry["trained"] for _, entry in entries}) > 1
    return [
        _Row(name, entry, f"{entry['trained']} · {_label(name, entry)}" if several else _label(name, entry))
        for name, entry in entries
    ]


def _label(name: str, entry: Mapping[str, Any]) -> str:
    """Return a scheme as tables show it: full precision with its dtype, where that is known."""
    return f"{name} ({entry['dtype']})" if name == FULL and entry.get("dtype") else name


def _head(table: Mapping[str, Any], facts: Mapping[str, str]) -> str:
    lead = ""
    if FULL in table:
        entry = table[FULL]
        cells, delta = entry["cells"], entry["delta"]
        before, after = (cells[variant]["accuracy"] for variant in (BASE, entry["trained"]))
        verb = "raises" if delta["low"] > 0 else "lowers" if delta["high"] < 0 else "does not significantly change"
        lead = (
            f"At full precision, training ({entry['trained']}) {verb} held-out accuracy: {before:.3f} before, "
            f"{after:.3f} after, a difference of {_interval(delta)} on {cells[BASE]['n']:,} questions."
        )
    shown = "".join(
        f"<div{' class=wide' if len(text) > 40 else ''}><dt>{escape(label)}</dt><dd>{escape(text)}</dd></div>"
        for label, text in facts.items()
        if text
    )
    return (
        f'<header><p class="faint">qrl: does RL training survive quantization?</p><h1>{escape(headline(table))}</h1>'
        f'<p class="lead">{escape(lead)}</p><dl class="facts">{shown}</dl></header>'
    )


def _card(row: _Row, sizes: Mapping[str, int]) -> str:
    """Return the card of one scheme: verdict, gain survival, size, and what that means."""
    value, verdict = row.entry["gain_survival"], row.entry["verdict"]
    size = _size(row, sizes)
    return (
        f'<article class="card {escape(verdict)}"><h3><span>{escape(row.name)}</span>'
        f'<span class="verdict">{escape(verdict)}</span></h3>'
        f'<p class="number">{signed(value["estimate"])} '
        f"<small>[{signed(value['low'])}, {signed(value['high'])}]</small></p>"
        f'<div class="faint small">gain survival, 95 % interval</div>'
        f"{f'<p>{escape(size)}</p>' if size else ''}<p>{escape(_meaning(row))}</p></article>"
    )


def _size(row: _Row, sizes: Mapping[str, int]) -> str:
    small, large = (sizes.get(f"{row.entry['trained']}:{name}") for name in (row.scheme, FULL))
    if not small:
        return ""
    if not large:
        return f"{_bytes(small)} of weights"
    return f"{_bytes(large)} of weights become {_bytes(small)}: {100 * (1 - small / large):.0f} % saved"


def _bytes(size: int) -> str:
    unit, name = (1e9, "GB") if size >= 1e9 else (1e6, "MB")
    return f"{size / unit:.2f} {name}"


def _meaning(row: _Row) -> str:
    """Return the verdict in plain words."""
    entry, name = row.entry, row.scheme.upper()
    gain = f"the gain over the base model is {signed(entry['delta']['estimate'])} under {name}"
    if entry["verdict"] == "survives":
        return (
            f"Quantizing to {name} keeps what training gave: {gain}. "
            f"With 95 % confidence, any loss is below the margin, {entry['margin']:.3f}."
        )
    if entry["verdict"] == "lost":
        return f"Quantizing to {name} costs more of the gain than the margin, {entry['margin']:.3f}: {gain}."
    more = f" About {entry['n_to_decide']:,} questions would decide." if entry.get("n_to_decide") else ""
    return f"This study cannot decide: {entry['reason']}.{more}"


def _cells_table(table: Mapping[str, Any], rows: list[_Row], sizes: Mapping[str, int]) -> str:
    """Return the table of cells, a row per trained variant and scheme."""
    n = [cell["n"] for entry in table.values() for cell in entry["cells"].values()]
    asked = f"{n[0]:,}" if min(n) == max(n) else f"{min(n):,} to {max(n):,}"
    head = [
        "scheme",
        "base",
        "trained",
        "gain: trained − base",
        "gain survival",
        "verdict",
        *(["weights"] if sizes else []),
    ]
    body = []
    for row in rows:
        entry, cells = row.entry, table[row.scheme]["cells"]
        accuracies = (
            f"{cells[name]['accuracy']:.3f} ± {cells[name]['stderr']:.3f}" for name in (BASE, entry["trained"])
        )
        survival, size = entry.get("gain_survival"), sizes.get(f"{entry['trained']}:{row.scheme}")
        body.append(
            (
                row.name,
                *accuracies,
                _interval(entry["delta"]),
                _interval(survival) if survival else "reference",
                entry.get("verdict") or "",
                *([_bytes(size) if size else ""] if sizes else []),
            )
        )
    note = f"n = {asked} held-out questions per cell. ± is one standard error, brackets are 95 % intervals."
    return f'{page.table(head, body)}<p class="faint small">{note}</p>'


def _gates_finding(gates: Sequence[Gate]) -> str:
    refused = [gate.stage for gate in gates if gate.decision == "refused"]
    if refused:
        return f"The gate refused {', '.join(refused)}. A stage that was refused stays as it was."
    return "Every candidate passed its gate."


def _gate(gate: Gate) -> str:
    """Return the card of one stage."""
    holder = f"version {gate.version}, {gate.cell}" if gate.version else gate.cell
    return (
        f'<article class="card {escape(gate.decision)}"><h3><span>{escape(gate.stage)}</span>'
        f'<span class="verdict">{escape(gate.decision)}</span></h3>'
        f"<p>{escape(holder)}</p><p class='small'>{escape(gate.reason)}</p></article>"
    )


def _matrix(table: Mapping[str, Any]) -> dict:
    """Return accuracy of every cell with its interval."""
    cells = {name: entry["cells"] for name, entry in table.items()}
    drawn = []
    for number, variant in enumerate(next(iter(cells.values()))):
        ends = [(cell[variant]["accuracy"], cell[variant]["low"], cell[variant]["high"]) for cell in cells.values()]
        drawn.append(interactive.bars(variant, number, list(cells), ends))
    n = min(cell["n"] for by_variant in cells.values() for cell in by_variant.values())
    axes = {"xaxis": {"type": "category"}, "yaxis": {"title": {"text": "accuracy"}}, "scattermode": "group"}
    return laid(drawn, f"Accuracy with its 95 % interval; n = {n:,} questions per cell", 420, **axes)


def _interval(value: Mapping[str, float]) -> str:
    return f"{signed(value['estimate'])} [{signed(value['low'])}, {signed(value['high'])}]"


def _forest(rows: list[_Row]) -> dict | None:
    """Return gain survival of every quantized row, and the margin that its interval must clear."""
    if not rows:
        return None
    zero = {"type": "line", "x0": 0, "x1": 0, "y0": 0, "y1": 1, "yref": "paper", "line": {"color": INK, "width": 1}}
    drawn, shapes, notes = [], [zero], []
    for number, row in enumerate(rows):
        value, verdict, margin = row.entry["gain_survival"], row.entry["verdict"], row.entry["margin"]
        text = f"{verdict}, {_interval(value)}"
        dot = {"type": "scatter", "mode": "markers", "x": [value["estimate"]], "y": [row.name], "text": [text]}
        dot |= {"showlegend": False, "marker": {"color": VERDICTS.get(verdict, INK), "size": 12}}
        dot["error_x"] = {
            "type": "data",
            "array": [value["high"] - value["estimate"]],
            "arrayminus": [value["estimate"] - value["low"]],
            "thickness": 3,
        }
        drawn.append(dot | {"hovertemplate": f"{row.name}: {text}, margin {margin:.3f}<extra></extra>"})
        line = {"type": "line", "x0": -margin, "x1": -margin, "y0": number - 0.5, "y1": number + 0.5}
        shapes.append(line | {"line": {"color": RED, "width": 2, "dash": "dash"}})
        place = {"xref": "paper", "x": 0.02, "xanchor": "left", "y": row.name, "yshift": 20, "showarrow": False}
        notes.append(place | {"text": f"<b>{row.name}</b>: {text}"})
    title = "Gain survival with its 95 % interval. Dashed: minus the margin; the gain survives to the right of it"
    axes = {
        "yaxis": {"type": "category", "autorange": "reversed", "showticklabels": False},
        "xaxis": {"title": {"text": "gain survival (accuracy)"}, "nticks": 6},
        "margin": {"l": 15, "r": 15, "t": 20, "b": 50},
    }
    return laid(drawn, title, 120 + 80 * len(rows), shapes=shapes, annotations=notes, **axes)


def _training(history: pd.DataFrame) -> list[Section]:
    measure = next((name for name in rewards.MEASURES if name in history and history[name].notna().any()), None)
    if not measure:
        return []
    curves = [_curve(history, column, title) for column, title in rewards.shown(history, measure).items()]
    return [Section("Training", rewards.reward_found(history, measure), curves, folded=True)]


def _curve(history: pd.DataFrame, column: str, title: str) -> dict:
    """Return one measure of the training, each logged step and its running mean."""
    part, smooth = rewards.smoothed(history, column)
    look = {"type": "scatter", "x": numbers(part["step"]), "showlegend": False}
    drawn = [
        look | {"y": numbers(part[column]), "mode": "markers", "marker": {"color": BLUE, "opacity": 0.4}},
        look | {"y": numbers(smooth), "mode": "lines", "line": {"color": BLUE, "width": 3}},
    ]
    return laid(drawn, title, 260, xaxis={"title": {"text": "optimizer step"}})
