"""Comparisons from outcomes per question, or from counts alone."""

from collections.abc import Iterable
from typing import Any

import pandas as pd

from qrl import names
from qrl.compare import compatibility
from qrl.compare.comparison import Comparison
from qrl.compare.evidence import Cell, Counts, Questions
from qrl.compare.outcomes import outcomes
from qrl.compare.validate import check_grid
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
    evidence = outcomes(frame)
    engine, full = compatibility.engine(frame), compatibility.full_with_dtype(frame)
    return _comparison(evidence, evidence.cells, margin, engine, full)


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
    return _comparison(Counts(correct, n), correct, margin)


def _comparison(
    evidence: Questions | Counts, cells: Iterable[Cell], margin: float | None, engine: str = "", full: str = names.FULL
) -> Comparison:
    """Return the comparison, with base and full before the others and known schemes before the user's own."""

    def rank(cell: Cell) -> tuple:
        variant, scheme = cell
        known = names.SCHEMES.index(scheme) if scheme in names.SCHEMES else len(names.SCHEMES)
        return variant != names.BASE, variant != names.GRPO, variant, known, scheme

    if margin is not None and not 0 < margin < 1:
        expected = "must be between 0 and 1: the loss of accuracy that still counts as survival"
        raise BadInput(f"The margin is {margin!r}, but {expected}.")
    accuracies = {cell: evidence.accuracy(cell) for cell in sorted(cells, key=rank)}
    return Comparison(accuracies, evidence, margin, engine, full)
