"""Accuracies and gains by subject and by level, where the rows name them: exploratory, beside the verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from qrl.compare.outcomes import Answered
from qrl.errors import BadInput
from qrl.names import BASE
from qrl.stats.text import interval, table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from qrl.compare.comparison import Comparison
    from qrl.compare.evidence import Cell, Questions
    from qrl.stats import Estimate

KINDS = ("subject", "level")
FEWEST = 20  # questions of a group with numbers of its own
MOST = 60  # groups of a kind that are shown, the largest
_REMARK = (
    "Exploratory: the intervals are those of each group alone, without a correction for their number. Of many groups "
    "some look different by chance, and no verdict rests on them."
)


@dataclass(frozen=True)
class Group:
    """The questions of one subject or level.

    Attributes:
        name: such as "algebra", or 3.
        n: questions.
        accuracies: cell → accuracy; empty for a group that is too small.
        gains: trained cell → trained − base in the same scheme, paired by question.
    """

    name: str
    n: int
    accuracies: Mapping[Cell, Estimate]
    gains: Mapping[Cell, Estimate]


def groups(comparison: Comparison) -> dict[str, list[Group]]:
    """Return the groups of each kind that the rows name; none if only counts are known, or if all are in one group."""
    answered, found = comparison.answered, {}
    for kind in KINDS:
        if answered is None or kind not in answered.frame:
            continue
        of_question = _of_question(answered, kind)
        group_names = set(of_question.dropna())
        if len(group_names) > 1:
            found[kind] = [_group(comparison, answered, name, of_question == name) for name in _ordered(group_names)]
    return found


def as_markdown(comparison: Comparison) -> list[str]:
    """Return a table per kind: a row per group and scheme with n, accuracies and gains; then what is left out."""
    lines = []
    for kind, found in comparison.subgroups.items():
        with_numbers = [group for group in found if group.accuracies]
        shown = sorted(with_numbers, key=lambda group: -group.n)[:MOST]
        lines += [f"## By {kind}", ""]
        for variant in comparison.variants[1:] if shown else ():
            head = (kind, "n", "scheme", BASE, variant, f"gain: {variant} − {BASE}")
            rows = [
                _row(comparison, group, variant, scheme)
                for group in found
                if group in shown
                for scheme in comparison.schemes
            ]
            lines += [*table(head, rows), ""]
        lines += [f"{_REMARK}{_left_out(kind, found, shown)}", ""]
    return lines


def as_json(comparison: Comparison, scheme: str, numbers: Any) -> dict[str, dict[str, Any]]:
    """Return kind → group → {"n", "cells": {variant: …}, "delta": {variant: …}}; both are empty for small groups.

    Args:
        scheme: of the cells.
        numbers: writes an estimate.
    """
    entries: dict[str, dict[str, Any]] = {}
    for kind, found in comparison.subgroups.items():
        entries[kind] = {}
        for group in found:
            cells = {cell[0]: numbers(value) for cell, value in group.accuracies.items() if cell[1] == scheme}
            gains = {cell[0]: numbers(value) for cell, value in group.gains.items() if cell[1] == scheme}
            entries[kind][group.name] = {"n": group.n, "cells": cells, "delta": gains}
    return entries


def _of_question(answered: Answered, kind: str) -> pd.Series:
    """Return the group of each question, in the order of `answered.questions`: that of its first row that names one."""
    named = answered.frame[kind].notna().to_numpy()
    first = pd.DataFrame({"question": answered.question[named], kind: answered.frame[kind].astype(object)[named]})
    first = first.drop_duplicates("question")
    group_names = pd.Series([_name(value) for value in first[kind]], index=pd.Index(first["question"]), dtype=object)
    return group_names.reindex(np.arange(len(answered.questions)))


def _name(value: object) -> str:
    """Return a group's name; a level that empty values made a float is whole again."""
    return f"{value:g}" if isinstance(value, int | float | np.number) else str(value)


def _ordered(group_names: set[str]) -> list[str]:
    """Return the groups' names: numbers by value, before texts."""

    def place(name: str) -> tuple[bool, float, str]:
        try:
            return False, float(name), name
        except ValueError:
            return True, 0.0, name

    return sorted(group_names, key=place)


def _group(comparison: Comparison, answered: Answered, name: str, belongs: pd.Series) -> Group:
    inside = belongs.to_numpy()[answered.question]
    n = int(belongs.to_numpy()[np.unique(answered.question)].sum())
    if n < FEWEST:
        return Group(name, n, {}, {})
    frame = pd.DataFrame(answered.frame[inside])
    rows = pd.DataFrame(answered.table[inside]).reset_index(drop=True)
    try:
        evidence: Questions = Answered(frame, rows, grid=answered.grid).outcomes
    except BadInput:  # all its questions are in one cluster, or a seed has one alone
        return Group(name, n, {}, {})
    accuracies = {cell: evidence.accuracy(cell) for cell in comparison.cells}
    trained = [cell for cell in comparison.cells if cell[0] != BASE]
    gains = {cell: evidence.contrast({cell: 1, (BASE, cell[1]): -1}) for cell in trained}
    return Group(name, n, accuracies, gains)


def _row(comparison: Comparison, group: Group, variant: str, scheme: str) -> tuple[str, ...]:
    rates = [group.accuracies[cell] for cell in ((BASE, scheme), (variant, scheme))]
    texts = [f"{rate.estimate:.3f} [{rate.low:.3f}, {rate.high:.3f}]" for rate in rates]
    return group.name, str(group.n), comparison.shown(scheme), *texts, interval(group.gains[variant, scheme])


def _left_out(kind: str, found: list[Group], shown: list[Group]) -> str:
    """Return which groups the table does not show, and why."""
    sentences = []
    small = [f"{group.name} (n = {group.n})" for group in found if group.n < FEWEST]
    if small:
        more = f" and {len(small) - MOST} more" if len(small) > MOST else ""
        sentences.append(f"Left out, with fewer than {FEWEST} questions: {', '.join(small[:MOST])}{more}.")
    no_error = [f"{group.name} (n = {group.n})" for group in found if group.n >= FEWEST and not group.accuracies]
    if no_error:
        sentences.append(f"Left out, with all questions in one cluster: {', '.join(no_error[:MOST])}.")
    numbers = sum(bool(group.accuracies) for group in found)
    if numbers > len(shown):
        sentences.append(f"The {MOST} largest of {numbers} groups by {kind} are shown.")
    return "".join(f" {sentence}" for sentence in sentences)
