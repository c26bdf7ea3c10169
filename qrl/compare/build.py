"""Comparisons from outcomes per question, or from counts alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from qrl import names
from qrl.compare.evidence import Cell, Counts
from qrl.compare.missing import fill
from qrl.compare.outcomes import Answered
from qrl.compare.printable import PrintableComparison
from qrl.compare.read import read_questions
from qrl.compare.validate import check_grid, engine, full_with_dtype, partial_layers, unusual_groups
from qrl.errors import BadInput
from qrl.files import tables

_LARGEST_N = 10**15  # questions of counts: beyond, floats leave out whole numbers


def compare(
    data: pd.DataFrame | tables.Rows | str | Path | Mapping[str, Any],
    *,
    columns: Mapping[str, str] | None = None,
    where: Mapping[str, str] | None = None,
    reference: str | None = None,
    margin: float | None = None,
    missing: str | None = None,
) -> PrintableComparison:
    """Compare cells: every variant with `base`, every scheme with full precision.

    Args:
        data: a row per cell and question, as a frame, a list of dicts, a file or files per cell
            (`VARIANT:SCHEME=FILE,…`), with the columns of `from_questions`; or counts alone, as for `from_counts`.
        columns: our name of a column → its name in the data, such as {"correct": "exact_match"}.
        where: column → the value of the rows to keep, such as {"filter": "strict-match"}.
        reference: the data's name for full precision, such as "bf16"; None if it is "full".
        margin: loss of gain, in accuracy, that still counts as survival; None for a tenth of it, at least 0.01.
        missing: "wrong" counts answers that a cell lacks as wrong; None refuses such a cell.

    Returns:
        A comparison, which shows itself as tables and verdicts; `row(scheme)` has the numbers.

    Raises:
        BadInput: the data cannot be read or compared.
    """
    if isinstance(data, Mapping):
        if missing is not None:
            raise BadInput("missing has no effect on counts, which name no answers: leave it out.")
        return from_counts(data, margin=margin, reference=reference)
    frame = read_questions(data, columns=columns, where=where, reference=reference, whole=False)
    return from_questions(frame, margin=margin, missing=missing)


def from_questions(
    frame: pd.DataFrame, *, margin: float | None = None, missing: str | None = None
) -> PrintableComparison:
    """Compare cells by their outcome on each question: everything is paired.

    Args:
        frame: columns variant, scheme, question, correct (0/1, or a partial credit between them); optionally cluster
            (groups of questions; errors are then clustered), seed (training runs, a random effect), sample (several
            answers to a question), engine and dtype; subject and level (groups to show apart); and n_tokens,
            finish_reason, reached, reference_logprob, parsed, completion, if answers are known.
        margin: loss of gain, in accuracy, that still counts as survival.
        missing: "wrong" counts answers that a cell lacks as wrong; None refuses such a cell.

    Raises:
        BadInput: columns are missing, outcomes are outside 0..1, rows are duplicated, cells answered different
            questions, or base or full is missing.
    """
    answered = Answered(fill(frame, missing))
    return PrintableComparison(
        evidence=answered.outcomes,
        margin=margin,
        engine=engine(frame),
        full=full_with_dtype(frame),
        answered=answered,
        groups=unusual_groups(frame),
        layers=partial_layers(frame),
    )


def from_counts(
    counts: Mapping[str, Any], *, margin: float | None = None, reference: str | None = None
) -> PrintableComparison:
    """Compare cells by their number of right answers alone, as if each cell had its own questions.

    Args:
        counts: `{"n": 100, "base": {"full": 68, …}, "grpo": {…}}`.
        margin: loss of gain, in accuracy, that still counts as survival.
        reference: the name of full precision among the schemes; None if it is `full`.

    Raises:
        BadInput: n is missing, a count is outside 0..n, or no gain can be computed from the cells.
    """
    n = counts.get("n")
    if type(n) is not int or not 2 <= n <= _LARGEST_N:  # True is an int too
        expected = f"the number of questions, a whole number of at least 2 and at most {_LARGEST_N:,}"
        raise BadInput(f"'n' is {n!r:.40}, but must be {expected}.")
    correct: dict[Cell, int] = {}
    for variant, schemes in counts.items():
        if variant == "n":
            continue
        if not isinstance(schemes, dict):
            expected = 'must map schemes to right answers, as in {"full": 68}'
            raise BadInput(f"'{variant}' is {schemes!r}, but {expected}.")
        for label, count in schemes.items():
            cell = (variant, names.scheme(label, reference))
            if type(count) is not int or not 0 <= count <= n:
                problem = f"Cell {names.cell_name(*cell)} has {count!r} right answers"
                raise BadInput(f"{problem}, but must have a whole number from 0 to n = {n}.")
            correct[cell] = count
    if not correct:
        raise BadInput('The counts name no cell: expected {"n": 100, "base": {"full": 68}, "grpo": {"full": 72}}.')
    check_grid(correct, n)
    return PrintableComparison(Counts(correct, n), margin, full=names.shown(names.FULL, [reference]))
