"""The parts of a study's page that are text: head, a card per scheme and per gate, the table of cells."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qrl.figures import page
from qrl.figures.comparison import survival_finding
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
    if rows:
        several = len({row.entry["trained"] for row in rows}) > 1
        return survival_finding([(row.name, row.entry["verdict"]) for row in rows], several, "The gain")
    return f"Accuracy changes by {interval(table[FULL]['delta'])} at full precision" if FULL in table else "No verdict"


def rows_of(table: Mapping[str, Any]) -> list[Row]:
    """Return a row per scheme and trained variant, in the order of the table."""
    of_scheme = {name: (first, *(first.get("others") or {}).values()) for name, first in table.items()}
    several = len({entry["trained"] for entries in of_scheme.values() for entry in entries}) > 1
    rows = []
    for name, entries in of_scheme.items():
        for entry in entries:
            label = entry.get("label") or name  # full precision with its dtype, where that is known
            rows.append(Row(name, entry, f"{entry['trained']} · {label}" if several else label))
    return rows


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
    return page.html("study_head", headline=headline(table), lead=lead, facts=facts)


def verdicts(rows: Sequence[Row], sizes: Mapping[str, int]) -> str:
    """Return a card per quantized row: verdict, gain survival, size, and what that means."""
    cards = []
    for row in rows:
        estimate, _, bounds = interval(row.entry["gain_survival"]).partition(" ")
        found = {"name": row.name, "verdict": row.entry["verdict"], "estimate": estimate, "interval": bounds}
        cards.append(found | {"size": _size(row, sizes), "meaning": _meaning(row)})
    return page.html("verdicts", cards=cards)


def _size(row: Row, sizes: Mapping[str, int]) -> str:
    small, large = (sizes.get(f"{row.entry['trained']}:{name}") for name in (row.scheme, FULL))
    if not small:
        return ""
    if not large:
        return f"{_bytes(small)} of weights"
    return f"{_bytes(large)} of weights become {_bytes(small)}: {100 * (1 - small / large):.0f} % saved"


def _bytes(size: int | None) -> str:
    if not size:
        return ""
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
    head = ["scheme", "base", "trained", "gain: trained − base", "gain survival", "verdict"]
    head += ["weights"] if sizes else []
    body = []
    for row in rows:
        entry, survival = row.entry, row.entry.get("gain_survival")
        cells = (table[row.scheme]["cells"][name] for name in (BASE, entry["trained"]))
        accuracies = (f"{cell['accuracy']:.3f} ± {cell['stderr']:.3f}" for cell in cells)
        line = [row.name, *accuracies, interval(entry["delta"]), interval(survival) if survival else "reference"]
        size = [_bytes(sizes.get(f"{entry['trained']}:{row.scheme}"))] if sizes else []
        body.append([*line, entry.get("verdict") or "", *size])
    note = f"n = {questions} held-out questions per cell. ± is one standard error, brackets are 95 % intervals."
    return page.html("table", head=head, rows=body, note=note)


def gates_finding(gates: Sequence[Gate]) -> str:
    """Return what the gates decided, in a sentence."""
    refused = [gate.stage for gate in gates if gate.decision == "refused"]
    if refused:
        return f"The gate refused {', '.join(refused)}. A stage that was refused stays as it was."
    return "Every candidate passed its gate."


def interval(value: Mapping[str, float]) -> str:
    """Return a difference of table.json with its interval."""
    return f"{signed(value['estimate'])} [{signed(value['low'])}, {signed(value['high'])}]"
