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
        has_several_variants = len({row.entry["trained"] for row in rows}) > 1
        return survival_finding([(row.name, row.entry["verdict"]) for row in rows], has_several_variants, "The gain")
    if FULL in table:
        return f"Accuracy changes by {interval(table[FULL]['delta'])} at full precision"
    return "No verdict"


def rows_of(table: Mapping[str, Any]) -> list[Row]:
    """Return a row per scheme and trained variant, in the order of the table."""
    # An entry is of the first trained variant; it holds the entries of the others.
    entries = []
    for name, entry in table.items():
        entries.append((name, entry))
        entries += [(name, other_entry) for other_entry in (entry.get("others") or {}).values()]
    has_several_variants = len({entry["trained"] for _, entry in entries}) > 1

    rows = []
    for name, entry in entries:
        label = entry.get("label") or name  # full precision with its dtype, where that is known
        if has_several_variants:
            label = f"{entry['trained']} · {label}"
        rows.append(Row(name, entry, label))
    return rows


def heading(table: Mapping[str, Any], facts: Mapping[str, str]) -> str:
    """Return the head of the page: finding, gain at full precision, facts."""
    lead = ""
    if FULL in table:
        entry = table[FULL]
        trained = entry["trained"]
        cells = entry["cells"]
        delta = entry["delta"]
        if delta["low"] > 0:
            verb = "raises"
        elif delta["high"] < 0:
            verb = "lowers"
        else:
            verb = "does not significantly change"
        lead = (
            f"At full precision, training ({trained}) {verb} held-out accuracy: {cells[BASE]['accuracy']:.3f} before, "
            f"{cells[trained]['accuracy']:.3f} after, a difference of {interval(delta)} on {cells[BASE]['n']:,} "
            "questions."
        )
        if entry.get("seeds") == 1:
            lead += " There is one training run, so no interval includes the variation between training seeds."
    return page.html("study_head", headline=headline(table), lead=lead, facts=facts)


def verdicts(rows: Sequence[Row], sizes: Mapping[str, int]) -> str:
    """Return a card per quantized row: verdict, share of the gain that is kept, gain survival, size, and meaning."""
    cards = []
    for row in rows:
        survival = interval(row.entry["gain_survival"])
        kept = row.entry.get("gain_kept")
        if kept:
            number = _percent(kept)
            detail = f"of the gain is kept, 95 % interval; gain survival {survival}"
        else:  # an older table, or no gain is shown
            number = survival
            detail = "gain survival, 95 % interval"
        estimate, _, bounds = number.partition(" [")  # the estimate is shown larger
        card = {
            "name": row.name,
            "verdict": row.entry["verdict"],
            "label": _label(row.entry),
            "estimate": estimate,
            "interval": f"[{bounds}",
            "detail": detail,
            "remarks": row.entry.get("remarks") or [],
            "size": _size(row, sizes),
            "meaning": _meaning(row),
        }
        cards.append(card)
    return page.html("verdicts", cards=cards)


def _label(entry: Mapping[str, Any]) -> str:
    """Return the verdict, or that all of the gain is lost; empty at full precision."""
    if entry.get("all_lost"):
        return "lost, all of it"
    return entry.get("verdict") or ""


def _in_two_lines(difference: Mapping[str, float]) -> str:
    """Return a difference with its interval below it, which keeps a wide table on the screen."""
    return interval(difference).replace(" [", "\n[")


def _percent(share: Mapping[str, float]) -> str:
    return percent_interval(Estimate(share["estimate"], share["stderr"], share["low"], share["high"], 0))


def unhealthy(table: Mapping[str, Any]) -> list[str]:
    """Return what quantization did to the answers of cells that broke a limit of health: `base · nf4: 16 % …`."""
    sentences = []
    for name, entry in table.items():
        for variant, cell in entry["cells"].items():
            if cell.get("unhealthy"):
                sentences.append(f"{cell_name(variant, name)}: {cell['unhealthy']}")
    return sentences


def _size(row: Row, sizes: Mapping[str, int]) -> str:
    trained = row.entry["trained"]
    quantized_bytes = sizes.get(f"{trained}:{row.scheme}")
    full_bytes = sizes.get(f"{trained}:{FULL}")
    if not quantized_bytes:
        return ""
    if not full_bytes:
        return f"{_bytes(quantized_bytes)} of weights"
    saved = f"{100 * (1 - quantized_bytes / full_bytes):.0f} % saved"
    return f"{_bytes(full_bytes)} of weights become {_bytes(quantized_bytes)}: {saved}"


def _bytes(size: int | None) -> str:
    if not size:
        return ""
    if size >= 1e9:
        return f"{size / 1e9:.2f} GB"
    return f"{size / 1e6:.2f} MB"


def _meaning(row: Row) -> str:
    """Return the verdict in plain words."""
    entry = row.entry
    name = row.scheme.upper()
    gain = f"the gain over the base model is {signed(entry['delta']['estimate'])} under {name}"
    if entry["verdict"] == "survives":
        return (
            f"Quantizing to {name} keeps what training gave: {gain}. "
            f"With 95 % confidence, any loss is below the margin, {entry['margin']:.3f}."
        )
    if entry["verdict"] == "reduced":
        half = "Whether more than half of it is kept is not shown."
        if entry.get("more_than_half_kept"):
            half = "More than half of the gain is shown to be kept."
        return f"Quantizing to {name} costs a part of the gain: {gain}. {half}"
    if entry.get("all_lost"):
        return f"Quantizing to {name} costs all of the gain: no gain is shown under it, {interval(entry['delta'])}."
    if entry["verdict"] == "lost":
        # Tables from before the verdict `reduced` compared the loss with the margin.
        loss = "more than half of the gain"
        if "headline" not in entry:
            loss = f"more of the gain than the margin, {entry['margin']:.3f}"
        return f"Quantizing to {name} costs {loss}: {gain}."
    return f"This study cannot decide: {entry['reason']}.{_enough_to_decide(entry)}"


def _enough_to_decide(entry: Mapping[str, Any]) -> str:
    """Return a sentence on the questions or seeds that would decide; empty if no number would."""
    n = entry.get("n_to_decide")
    seeds = entry.get("seeds_to_decide")
    sizes = []
    if n:
        two_digits = float(f"{n:.2g}")
        sizes.append(f"{two_digits:,.0f} questions")
    if seeds:
        sizes.append(f"{seeds} training seeds")
    return f" About {' or '.join(sizes)} would decide." if sizes else ""


def scales_table(table: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Return the table of accuracy kept and log-odds per scheme, with a sentence each; empty for older tables."""
    rows = [row for row in rows if row.entry.get("accuracy_kept")]
    if not rows:
        return ""
    body = []
    for row in rows:
        entry = row.entry
        kept = [_percent(share) if share else "not defined" for share in entry["accuracy_kept"].values()]
        ratio = "not defined"
        log_odds = "not defined"
        if not _is_nothing_left(table, row):
            ratio = "{estimate:.2f} [{low:.2f}, {high:.2f}]".format(**entry["accuracy_kept_ratio"])
            log_odds = interval(entry["log_odds_difference"])
        body.append([row.name, *kept, ratio, log_odds, interval(entry["gain_survival"])])
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


def _is_nothing_left(table: Mapping[str, Any], row: Row) -> bool:
    """Return whether both models answer nothing right under a scheme, so that a ratio of what they keep is 0/0."""
    cells = table[row.scheme]["cells"]
    return cells[BASE]["accuracy"] == 0 and cells[row.entry["trained"]]["accuracy"] == 0


def scales_question(rows: Sequence[Row]) -> str:
    """Return the title of that table."""
    return f"Does quantization cost {_trained(rows)} more than base?"


def _trained(rows: Sequence[Row]) -> str:
    """Return the trained variant's name; of several, what they are."""
    variants = {row.entry["trained"] for row in rows}
    return variants.pop() if len(variants) == 1 else "the trained model"


def cells_table(table: Mapping[str, Any], rows: list[Row], sizes: Mapping[str, int]) -> str:
    """Return the table of cells, a row per trained variant and scheme."""
    counts = []
    for entry in table.values():
        counts += [cell["n"] for cell in entry["cells"].values()]
    questions = f"{min(counts):,} to {max(counts):,}"
    if min(counts) == max(counts):
        questions = f"{counts[0]:,}"

    head = ["scheme", "base", "trained", "gain: trained − base", "gain survival", "gain kept", "verdict"]
    if sizes:
        head.append("weights")
    body = []
    for row in rows:
        entry = row.entry
        survival = entry.get("gain_survival")
        cells = table[row.scheme]["cells"]
        line = [
            row.name,
            _accuracy(cells[BASE]),
            _accuracy(cells[entry["trained"]]),
            _in_two_lines(entry["delta"]),
            _in_two_lines(survival) if survival else "reference",
            _percent(entry["gain_kept"]) if entry.get("gain_kept") else "",
            _label(entry),
        ]
        if sizes:
            line.append(_bytes(sizes.get(f"{entry['trained']}:{row.scheme}")))
        body.append(line)

    note = f"n = {questions} held-out questions per cell. ± is one standard error, brackets are 95 % intervals."
    unhealthy_cells = unhealthy(table)
    if unhealthy_cells:
        note += (
            f" † {'; '.join(unhealthy_cells)}. Quantization did that: the cell counts, with unfinished answers as "
            "wrong, and no gate lets it pass."
        )
    return page.html("table", head=head, rows=body, note=note)


def _accuracy(cell: Mapping[str, Any]) -> str:
    """Return a cell's accuracy with its standard error, marked if the cell broke a limit of health."""
    mark = " †" if cell.get("unhealthy") else ""
    return f"{cell['accuracy']:.3f} ± {cell['stderr']:.3f}{mark}"


@dataclass(frozen=True)
class _Measure:
    """A measure of answers, as a column of the table."""

    title: str
    digits: int


_MEASURES = {
    "tokens": _Measure("tokens an answer", 1),
    "unfinished": _Measure("unfinished", 3),
    "reached": _Measure("reached, then wrong", 3),
}


def answers_table(table: Mapping[str, Any], rows: list[Row]) -> str:
    """Return the table of what answers are like besides right or wrong, a row per cell; empty if nothing is known."""
    scheme_labels = {row.scheme: row.entry.get("label") or row.scheme for row in rows}
    measures_of_cells = {}
    for name, entry in table.items():
        for variant, measures in entry.get("answers", {}).items():
            measures_of_cells[variant, name] = measures
    if not measures_of_cells:
        return ""

    # A column is left out if no cell has the measure: it depends on the task, and on the age of the table.
    columns = [name for name in _MEASURES if any(name in measures for measures in measures_of_cells.values())]
    has_perplexity = any("reference_logprob" in measures for measures in measures_of_cells.values())
    body = []
    for (variant, name), measures in sorted(measures_of_cells.items(), key=lambda item: item[0][0] != BASE):
        line = [cell_name(variant, scheme_labels.get(name, name))]
        line += [_with_change(measures.get(column), _MEASURES[column].digits) for column in columns]
        if has_perplexity:
            line.append(_with_change(measures.get("reference_logprob"), 3, measures.get("reference_perplexity")))
        line += [_text(measures["right_to_wrong"]), _text(measures["wrong_to_right"])]
        line.append(_text(measures["mcnemar"], ".2g"))
        body.append(line)

    head = ["cell", *(_MEASURES[column].title for column in columns)]
    note = "Below a mean: the difference to full precision of the same variant, with its 95 % interval. "
    if "reached" in columns:
        note += "Reached, then wrong: the right value appears before a wrong or missing answer. "
    if has_perplexity:
        head.append("perplexity of references")
        note += "References: worked solutions; the difference is that of their log-likelihood a token."
    head += ["right → wrong", "wrong → right", "McNemar's p"]
    return page.html("table", head=head, rows=body, note=note)


def _text(number: float | None, format_spec: str = "") -> str:
    return "" if number is None else format(number, format_spec)


def _with_change(measure: Mapping[str, Any] | None, digits: int, shown_mean: float | None = None) -> str:
    """Return a measure's mean, or another number to show for it, and below it the difference to full precision."""
    if measure is None:
        return ""
    mean = measure["mean"]["estimate"] if shown_mean is None else shown_mean
    text = f"{mean:.{digits}f}"
    if not measure["change"]:
        return text
    return f"{text}\n{interval(measure['change'])}"


def changed_answers(changed: pd.DataFrame) -> str:
    """Return the answers that quantization turned right or wrong, each next to the one at full precision."""
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
