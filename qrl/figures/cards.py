"""The parts of a study's page that are text: head, a card per scheme and per gate, the table of cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from qrl.figures import page
from qrl.figures.comparison import VERDICTS
from qrl.names import BASE, FULL, scheme
from qrl.stats import signed


@dataclass(frozen=True)
class Gate:
    """What a gate decided about one stage."""

    stage: str
    version: str  # empty where none holds the stage
    cell: str
    decision: str  # passed or refused
    reason: str


@dataclass(frozen=True)
class Row:
    """One trained variant under one scheme."""

    scheme: str
    entry: Mapping[str, Any]  # of table.json
    name: str  # with its variant where there are several


def headline(table: Mapping[str, Any]) -> str:
    """Return the study's finding as a title: `The gain survives nf4; it is lost under awq`."""
    table = {scheme(name): entry for name, entry in table.items()}
    rows = [row for row in rows_of(table) if row.entry.get("verdict")]
    if not rows:
        return (
            f"Accuracy changes by {interval(table[FULL]['delta'])} at full precision" if FULL in table else "No verdict"
        )
    if len({row.entry["trained"] for row in rows}) > 1:
        counts = ((verdict, sum(row.entry["verdict"] == verdict for row in rows)) for verdict in VERDICTS)
        listed = ", ".join(f"{verdict} in {number}" for verdict, number in counts if number)
        return f"The gain under {len(rows)} variants and schemes: {listed}"
    says = {
        "survives": "{} survives {}",
        "lost": "{} is lost under {}",
        "inconclusive": "whether {} survives {} is inconclusive",
    }
    parts = []
    for verdict, sentence in says.items():
        if schemes := [row.name for row in rows if row.entry["verdict"] == verdict]:
            listed = " and ".join(filter(None, (", ".join(schemes[:-1]), schemes[-1])))
            parts.append(sentence.format("it" if parts else "the gain", listed))
    finding = "; ".join(parts)
    return finding[0].upper() + finding[1:]


def rows_of(table: Mapping[str, Any]) -> list[Row]:
    """Return a row per scheme and trained variant, in the order of the table."""
    entries = [
        (name, entry) for name, first in table.items() for entry in (first, *(first.get("others") or {}).values())
    ]
    several = len({entry["trained"] for _, entry in entries}) > 1
    return [
        Row(name, entry, f"{entry['trained']} · {_label(name, entry)}" if several else _label(name, entry))
        for name, entry in entries
    ]


def _label(name: str, entry: Mapping[str, Any]) -> str:
    """Return a scheme as tables show it: full precision with its dtype, where that is known."""
    return entry.get("label") or name


def heading(table: Mapping[str, Any], facts: Mapping[str, str]) -> str:
    """Return the head of the page: finding, gain at full precision, facts."""
    lead = ""
    if FULL in table:
        entry = table[FULL]
        cells, delta = entry["cells"], entry["delta"]
        before, after = (cells[variant]["accuracy"] for variant in (BASE, entry["trained"]))
        verb = "raises" if delta["low"] > 0 else "lowers" if delta["high"] < 0 else "does not significantly change"
        lead = (
            f"At full precision, training ({entry['trained']}) {verb} held-out accuracy: {before:.3f} before, "
            f"{after:.3f} after, a difference of {interval(delta)} on {cells[BASE]['n']:,} questions."
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


def card(row: Row, sizes: Mapping[str, int]) -> str:
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


def _size(row: Row, sizes: Mapping[str, int]) -> str:
    small, large = (sizes.get(f"{row.entry['trained']}:{name}") for name in (row.scheme, FULL))
    if not small:
        return ""
    if not large:
        return f"{_bytes(small)} of weights"
    return f"{_bytes(large)} of weights become {_bytes(small)}: {100 * (1 - small / large):.0f} % saved"


def _bytes(size: int) -> str:
    unit, name = (1e9, "GB") if size >= 1e9 else (1e6, "MB")
    return f"{size / unit:.2f} {name}"


def _meaning(row: Row) -> str:
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
    n = entry.get("n_to_decide")
    more = f" About {float(f'{n:.2g}'):,.0f} questions would decide." if n else ""
    return f"This study cannot decide: {entry['reason']}.{more}"


def cells_table(table: Mapping[str, Any], rows: list[Row], sizes: Mapping[str, int]) -> str:
    """Return the table of cells, a row per trained variant and scheme."""
    n = [cell["n"] for entry in table.values() for cell in entry["cells"].values()]
    questions = f"{n[0]:,}" if min(n) == max(n) else f"{min(n):,} to {max(n):,}"
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
                interval(entry["delta"]),
                interval(survival) if survival else "reference",
                entry.get("verdict") or "",
                *([_bytes(size) if size else ""] if sizes else []),
            )
        )
    note = f"n = {questions} held-out questions per cell. ± is one standard error, brackets are 95 % intervals."
    return f'{page.table(head, body)}<p class="faint small">{note}</p>'


def gates_finding(gates: Sequence[Gate]) -> str:
    """Return what the gates decided, in a sentence."""
    refused = [gate.stage for gate in gates if gate.decision == "refused"]
    if refused:
        return f"The gate refused {', '.join(refused)}. A stage that was refused stays as it was."
    return "Every candidate passed its gate."


def gate_card(gate: Gate) -> str:
    """Return the card of one stage."""
    holder = f"version {gate.version}, {gate.cell}" if gate.version else gate.cell
    return (
        f'<article class="card {escape(gate.decision)}"><h3><span>{escape(gate.stage)}</span>'
        f'<span class="verdict">{escape(gate.decision)}</span></h3>'
        f"<p>{escape(holder)}</p><p class='small'>{escape(gate.reason)}</p></article>"
    )


def interval(value: Mapping[str, float]) -> str:
    """Return a difference of table.json with its interval."""
    return f"{signed(value['estimate'])} [{signed(value['low'])}, {signed(value['high'])}]"
