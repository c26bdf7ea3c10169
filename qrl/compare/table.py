"""A comparison as JSON, as tables, as sentences, as metrics. No difference without its interval, no rate without its n."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qrl import names
from qrl.stats import Estimate, signed

if TYPE_CHECKING:
    from qrl.compare import Comparison, Row

INTERVALS = "Square brackets are 95 % intervals; ± is one standard error."


def as_json(comparison: Comparison) -> dict[str, Any]:
    """The contract `table.json`: one entry per scheme.

    Returns:
        scheme → {"trained", "delta", "gain_survival", "verdict", "reason", "margin", "smallest_effect", "n_to_decide",
        "p_value", "p_holm", "mcnemar", "loss": {variant: …}, "paired", "cells": {variant: {"n", "accuracy", "stderr",
        "low", "high"}}}. Differences are {"estimate", "stderr", "low", "high"}. Under fp16 gain survival is not defined:
        it and what follows from it are null. Where there is more than one trained variant, the entry is the first one's and
        "others" maps each further label to the same keys.
    """
    entries = {}
    for scheme in comparison.schemes:
        first, *others = (row for row in comparison.rows if row.scheme == scheme)
        entry = _json_row(first) | {"paired": comparison.paired}
        entry["cells"] = {variant: _json_cell(comparison.cells[variant, scheme]) for variant in comparison.variants}
        if others:
            entry["others"] = {row.variant: _json_row(row) for row in others}
        entries[scheme] = entry
    return entries


def as_metrics(comparison: Comparison) -> dict[str, float]:
    """Metric name → value; further trained variants carry their label at the end of the scheme's name."""
    metrics = {}
    for row in comparison.rows:
        suffix = row.scheme if row.variant == comparison.variants[1] else f"{row.scheme}_{row.variant}"
        for name, value in (("delta", row.delta), ("gain_survival", row.gain_survival)):
            if value is not None:
                key = f"compare/{name}_{suffix}"
                metrics |= {key: value.estimate, f"{key}_stderr": value.stderr, f"{key}_low": value.low, f"{key}_high": value.high}
    return metrics


def as_sentence(comparison: Comparison) -> str:
    """One sentence per trained variant and quantized scheme; where there is none, one that says so."""
    rows = [row for row in comparison.rows if row.verdict]
    if rows:
        return "\n".join(_verdict(row, several=len(comparison.variants) > 2) for row in rows)
    gains = "; ".join(f"{row.variant} gains {interval(row.delta)} over base on n = {row.delta.n} questions" for row in comparison.rows)
    return f"No quantized scheme was evaluated, so gain survival is not defined; at full precision {gains}."


def as_markdown(comparison: Comparison) -> str:
    """Cells, gains and verdicts; losses; then how to read them."""
    return "\n".join((*_cells(comparison), *_losses(comparison), *_verdicts(comparison), *_notes(comparison)))


def interval(value: Estimate) -> str:
    """A difference as text, never without its interval: `+0.040 [−0.087, +0.167]`."""
    return f"{signed(value.estimate)} [{signed(value.low)}, {signed(value.high)}]"


def write(comparison: Comparison, out: Path) -> None:
    """table.md and table.json, written beside and renamed, so that no reader sees half a file."""
    texts = {names.TABLE_MD: as_markdown(comparison), names.TABLE_JSON: json.dumps(as_json(comparison), indent=2) + "\n"}
    for name, text in texts.items():
        partial = out / f".{name}.partial"
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, out / name)


def _json_row(row: Row) -> dict[str, Any]:
    verdict = row.verdict
    keys = ("verdict", "reason", "margin", "smallest_effect", "n_to_decide", "p_value")
    return {
        "trained": row.variant,
        "delta": _json_difference(row.delta),
        "gain_survival": _json_difference(row.gain_survival) if row.gain_survival else None,
        **{key: getattr(verdict, key) if verdict else None for key in keys},
        "p_holm": row.p_holm,
        "mcnemar": row.mcnemar,
        "loss": {variant: _json_difference(loss) for variant, loss in row.losses.items()},
    }


def _json_difference(value: Estimate) -> dict[str, float]:
    return {"estimate": value.estimate, "stderr": value.stderr, "low": value.low, "high": value.high}


def _json_cell(value: Estimate) -> dict[str, float]:
    return {"n": value.n, "accuracy": value.estimate, "stderr": value.stderr, "low": value.low, "high": value.high}


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    head = list(head)
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def _cells(comparison: Comparison) -> list[str]:
    lines = []
    for trained in comparison.variants[1:]:
        head = ("scheme", "base", trained, f"delta: {trained} − base", "McNemar's p", "gain survival", "verdict")
        rows = []
        for scheme in comparison.schemes:
            row = comparison.row(scheme, trained)
            cells = [comparison.cells[variant, scheme] for variant in (names.BASE, trained)]
            survival = interval(row.gain_survival) if row.gain_survival else "not defined"
            verdict = f"**{row.verdict.verdict}**" if row.verdict else "reference"
            accuracies = (f"{cell.estimate:.3f} ± {cell.stderr:.3f} (n = {cell.n})" for cell in cells)
            p = "unpaired" if row.mcnemar is None else f"{row.mcnemar:.2g}"
            rows.append((scheme, *accuracies, interval(row.delta), p, survival, verdict))
        lines += [f"## Did the gain of {trained} survive?", "", *_table(head, rows), ""]
    return lines


def _losses(comparison: Comparison) -> list[str]:
    quantized = [scheme for scheme in comparison.schemes if scheme != names.FP16]
    if not quantized:
        return []
    rows = []
    for scheme in quantized:
        losses = {variant: loss for row in comparison.rows if row.scheme == scheme for variant, loss in row.losses.items()}
        rows.append((scheme, *(interval(losses[variant]) for variant in comparison.variants)))
    head = ("scheme − fp16", *comparison.variants)
    return [f"## What quantization costs (n = {comparison.n})", "", *_table(head, rows), ""]


def _verdicts(comparison: Comparison) -> list[str]:
    several = len(comparison.variants) > 2
    lines = ["## Verdict", ""]
    if not any(row.verdict for row in comparison.rows):
        return [*lines, f"- {as_sentence(comparison)}", ""]
    for row in comparison.rows:
        if row.verdict:
            lines.append(f"- {_verdict(row, several)} {_power(row)}")
    return [*lines, ""]


def _verdict(row: Row, several: bool) -> str:
    says = {
        "survives": f"under {row.scheme} the gain survives",
        "lost": f"under {row.scheme} the gain is lost",
        "inconclusive": f"whether the gain survives {row.scheme} is inconclusive",
    }[row.verdict.verdict]
    says = f"For {row.variant}, {says}" if several else says[0].upper() + says[1:]
    return f"{says}: gain survival is {interval(row.gain_survival)} on n = {row.gain_survival.n} questions; {row.verdict.reason}."


def _power(row: Row) -> str:
    parts = [f"This n would have seen a change of the gain of {row.verdict.smallest_effect:.3f} four times in five"]
    if row.verdict.n_to_decide:
        parts.append(f"about {_rounded(row.verdict.n_to_decide):,} questions would decide, were these estimates the truth")
    if row.p_holm is not None:
        parts.append(f"p = {row.verdict.p_value:.2g} against the margin, {row.p_holm:.2g} after Holm's correction over the verdicts")
    return "; ".join(parts) + "."


def _rounded(n: int) -> int:
    """Two significant digits, upwards: more would claim to know."""
    unit = 10 ** max(0, len(str(n)) - 2)
    return -(-n // unit) * unit


def _notes(comparison: Comparison) -> list[str]:
    if not comparison.paired:
        pairing = "Only counts are known, so cells are taken as independent; outcomes per question would mostly narrow the intervals of differences."
    elif comparison.clusters:
        pairing = f"Differences are paired by question, with errors clustered over {comparison.clusters} groups of questions."
    else:
        pairing = "Differences are paired: every cell answers the same questions."
    return [
        f"{INTERVALS} {pairing}",
        "*delta* = trained − base under one scheme; *gain survival* = that delta minus the delta at full precision (fp16), where it is",
        "therefore not defined. *survives*: its one-sided 95 % lower bound lies above −margin; *lost*: its upper bound lies below.",
        "",
    ]
