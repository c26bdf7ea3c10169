"""Accuracies and gains by subject and by level, where the rows name them: exploratory, besides the verdict."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from qrl.compare.estimates import numbers
from qrl.compare.evidence import Cell
from qrl.compare.outcomes import Answered
from qrl.errors import BadInput
from qrl.names import BASE
from qrl.stats import Estimate
from qrl.stats.text import interval, table

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


def groups(answered: Answered, cells: Sequence[Cell]) -> dict[str, list[Group]]:
    """Return the groups of each kind that the rows name; none of a kind if all questions are in one group.

    Args:
        answered: the table of answers.
        cells: in the order in which a group's accuracies are listed.
    """
    by_kind = {}
    for kind in KINDS:
        if kind not in answered.frame:
            continue
        group_of_question = _group_of_question(answered, kind)
        group_names = _ordered(group_of_question.dropna())
        if len(group_names) > 1:
            by_kind[kind] = [_group(answered, cells, name, group_of_question == name) for name in group_names]
    return by_kind


def markdown(
    by_kind: Mapping[str, list[Group]],
    variants: Sequence[str],
    schemes: Sequence[str],
    scheme_label: Callable[[str], str],
) -> list[str]:
    """Return a table per kind: a row per group and scheme with n, accuracies and gains; then what is left out.

    Args:
        by_kind: from `groups`.
        variants: base first, then the trained ones.
        schemes: in the order of rows.
        scheme_label: returns a scheme as tables show it.
    """
    lines = []
    for kind, all_groups in by_kind.items():
        with_numbers = [group for group in all_groups if group.accuracies]
        largest = sorted(with_numbers, key=lambda group: -group.n)[:MOST]
        shown_groups = [group for group in all_groups if group in largest]  # in the order of their names

        lines += [f"## By {kind}", ""]
        if shown_groups:
            for variant in variants[1:]:
                head = (kind, "n", "scheme", BASE, variant, f"gain: {variant} − {BASE}")
                rows = []
                for group in shown_groups:
                    rows += [_row(group, variant, scheme, scheme_label(scheme)) for scheme in schemes]
                lines += [*table(head, rows), ""]
        sentences = [_REMARK, *_left_out(kind, all_groups, len(shown_groups))]
        lines += [" ".join(sentences), ""]
    return lines


def as_json(by_kind: Mapping[str, list[Group]], scheme: str) -> dict[str, dict[str, Any]]:
    """Return kind → group → {"n", "cells": {variant: …}, "delta": {variant: …}}; both are empty for small groups.

    Args:
        by_kind: from `groups`.
        scheme: of the cells.
    """
    entries: dict[str, dict[str, Any]] = {}
    for kind, all_groups in by_kind.items():
        entries[kind] = {}
        for group in all_groups:
            cells = _of_scheme(group.accuracies, scheme)
            gains = _of_scheme(group.gains, scheme)
            entries[kind][group.name] = {"n": group.n, "cells": cells, "delta": gains}
    return entries


def _of_scheme(estimates: Mapping[Cell, Estimate], scheme: str) -> dict[str, dict[str, float]]:
    """Return variant → estimate as JSON, of the cells under a scheme."""
    return {variant: numbers(value) for (variant, cell_scheme), value in estimates.items() if cell_scheme == scheme}


def _group_of_question(answered: Answered, kind: str) -> pd.Series:
    """Return the group of each question, in the order of `answered.questions`: that of its first row that names one."""
    is_named = answered.frame[kind].notna().to_numpy()
    group_names = answered.frame[kind].astype(object)[is_named]
    rows = pd.DataFrame({"question": answered.question[is_named], kind: group_names})
    first = rows.drop_duplicates("question")
    by_question = pd.Series([_name(value) for value in first[kind]], index=pd.Index(first["question"]), dtype=object)
    return by_question.reindex(np.arange(len(answered.questions)))


def _name(value: object) -> str:
    """Return a group's name; a level that empty values made a float is whole again."""
    return f"{value:g}" if isinstance(value, int | float | np.number) else str(value)


def _ordered(group_names: Iterable[str]) -> list[str]:
    """Return the different names of groups: numbers by value, before texts."""

    def order(name: str) -> tuple[bool, float, str]:
        try:
            return False, float(name), name
        except ValueError:
            return True, 0.0, name

    return sorted(set(group_names), key=order)


def _group(answered: Answered, cells: Sequence[Cell], name: str, belongs: pd.Series) -> Group:
    """Return a group's accuracies and gains; none for a small one.

    Args:
        answered: the table of answers.
        cells: of all groups.
        name: of the group.
        belongs: for each of `answered.questions`, whether it is of the group.
    """
    question_belongs = belongs.to_numpy()
    n = int(question_belongs[np.unique(answered.question)].sum())
    if n < FEWEST:
        return Group(name, n, {}, {})
    of_group = question_belongs[answered.question]
    frame = pd.DataFrame(answered.frame[of_group])
    table_rows = pd.DataFrame(answered.table[of_group]).reset_index(drop=True)
    try:
        evidence = Answered(frame, table_rows, grid=answered.grid).outcomes
    except BadInput:  # all its questions are in one cluster, or a seed has one alone
        return Group(name, n, {}, {})
    accuracies = {cell: evidence.accuracy(cell) for cell in cells}
    gains = {}
    for variant, scheme in cells:
        if variant != BASE:
            gains[variant, scheme] = evidence.contrast({(variant, scheme): 1, (BASE, scheme): -1})
    return Group(name, n, accuracies, gains)


def _row(group: Group, variant: str, scheme: str, scheme_label: str) -> list[str]:
    rates = [group.accuracies[BASE, scheme], group.accuracies[variant, scheme]]
    texts = [f"{rate.estimate:.3f} [{rate.low:.3f}, {rate.high:.3f}]" for rate in rates]
    return [group.name, str(group.n), scheme_label, *texts, interval(group.gains[variant, scheme])]


def _left_out(kind: str, all_groups: Sequence[Group], count_shown: int) -> list[str]:
    """Return sentences on the groups that the table does not show, and why."""
    sentences = []
    small_groups = [f"{group.name} (n = {group.n})" for group in all_groups if group.n < FEWEST]
    if small_groups:
        rest = f" and {len(small_groups) - MOST} more" if len(small_groups) > MOST else ""
        sentences.append(f"Left out, with fewer than {FEWEST} questions: {', '.join(small_groups[:MOST])}{rest}.")
    no_error = [f"{group.name} (n = {group.n})" for group in all_groups if group.n >= FEWEST and not group.accuracies]
    if no_error:
        sentences.append(f"Left out, with all questions in one cluster: {', '.join(no_error[:MOST])}.")
    count_with_numbers = sum(bool(group.accuracies) for group in all_groups)
    if count_with_numbers > count_shown:
        sentences.append(f"The {MOST} largest of {count_with_numbers} groups by {kind} are shown.")
    return sentences
