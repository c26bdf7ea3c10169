"""The parts of a study's page that are text: head, a card per scheme and per gate, the table of cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qrl.figures import page
from qrl.figures.comparison import survival_finding
from qrl.figures.forest import interval
from qrl.names import BASE, FULL, cell_name, scheme
from qrl.stats import Estimate, signed
from qrl.stats.text import percent_interval

if TYPE_CHECKING:
    import pandas as pd


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
    """Return a card per quantized row: verdict, share of the gain that is kept, gain survival, size, and meaning."""
    cards = []
    for row in rows:
        survival, kept = interval(row.entry["gain_survival"]), row.entry.get("gain_kept")
        # Older tables, and gains that are not shown, have no share.
        number, detail = survival, "gain survival, 95 % interval"
        if kept:
            number, detail = _percent(kept), f"of the gain is kept, 95 % interval; gain survival {survival}"
        estimate, _, bounds = number.partition(" [")
        card = {
            "name": row.name,
            "verdict": row.entry["verdict"],
            "label": _label(row.entry),
            "estimate": estimate,
            "interval": f"[{bounds}",
        }
        card |= {"detail": detail, "remarks": row.entry.get("remarks") or []}
        cards.append(card | {"size": _size(row, sizes), "meaning": _meaning(row)})
    return page.html("verdicts", cards=cards)


def _label(entry: Mapping[str, Any]) -> str:
    """Return the verdict, or that all of the gain is lost; empty at full precision."""
    return "lost, all of it" if entry.get("all_lost") else entry.get("verdict") or ""


def _lines(value: Mapping[str, float]) -> str:
    """Return a difference with its interval below it, which keeps a wide table on the screen."""
    return interval(value).replace(" [", "\n[")


def _percent(share: Mapping[str, float]) -> str:
    return percent_interval(Estimate(share["estimate"], share["stderr"], share["low"], share["high"], 0))


def unhealthy(table: Mapping[str, Any]) -> list[str]:
    """Return what quantization did to the answers of cells that broke a limit of health: `base · nf4: 16 % …`."""
    return [
        f"{cell_name(variant, name)}: {cell['unhealthy']}"
        for name, entry in table.items()
        for variant, cell in entry["cells"].items()
        if cell.get("unhealthy")
    ]


def _mark(cell: Mapping[str, Any]) -> str:
    return " †" if cell.get("unhealthy") else ""


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
    if entry["verdict"] == "reduced":
        half = "More than half of the gain is shown to be kept."
        if not entry.get("more_than_half_kept"):
            half = "Whether more than half of it is kept is not shown."
        return f"Quantizing to {name} costs a part of the gain: {gain}. {half}"
    if entry.get("all_lost"):
        return f"Quantizing to {name} costs all of the gain: no gain is shown under it, {interval(entry['delta'])}."
    if entry["verdict"] == "lost":
        # Tables from before the verdict `reduced` compared the loss with the margin.
        loss = "more than half of the gain"
        if "headline" not in entry:
            loss = f"more of the gain than the margin, {entry['margin']:.3f}"
        return f"Quantizing to {name} costs {loss}: {gain}."
    n, seeds = entry.get("n_to_decide"), entry.get("seeds_to_decide")
    ways = [f"{float(f'{n:.2g}'):,.0f} questions"] if n else []
    ways += [f"{seeds} training seeds"] if seeds else []
    more = f" About {' or '.join(ways)} would decide." if ways else ""
    return f"This study cannot decide: {entry['reason']}.{more}"


def scales_table(rows: Sequence[Row]) -> str:
    """Return the table of accuracy kept and log-odds per scheme, with a sentence each; empty for older tables."""
    rows = [row for row in rows if row.entry.get("accuracy_kept")]
    if not rows:
        return ""
    body = []
    for row in rows:
        entry = row.entry
        kept = [_percent(share) if share else "not defined" for share in entry["accuracy_kept"].values()]
        ratio = "{estimate:.2f} [{low:.2f}, {high:.2f}]".format(**entry["accuracy_kept_ratio"])
        points, log_odds = interval(entry["gain_survival"]), interval(entry["log_odds_difference"])
        body.append([row.name, *kept, ratio, log_odds, points])
    trained = _trained(rows)
    head = [
        "scheme",
        "accuracy kept: base",
        f"accuracy kept: {trained}",
        "ratio",
        "difference in log-odds",
        "in points",
    ]
    note = (
        f"Accuracy kept = accuracy under the scheme / accuracy at full precision. Ratio: {trained} / base. Log-odds: "
        f"change of {trained} − change of the base. In points: gain survival. A ratio above 1 or a difference above 0 "
        f"means that {trained} loses less than the base."
    )
    sentences = [f"{row.name}: {row.entry['scales']}" for row in rows]
    return page.html("notes", items=sentences) + page.html("table", head=head, rows=body, note=note)


def scales_question(rows: Sequence[Row]) -> str:
    """Return the title of that table."""
    return f"Does quantization cost {_trained(rows)} more than base?"


def _trained(rows: Sequence[Row]) -> str:
    """Return the trained variant's name; of several, what they are."""
    variants = {row.entry["trained"] for row in rows}
    return variants.pop() if len(variants) == 1 else "the trained model"


def cells_table(table: Mapping[str, Any], rows: list[Row], sizes: Mapping[str, int]) -> str:
    """Return the table of cells, a row per trained variant and scheme."""
    n = [cell["n"] for entry in table.values() for cell in entry["cells"].values()]
    questions = f"{n[0]:,}" if min(n) == max(n) else f"{min(n):,} to {max(n):,}"
    head = ["scheme", "base", "trained", "gain: trained − base", "gain survival", "gain kept", "verdict"]
    head += ["weights"] if sizes else []
    body = []
    for row in rows:
        entry, survival = row.entry, row.entry.get("gain_survival")
        cells = (table[row.scheme]["cells"][name] for name in (BASE, entry["trained"]))
        accuracies = (f"{cell['accuracy']:.3f} ± {cell['stderr']:.3f}{_mark(cell)}" for cell in cells)
        line = [row.name, *accuracies, _lines(entry["delta"]), _lines(survival) if survival else "reference"]
        line.append(_percent(entry["gain_kept"]) if entry.get("gain_kept") else "")
        size = [_bytes(sizes.get(f"{entry['trained']}:{row.scheme}"))] if sizes else []
        body.append([*line, _label(entry), *size])
    note = f"n = {questions} held-out questions per cell. ± is one standard error, brackets are 95 % intervals."
    if told := unhealthy(table):
        note += f" † {'; '.join(told)}. Quantization did that: the cell counts, with unfinished answers as wrong, and "
        note += "no gate lets it pass."
    return page.html("table", head=head, rows=body, note=note)


_MEASURES = {"tokens": ("tokens an answer", 1), "unfinished": ("unfinished", 3), "reached": ("reached, then wrong", 3)}


def answers_table(table: Mapping[str, Any], rows: list[Row]) -> str:
    """Return the table of what answers are like beside right or wrong, a row per cell; empty where nothing is known."""
    label = {row.scheme: row.entry.get("label") or row.scheme for row in rows}
    cells = {(variant, name): of for name, entry in table.items() for variant, of in entry.get("answers", {}).items()}
    known = [name for name in _MEASURES if any(name in of for of in cells.values())]
    likely = any("reference_logprob" in of for of in cells.values())
    body = []
    for (variant, name), of in sorted(cells.items(), key=lambda item: item[0][0] != BASE):
        line = [cell_name(variant, label.get(name, name))]
        line += [_changed(of.get(measure), _MEASURES[measure][1]) for measure in known]
        if likely:
            line.append(_changed(of.get("reference_logprob"), 3, of.get("reference_perplexity")))
        counts = ("" if of[key] is None else str(of[key]) for key in ("right_to_wrong", "wrong_to_right"))
        body.append([*line, *counts, "" if of["mcnemar"] is None else f"{of['mcnemar']:.2g}"])
    if not body:
        return ""
    head = ["cell", *(_MEASURES[name][0] for name in known), *(["perplexity of references"] if likely else [])]
    note = "Below a mean: the difference to full precision of the same variant, with its 95 % interval. "
    note += (
        "Reached, then wrong: the right value appears before a wrong or missing answer. " if "reached" in known else ""
    )
    note += "References: worked solutions; the difference is that of their log-likelihood a token." if likely else ""
    return page.html("table", head=[*head, "right → wrong", "wrong → right", "McNemar's p"], rows=body, note=note)


def _changed(entry: Mapping[str, Any] | None, digits: int, mean: float | None = None) -> str:
    """Return a measure's mean, or what to show in its place, and its difference to full precision."""
    if entry is None:
        return ""
    text = f"{entry['mean']['estimate'] if mean is None else mean:.{digits}f}"
    return f"{text}\n{interval(entry['change'])}" if entry["change"] else text


def changed_answers(changed: pd.DataFrame) -> str:
    """Return the answers that quantization turned right or wrong, each beside the one at full precision."""
    groups = []
    for (variant, name, change), rows in changed.groupby(["variant", "scheme", "change"], sort=False):
        groups.append({"title": f"{cell_name(variant, name)}: {change}", "rows": rows.fillna("").to_dict("records")})
    return page.html("changed", groups=groups)


def gates_finding(gates: Sequence[Gate]) -> str:
    """Return what the gates decided, in a sentence."""
    refused = [gate.stage for gate in gates if gate.decision == "refused"]
    if refused:
        return f"The gate refused {', '.join(refused)}. A stage that was refused stays as it was."
    return "Every candidate passed its gate."
