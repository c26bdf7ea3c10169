"""A comparison as tables and sentences for people. No difference without its interval, no rate without its n."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from qrl import names
from qrl.compare import record, seeds
from qrl.stats.text import interval, table

if TYPE_CHECKING:
    from qrl.compare import Cell, Comparison, Row

INTERVALS = "Square brackets are 95 % intervals; ± is one standard error."


def as_sentence(comparison: Comparison) -> str:
    """One sentence per trained variant and quantized scheme; where there is none, one that says so."""
    rows = [row for row in comparison.rows if row.verdict]
    if rows:
        return "\n".join(_verdict(row, several=len(comparison.variants) > 2) for row in rows)
    gains = "; ".join(
        f"{row.variant} gains {interval(row.delta)} over base on n = {row.delta.n} questions" for row in comparison.rows
    )
    return f"No quantized scheme was evaluated, so gain survival is not defined; at full precision {gains}."


def as_markdown(comparison: Comparison) -> str:
    """Cells, gains and verdicts; seed by seed where there are several; losses; then how to read them."""
    parts = (_cells, seeds.sections, _losses, _verdicts, _notes)
    return "\n".join(line for part in parts for line in part(comparison))


def write(comparison: Comparison, out: Path) -> None:
    """table.md and table.json, written beside and renamed, so that no reader sees half a file."""
    texts = {
        names.TABLE_MD: as_markdown(comparison),
        names.TABLE_JSON: json.dumps(record.as_json(comparison), indent=2) + "\n",
    }
    for name, text in texts.items():
        partial = out / f".{name}.partial"
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, out / name)


def _cells(comparison: Comparison) -> list[str]:
    lines = []
    for trained in comparison.variants[1:]:
        several = trained_many(comparison, trained)
        tested = "McNemar's p" if not several else "p of delta (t)"
        head = (
            "scheme",
            *(["engine"] if comparison.engine else []),
            "base",
            trained,
            f"delta: {trained} − base",
            tested,
            "gain survival",
            "verdict",
        )
        rows = []
        for scheme in comparison.schemes:
            row = comparison.row(scheme, trained)
            survival = interval(row.gain_survival) if row.gain_survival else "not defined"
            verdict = f"**{row.verdict.verdict}**" if row.verdict else "reference"
            accuracies = (_accuracy(comparison, (variant, scheme)) for variant in (names.BASE, trained))
            p = row.delta.p_two_sided if several else row.mcnemar
            answered = [comparison.engine] if comparison.engine else []
            rows.append(
                (
                    scheme,
                    *answered,
                    *accuracies,
                    interval(row.delta),
                    "unpaired" if p is None else f"{p:.2g}",
                    survival,
                    verdict,
                )
            )
        lines += [f"## Did the gain of {trained} survive?", "", *table(head, rows), ""]
    return [*lines, *_pass_at(comparison)]


def trained_many(comparison: Comparison, trained: str) -> bool:
    """Whether McNemar's test is not defined: several runs, or several samples of a question."""
    return comparison.paired and all(row.mcnemar is None for row in comparison.rows if row.variant == trained)


def _accuracy(comparison: Comparison, cell: Cell) -> str:
    found, runs = comparison.cells[cell], len(comparison.runs)
    seeds_of = f", {runs} seeds" if runs > 1 and cell[0] != names.BASE else ""
    return f"{found.estimate:.3f} ± {found.stderr:.3f} (n = {found.n}{seeds_of})"


def _pass_at(comparison: Comparison) -> list[str]:
    """pass@k of the cells that have several samples per question."""
    if not comparison.pass_at:
        return []
    every = sorted({k for by_k in comparison.pass_at.values() for k in by_k})
    rows = []
    for (variant, scheme), by_k in comparison.pass_at.items():
        first = comparison.cells[variant, scheme]
        shares = {1: first} | by_k
        texts = (
            f"{shares[k].estimate:.3f} ± {shares[k].stderr:.3f}" if k in shares else "too few" for k in (1, *every)
        )
        rows.append(
            (
                names.cell_name(variant, scheme),
                str(first.n),
                str(comparison.evidence.samples((variant, scheme))),
                *texts,
            )
        )
    head = ("cell", "n", "samples per question", *(f"pass@{k}" for k in (1, *every)))
    return [
        "## Several samples per question",
        "",
        *table(head, rows),
        "",
        "Accuracies above are pass@1: the mean over a question's samples, with errors over questions.",
        "",
    ]


def _losses(comparison: Comparison) -> list[str]:
    quantized = [scheme for scheme in comparison.schemes if scheme != names.FULL]
    if not quantized:
        return []
    rows = []
    for scheme in quantized:
        losses = {
            variant: loss for row in comparison.rows if row.scheme == scheme for variant, loss in row.losses.items()
        }
        rows.append((scheme, *(interval(losses[variant]) for variant in comparison.variants)))
    head = ("scheme − full", *comparison.variants)
    return [f"## What quantization costs (n = {comparison.n})", "", *table(head, rows), ""]


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
    of_seeds = f" and {row.gain_survival.runs.count} seeds" if row.gain_survival.runs else ""
    says = f"For {row.variant}, {says}" if several else says[0].upper() + says[1:]
    return f"{says}: gain survival is {interval(row.gain_survival)} on n = {row.gain_survival.n} questions{of_seeds}; {row.verdict.reason}."


def _power(row: Row) -> str:
    verdict = row.verdict
    parts = [f"This n would have seen a change of the gain of {verdict.smallest_effect:.3f} four times in five"]
    ways = [f"about {_rounded(verdict.n_to_decide):,} questions"] if verdict.n_to_decide else []
    ways += [f"{verdict.seeds_to_decide} seeds"] if verdict.seeds_to_decide else []
    if ways:
        parts.append(f"{' or '.join(ways)} would decide, were these estimates the truth")
    if row.p_holm is not None:
        parts.append(
            f"p = {verdict.p_value:.2g} against the margin, {row.p_holm:.2g} after Holm's correction over the verdicts"
        )
    if row.holds_together is False:
        parts.append(
            "**alone it holds, corrected for the other schemes it does not**: take it as a lead, not as a finding"
        )
    return "; ".join(parts) + "."


def _rounded(n: int) -> int:
    """Two significant digits, upwards: more would claim to know."""
    unit = 10 ** max(0, len(str(n)) - 2)
    return -(-n // unit) * unit


def _notes(comparison: Comparison) -> list[str]:
    if not comparison.paired:
        pairing = "Only counts are known, so cells are taken as independent; outcomes per question would mostly narrow the intervals of differences."
    elif comparison.clusters:
        pairing = (
            f"Differences are paired by question, with errors clustered over {comparison.clusters} groups of questions."
        )
    else:
        pairing = "Differences are paired: every cell answers the same questions."
    if len(comparison.runs) == 1:
        pairing += (
            " One training run: how much another seed would differ is unknown, and no interval here counts it in."
        )
    return [
        f"{INTERVALS} {pairing}",
        *_unlike(comparison),
        *_bootstrap(comparison),
        "*delta* = trained − base under one scheme; *gain survival* = that delta minus the delta at full precision (full), where it is",
        "therefore not defined. *survives*: its one-sided 95 % lower bound lies above −margin; *lost*: its upper bound lies below.",
        "Each claim errs in at most 5 % of studies by itself; Holm's p-values are for reading several verdicts together.",
        "",
    ]


def _unlike(comparison: Comparison) -> list[str]:
    """The base is one model: where its answers depend on the seed they were filed under, the reader must know."""
    found = comparison.evidence.outcomes.unlike if comparison.paired else {}
    taken = (
        "averaged where a run has its own" if len(comparison.runs) > 1 else "taken from the first seed that has them"
    )
    return [
        f"The base is one model, yet {names.cell_name(*cell)} answers {count} question(s) otherwise under another seed; its answers are {taken}."
        for cell, count in found.items()
    ]


def _bootstrap(comparison: Comparison) -> list[str]:
    """How far the closed form is from resampling the questions."""
    pairs = [(row.bootstrap[name], getattr(row, name)) for row in comparison.rows for name in row.bootstrap]
    if not pairs:
        return []
    apart = max(max(abs(drawn.low - closed.low), abs(drawn.high - closed.high)) for drawn, closed in pairs)
    return [
        f"A paired bootstrap over questions (10,000 resamples, seeded) puts every end within {max(apart, 0.001):.3f} of these intervals' own."
    ]
