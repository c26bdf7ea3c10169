"""Comparisons from outcomes per question, or from counts alone."""

from __future__ import annotations

from typing import Any

import pandas as pd

from qrl import names
from qrl.compare import compatibility
from qrl.compare.comparison import Comparison
from qrl.compare.evidence import Cell, Counts, Questions
from qrl.compare.outcomes import outcomes
from qrl.compare.validate import check_grid
from qrl.errors import BadInput
from qrl.names import BASE


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
    evidence = Questions(outcomes(frame))
    cells = {cell: evidence.accuracy(cell) for cell in _ordered(evidence.outcomes.cells)}
    engine, full = compatibility.engine(frame), compatibility.full_with_dtype(frame)
    return Comparison(cells, evidence, _margin(margin), engine, full)


def from_counts(counts: dict[str, Any], *, margin: float | None = None) -> Comparison:
    """Compare cells by their number of right answers alone, as if each cell had its own questions.

    Args:
        counts: `{"n": 100, "base": {"full": 68, …}, "grpo": {…}}`.
        margin: loss of gain, in accuracy, that still counts as survival.

    Raises:
        BadInput: n is missing, a count is outside 0..n, or no gain can be computed from the cells.
    """
    n = counts.get("n")
    if not isinstance(n, int) or isinstance(n, bool) or n < 2:
        raise BadInput(f"'n' is {n!r}, but must be the number of questions, a whole number of at least 2.")
    correct: dict[Cell, int] = {}
    for variant, schemes in counts.items():
        if variant == "n":
            continue
        if not isinstance(schemes, dict):
            raise BadInput(
                f"'{variant}' is {schemes!r}, but must map schemes to right answers, as in {{\"full\": 68}}."
            )
        correct |= {(variant, names.scheme(scheme)): count for scheme, count in schemes.items()}
    for cell, count in correct.items():
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= n:
            raise BadInput(
                f"Cell {names.cell_name(*cell)} has {count!r} right answers, "
                f"but must have a whole number from 0 to n = {n}."
            )
    if not correct:
        raise BadInput('The counts name no cell: expected {"n": 100, "base": {"full": 68}, "grpo": {"full": 72}}.')
    check_grid(correct, n)
    evidence = Counts(correct, n)
    return Comparison({cell: evidence.accuracy(cell) for cell in _ordered(correct)}, evidence, _margin(margin))


def _ordered(cells: dict[Cell, Any]) -> list[Cell]:
    """Sort base before the trained variants, full before the quantized schemes, known schemes before the user's own."""

    def rank(cell: Cell) -> tuple:
        variant, scheme = cell
        known = names.SCHEMES.index(scheme) if scheme in names.SCHEMES else len(names.SCHEMES)
        return variant != BASE, variant != names.GRPO, variant, known, scheme

    return sorted(cells, key=rank)


def _margin(margin: float | None) -> float | None:
    if margin is not None and not 0 < margin < 1:
        raise BadInput(
            f"The margin is {margin!r}, but must be between 0 and 1: the loss of accuracy that still counts as "
            "survival."
        )
    return margin
