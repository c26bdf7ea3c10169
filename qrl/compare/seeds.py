"""Several training runs as tables: each run alone, and the spread between runs beyond their question error."""

from __future__ import annotations

import math
from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from qrl import names
from qrl.stats import quantile, signed
from qrl.stats.text import interval, percent_interval, table

if TYPE_CHECKING:
    from qrl.compare.comparison import Comparison, Row
    from qrl.compare.outcomes import Answered
    from qrl.stats import Runs

_ERRORS = 3.0  # standard errors from questions that a run may lie from the others
_RARE = 0.99  # quantile of the others' spread beyond which a run lies far from them
_SAME = ("n_tokens", "finish_reason", "completion", "parsed")  # of equal answers, where the rows have these columns
_SHOWN = {"delta": "gain", "gain_survival": "gain survival"}


def repeated(answered: Answered) -> list[tuple[str, ...]]:
    """Return groups of seeds under which all trained cells gave the same answers: they are one run, named twice.

    Answers are the same if they have the same questions, outcomes and, where the rows tell them, lengths. Seeds whose
    answers are all right or all wrong may well be different runs, so they are no group.
    """
    if len(answered.table["seed"].cat.categories) < 2:
        return []
    groups: dict[tuple, list[str]] = {}
    known = [name for name in _SAME if name in answered.frame]
    table = pd.DataFrame(answered.table[["seed", "correct"]])
    table = table.assign(cell=answered.cell, question=answered.question)
    for name in known:
        table[name] = answered.frame[name].astype(str)
    is_trained = np.array([variant != names.BASE for variant, _ in answered.cells])[answered.cell]
    order = ["cell", "question", "correct", *known]
    trained = pd.DataFrame(table[is_trained]).sort_values(by=order)
    for seed, rows in trained.groupby("seed", observed=True):
        if len(set(rows["correct"])) > 1:
            answers = rows[order].to_csv(index=False).encode()
            groups.setdefault((len(rows), sha256(answers).digest()), []).append(str(seed))
    return [tuple(sorted(seeds, key=_place)) for seeds in groups.values() if len(seeds) > 1]


def repeated_notes(answered: Answered) -> list[str]:
    """Return a warning for each group of `repeated`."""
    notes = []
    for *others, last in repeated(answered):
        seeds = f"{', '.join(others)} and {last}"
        notes.append(
            f"Warning: seeds {seeds} gave the same answers in every cell: they are one run, so they tell nothing about "
            "the variation between runs. Keep one of them."
        )
    return notes


def _place(seed: str) -> tuple[bool, int, str]:
    """Order seeds that are numbers by value, before others."""
    return not seed.isdecimal(), int(seed) if seed.isdecimal() else 0, seed


def sections(comparison: Comparison) -> list[str]:
    """Return Markdown lines; none for one run."""
    if len(comparison.runs) < 2:
        return []
    lines = []
    for variant in comparison.variants[1:]:
        rows = [row for row in comparison.rows if row.variant == variant]
        lines += [f"## Seed by seed: {variant}", "", *_alone(comparison, rows), "", *_spread(comparison, rows), ""]
    far = [f"Warning: {sentence}" for sentence in far_apart(comparison)]
    return [*lines, *_notes(comparison), *far, ""]


def _alone(comparison: Comparison, rows: list[Row]) -> list[str]:
    """Return a table of each run's own values."""
    body = []
    for row in rows:
        by_difference = [value.runs.values for value in row.differences.values() if value.runs]
        for seed, (delta, *survival) in zip(comparison.runs, zip(*by_difference, strict=True), strict=True):
            survived = interval(survival[0]) if survival else "not defined"
            share = row.kept_by_seed.get(seed)
            kept = percent_interval(share) if share else "not defined"
            body.append((comparison.shown(row.scheme), seed, str(delta.n), interval(delta), survived, kept))
    return table(("scheme", "seed", "n", "gain", "gain survival", "gain kept"), body)


def far_apart(comparison: Comparison) -> list[str]:
    """Return a sentence for each run that lies far from the others; it is in the mean all the same."""
    sentences = []
    for row in comparison.rows:
        for name, value in row.differences.items():
            if value.runs:
                where = f"{row.variant} · {comparison.shown(row.scheme)}"
                sentences += [f"{sentence} ({where}, {_SHOWN[name]})." for sentence in _far(value.runs)]
    return sentences


def _far(runs: Runs) -> list[str]:
    """Return which runs lie further from the mean of the others than questions and the others' spread explain."""
    values = np.array([value.estimate for value in runs.values])
    if runs.count == 2:
        (first, second), apart = runs.labels, abs(values[0] - values[1])
        if apart <= _ERRORS * math.sqrt(2 * runs.own):
            return []
        shown = " and ".join(signed(value) for value in values)
        return [f"Seeds {first} and {second} differ by more than their questions explain: {shown}"]
    sentences = []
    for place, label in enumerate(runs.labels):
        others = np.delete(values, place)
        of_questions = _ERRORS * math.sqrt(runs.own * (1 + 1 / len(others)))
        of_runs = quantile(_RARE, len(others) - 1) * others.std(ddof=1) * math.sqrt(1 + 1 / len(others))
        if abs(values[place] - others.mean()) > math.hypot(of_questions, of_runs):
            apart = f"{signed(values[place])} beside {signed(others.mean())} on average"
            sentences.append(f"Seed {label} lies far from the others: {apart}")
    return sentences


def _spread(comparison: Comparison, rows: list[Row]) -> list[str]:
    body = []
    for row in rows:
        for name, value in row.differences.items():
            if runs := value.runs:
                between = "0 (truncated)" if runs.between_variance < 0 else f"{runs.between_sd:.3f}"
                sds = between, f"{runs.within_sd:.3f}"
                body.append((comparison.shown(row.scheme), _SHOWN[name], interval(value), *sds))
    seeds = len(comparison.runs)
    return table(("scheme", "difference", f"mean of {seeds} seeds", "between-seed sd", "within-seed sd"), body)


def _notes(comparison: Comparison) -> list[str]:
    seeds, answered = len(comparison.runs), sum(map(len, comparison.evidence.groups))
    if answered == seeds * comparison.n:
        error = "the error from the choice of questions does not shrink with more seeds"
        design = f"All {seeds} seeds answered the same questions, so {error}."
    elif answered == comparison.n:
        design = "Each seed answered its own questions, so both spreads shrink with more seeds."
    else:
        design = "The seeds share some of their questions, and the errors account for the overlap."
    lines = [
        "The interval of a single seed covers question sampling only. The mean treats the training run as a random "
        f"effect. {design}",
        "*between-seed sd*: standard deviation of the runs' true values (method of moments); *within-seed sd*: one "
        "run's standard error from its questions.",
    ]
    differences = [value for row in comparison.rows for value in row.differences.values()]
    if any(value.runs and value.runs.between_variance < 0 for value in differences):
        lines.append(
            "*truncated*: the runs differ less than their questions alone would explain, so the variance estimate is "
            f"set to 0; {seeds} seeds cannot show that it is 0."
        )
    if seeds < 5:
        freedom = f"t with {'1 degree' if seeds == 2 else f'{seeds - 1} degrees'} of freedom"
        lines.append(f"{seeds} seeds estimate the between-seed spread poorly ({freedom}), so the intervals are wide.")
    return lines
