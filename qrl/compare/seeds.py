"""Several training runs as tables: each run alone, and the spread between runs beyond their question error."""

import math
from collections.abc import Sequence
from hashlib import sha256

import numpy as np
import pandas as pd

from qrl import names
from qrl.compare.comparison import Comparison, Row
from qrl.compare.outcomes import Answered
from qrl.stats import Runs, quantile, signed
from qrl.stats.text import interval, percent_interval, table

_ERRORS = 3.0  # standard errors from questions within which a run agrees with the others
_RARE = 0.99  # quantile of the others' spread beyond which a run is far from them
_SAME = ("n_tokens", "finish_reason", "completion", "parsed")  # of equal answers, where the rows have these columns
_LABELS = {"delta": "gain", "gain_survival": "gain survival"}


def repeated(answered: Answered) -> list[tuple[str, ...]]:
    """Return groups of seeds under which all trained cells gave the same answers: they are one run, named twice.

    Answers are the same if they have the same questions, outcomes and, where the rows hold them, lengths and texts.
    Seeds with nothing but right or nothing but wrong answers may well be different runs, so they are no group.
    """
    if len(answered.table["seed"].cat.categories) < 2:
        return []
    text_columns = [name for name in _SAME if name in answered.frame]
    table = pd.DataFrame(answered.table[["seed", "correct"]])
    table = table.assign(cell=answered.cell, question=answered.question)
    for name in text_columns:
        table[name] = answered.frame[name].astype(str)
    is_trained = np.array([variant != names.BASE for variant, _ in answered.cells])[answered.cell]
    columns = ["cell", "question", "correct", *text_columns]
    trained = pd.DataFrame(table[is_trained]).sort_values(by=columns)

    # One digest per seed, of its rows in order: equal digests are equal answers.
    seeds_by_digest: dict[tuple, list[str]] = {}
    for seed, rows in trained.groupby("seed", observed=True):
        if len(set(rows["correct"])) > 1:
            answers = rows[columns].to_csv(index=False).encode()
            seeds_by_digest.setdefault((len(rows), sha256(answers).digest()), []).append(str(seed))
    return [tuple(sorted(seeds, key=_order)) for seeds in seeds_by_digest.values() if len(seeds) > 1]


def repeated_notes(answered: Answered) -> list[str]:
    """Return a warning for each group of `repeated`."""
    notes = []
    for *first, last in repeated(answered):
        seeds = f"{', '.join(first)} and {last}"
        notes.append(
            f"Warning: seeds {seeds} gave the same answers in every cell: they are one run, so they tell nothing about "
            "the variation between runs. Keep one of them."
        )
    return notes


def _order(seed: str) -> tuple[bool, int, str]:
    """Order seeds that are numbers by value, before others."""
    is_number = seed.isdecimal()
    return not is_number, int(seed) if is_number else 0, seed


def sections(comparison: Comparison) -> list[str]:
    """Return Markdown lines; none for one run."""
    if len(comparison.runs) < 2:
        return []
    lines = []
    for variant in comparison.variants[1:]:
        rows = [row for row in comparison.rows if row.variant == variant]
        lines += [f"## Seed by seed: {variant}", "", *_each_run(comparison, rows), "", *_spread(comparison, rows), ""]
    warnings = [f"Warning: {sentence}" for sentence in far_apart(comparison)]
    return [*lines, *_notes(comparison), *warnings, ""]


def _each_run(comparison: Comparison, rows: Sequence[Row]) -> list[str]:
    """Return a table of each run's own values."""
    body = []
    for row in rows:
        delta_runs = row.delta.runs
        if delta_runs is None:
            continue
        survival_runs = row.gain_survival.runs if row.gain_survival else None
        for index, seed in enumerate(comparison.runs):
            delta = delta_runs.values[index]
            survival = interval(survival_runs.values[index]) if survival_runs else "not defined"
            share = row.kept_by_seed.get(seed)
            kept = percent_interval(share) if share else "not defined"
            body.append((comparison.scheme_label(row.scheme), seed, str(delta.n), interval(delta), survival, kept))
    return table(("scheme", "seed", "n", "gain", "gain survival", "gain kept"), body)


def far_apart(comparison: Comparison) -> list[str]:
    """Return a sentence for each run that is far from the others; it is in the mean all the same."""
    sentences = []
    for row in comparison.rows:
        for name, value in row.differences.items():
            if value.runs:
                context = f"{row.variant} · {comparison.scheme_label(row.scheme)}, {_LABELS[name]}"
                sentences += [f"{sentence} ({context})." for sentence in _far(value.runs)]
    return sentences


def _far(runs: Runs) -> list[str]:
    """Return which runs are further from the mean of the others than questions and the others' spread explain."""
    values = np.array([value.estimate for value in runs.values])
    if runs.count == 2:
        # Two runs give no spread of the others, so the error from questions is the only measure.
        if abs(values[0] - values[1]) <= _ERRORS * math.sqrt(2 * runs.unshared):
            return []
        first, second = runs.labels
        texts = " and ".join(signed(value) for value in values)
        return [f"Seeds {first} and {second} differ by more than their questions explain: {texts}"]

    sentences = []
    for index, seed in enumerate(runs.labels):
        other_values = np.delete(values, index)
        count = len(other_values)
        question_limit = _ERRORS * math.sqrt(runs.unshared * (1 + 1 / count))
        run_limit = quantile(_RARE, count - 1) * other_values.std(ddof=1) * math.sqrt(1 + 1 / count)
        if abs(values[index] - other_values.mean()) > math.hypot(question_limit, run_limit):
            texts = f"{signed(values[index])} beside {signed(other_values.mean())} on average"
            sentences.append(f"Seed {seed} lies far from the others: {texts}")
    return sentences


def _spread(comparison: Comparison, rows: Sequence[Row]) -> list[str]:
    """Return a table of the means over runs, with the spread between runs and within one."""
    body = []
    for row in rows:
        for name, value in row.differences.items():
            if value.runs is None:
                continue
            between = "0 (truncated)" if value.runs.between_variance < 0 else f"{value.runs.between_sd:.3f}"
            within = f"{value.runs.within_sd:.3f}"
            body.append((comparison.scheme_label(row.scheme), _LABELS[name], interval(value), between, within))
    mean = f"mean of {len(comparison.runs)} seeds"
    return table(("scheme", "difference", mean, "between-seed sd", "within-seed sd"), body)


def _notes(comparison: Comparison) -> list[str]:
    """Return how to read the tables."""
    seeds = len(comparison.runs)
    answers = sum(map(len, comparison.evidence.groups))  # of one trained cell, over all runs
    if answers == seeds * comparison.n:
        error = "the error from the choice of questions does not shrink with more seeds"
        design = f"All {seeds} seeds answered the same questions, so {error}."
    elif answers == comparison.n:
        design = "Each seed answered its own questions, so both spreads shrink with more seeds."
    else:
        design = "The seeds share some of their questions, and the errors account for the overlap."
    lines = [
        "The interval of a single seed covers question sampling only. The mean treats the training run as a random "
        f"effect. {design}",
        "*between-seed sd*: standard deviation of the runs' true values (method of moments); *within-seed sd*: one "
        "run's standard error from its questions.",
    ]

    is_truncated = False
    for row in comparison.rows:
        for value in row.differences.values():
            if value.runs and value.runs.between_variance < 0:
                is_truncated = True
    if is_truncated:
        lines.append(
            "*truncated*: the runs differ less than their questions alone would explain, so the variance estimate is "
            f"set to 0; {seeds} seeds cannot show that it is 0."
        )
    if seeds < 5:
        degrees = "1 degree" if seeds == 2 else f"{seeds - 1} degrees"
        lines.append(
            f"{seeds} seeds estimate the between-seed spread poorly (t with {degrees} of freedom), so the intervals "
            "are wide."
        )
    return lines
