"""Comparisons from outcomes per question, or from counts alone."""

from typing import Any

import pandas as pd

from qrl import names
from qrl.compare.comparison import Comparison
from qrl.compare.evidence import Cell, Counts
from qrl.compare.outcomes import outcomes
from qrl.compare.validate import check_grid, engine, full_with_dtype
from qrl.errors import BadInput


def from_questions(frame: pd.DataFrame, *, margin: float | None = None) -> Comparison:
    """Compare cells by their outcome on each question: everything is paired.

    Args:
        frame: columns variant, scheme, question, correct (0/1); optionally cluster (groups of questions; errors are
            then clustered), seed (training runs, a random effect), sample (several answers to a question), engine and
            dtype.
        margin: loss of gain, in accuracy, that still counts as survival.

    Raises:
        BadInput: columns are missing, outcomes are not 0 or 1, rows are duplicated, cells answered different questions,
            or base or full is missing.
    """
    return Comparison(outcomes(frame), margin, engine(frame), full_with_dtype(frame))


def from_counts(counts: dict[str, Any], *, margin: float | None = None) -> Comparison:
    """Compare cells by their number of right answers alone, as if each cell had its own questions.

    Args:
        counts: `{"n": 100, "base": {"full": 68, …}, "grpo": {…}}`.
        margin: loss of gain, in accuracy, that still counts as survival.

    Raises:
        BadInput: n is missing, a count is outside 0..n, or no gain can be computed from the cells.
    """
    n = counts.get("n")
    if type(n) is not int or n < 2:  # True is an int too
        raise BadInput(f"'n' is {n!r}, but must be the number of questions, a whole number of at least 2.")
    correct: dict[Cell, int] = {}
    for variant, schemes in counts.items():
        if variant == "n":
            continue
        if not isinstance(schemes, dict):
            expected = 'must map schemes to right answers, as in {"full": 68}'
            raise BadInput(f"'{variant}' is {schemes!r}, but {expected}.")
        for label, count in schemes.items():
            cell = variant, names.scheme(label)
            if type(count) is not int or not 0 <= count <= n:
                problem = f"Cell {names.cell_name(*cell)} has {count!r} right answers"
                raise BadInput(f"{problem}, but must have a whole number from 0 to n = {n}.")
            correct[cell] = count
    if not correct:
        raise BadInput('The counts name no cell: expected {"n": 100, "base": {"full": 68}, "grpo": {"full": 72}}.')
    check_grid(correct, n)
    return Comparison(Counts(correct, n), margin)
