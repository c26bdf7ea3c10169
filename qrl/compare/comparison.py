"""A comparison: every cell's accuracy, and the gains, losses and verdicts that follow from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import pandas as pd

from qrl import names, stats
from qrl.compare import compatibility, record, table
from qrl.compare.evidence import Cell, Counts, Questions
from qrl.compare.outcomes import outcomes
from qrl.compare.validate import check_grid
from qrl.errors import BadInput
from qrl.names import BASE, FULL
from qrl.stats import Estimate
from qrl.stats.verdict import Verdict, judge

T = TypeVar("T")


def gain_survival(contrast: Callable[[dict[Cell, float]], T], variant: str, scheme: str, share: float = 1.0) -> T:
    """Return gain survival: (trained − base) under q, minus (trained − base) under full. 0: no gain is lost.

    Args:
        contrast: computes a weighted sum of cells' accuracies, such as `Questions.contrast`.
        variant: the trained variant.
        scheme: the quantized scheme q.
        share: of the full-precision gain to subtract; with ½ the result is above 0 if more than half of the gain is
            kept.

    Source: a difference in differences; over paired questions its stderr is that of Miller, arXiv 2411.00640, section
        4.
    """
    return contrast({(variant, scheme): 1, (BASE, scheme): -1, (variant, FULL): -share, (BASE, FULL): share})


@dataclass(frozen=True)
class Row:
    """One trained variant under one scheme, compared with base.

    `delta` is trained − base. `losses` maps base and the variant to their difference under this scheme − full. For
    `full` there are no losses, and neither gain survival nor a verdict is defined. `mcnemar` tests `delta`; it is None
    unless outcomes are paired, from one run and one answer per question. `bootstrap` repeats `delta` and gain survival
    by resampling. `p_holm` is the verdict's p-value, corrected for all verdicts of the study.
    """

    variant: str
    scheme: str
    delta: Estimate
    mcnemar: float | None = None
    gain_survival: Estimate | None = None
    verdict: Verdict | None = None
    p_holm: float | None = None
    losses: dict[str, Estimate] = field(default_factory=dict)
    bootstrap: dict[str, Estimate] = field(default_factory=dict)

    @property
    def holds_together(self) -> bool | None:
        """Whether the verdict remains significant after Holm's correction; None if it is inconclusive."""
        if self.verdict is None or self.verdict.verdict == "inconclusive" or self.p_holm is None:
            return None
        return self.p_holm < 1 - stats.LEVEL


@dataclass(frozen=True)
class Comparison:
    """All cells and what follows from them.

    Attributes:
        cells: (variant, scheme) → accuracy with binomial (or clustered) stderr and Wilson interval; `base` and `full`
            first.
        evidence: outcomes or counts, from which contrasts are computed.
        margin: loss of gain that counts as survival; None for half the full-precision gain, at least 0.02.
        engine: the engine and version that answered every cell; empty if unknown.
        full: how tables show the scheme `full`, with the dtype it was computed in if that is known: `full (bf16)`.
    """

    cells: dict[Cell, Estimate]
    evidence: Questions | Counts = field(repr=False)
    margin: float | None
    engine: str = ""
    full: str = FULL

    @property
    def n(self) -> int:
        """Distinct questions that every cell answered."""
        return self.evidence.n

    @property
    def paired(self) -> bool:
        """Whether outcomes are known per question, or only counts."""
        return self.evidence.paired

    @property
    def runs(self) -> tuple[str, ...]:
        """Seeds of the training runs; none if only counts are known."""
        return self.evidence.runs

    @cached_property
    def pass_at(self) -> dict[Cell, dict[int, Estimate]]:
        """Cell → k → pass@k, for cells with several samples per question."""
        by_cell = {cell: self.evidence.pass_at(cell) for cell in self.cells}
        return {cell: by_k for cell, by_k in by_cell.items() if by_k}

    @property
    def variants(self) -> tuple[str, ...]:
        """`base` first, then the trained ones."""
        return tuple(dict.fromkeys(variant for variant, _ in self.cells))

    @property
    def schemes(self) -> tuple[str, ...]:
        """`full` first, then the quantized ones."""
        return tuple(dict.fromkeys(scheme for _, scheme in self.cells))

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """Every trained variant under every scheme, with Holm's correction over all verdicts."""
        rows = [self._row(variant, scheme) for variant in self.variants[1:] for scheme in self.schemes]
        tested = {
            i: row.verdict.p_value for i, row in enumerate(rows) if row.verdict and row.verdict.p_value is not None
        }
        for i, p in zip(tested, stats.holm(list(tested.values())), strict=True):
            rows[i] = replace(rows[i], p_holm=p)
        return tuple(rows)

    def row(self, scheme: str, variant: str | None = None) -> Row:
        """Return the row of a scheme; of the first trained variant by default."""
        variant = variant or self.variants[1]
        return next(row for row in self.rows if (row.variant, row.scheme) == (variant, scheme))

    def judged(self) -> list[tuple[Row, Verdict, Estimate]]:
        """Return each quantized scheme's row with its verdict and gain survival."""
        return [(row, row.verdict, row.gain_survival) for row in self.rows if row.verdict and row.gain_survival]

    def difference(self, a: Cell, b: Cell) -> Estimate:
        """Return accuracy(a) − accuracy(b) with its 95 % interval, paired if outcomes are.

        Raises:
            BadInput: a cell was not evaluated.
        """
        for cell in (a, b):
            if cell not in self.cells:
                known = ", ".join(names.cell_name(*known) for known in self.cells)
                raise BadInput(f"There is no cell {names.cell_name(*cell)}: expected one of {known}.")
        return self.evidence.contrast({a: 1, b: -1})

    def shown(self, scheme: str) -> str:
        """Return the scheme as tables and figures show it."""
        return self.full if scheme == FULL else scheme

    def table_json(self) -> dict[str, Any]:
        """Return the contract `table.json`; see `record.as_json`."""
        return record.as_json(self)

    def markdown(self) -> str:
        """Return the study as Markdown tables and sentences."""
        return table.as_markdown(self)

    def sentence(self) -> str:
        """Return the verdict on gain survival, one sentence per quantized scheme."""
        return table.as_sentence(self)

    def metrics(self) -> dict[str, float]:
        """Return `compare/delta_<scheme>`, `compare/gain_survival_<scheme>`, and their `_stderr`, `_low`, `_high`."""
        return record.as_metrics(self)

    def _row(self, variant: str, scheme: str) -> Row:
        base, trained, base_full, trained_full = ((v, s) for s in (scheme, FULL) for v in (BASE, variant))
        contrast, bootstrap = self.evidence.contrast, self.evidence.bootstrap
        resampled = {"delta": bootstrap({trained: 1, base: -1})}
        row = Row(variant, scheme, self.difference(trained, base), self.evidence.mcnemar(trained, base))
        if scheme != FULL:
            resampled["gain_survival"] = gain_survival(bootstrap, variant, scheme)
            survival, kept = (gain_survival(contrast, variant, scheme, share) for share in (1, 0.5))
            four = {
                names.cell_name(*cell): self.cells[cell].estimate for cell in (base_full, trained_full, base, trained)
            }
            verdict = judge(self.difference(trained_full, base_full), survival, kept, four, self.margin)
            losses = {BASE: self.difference(base, base_full), variant: self.difference(trained, trained_full)}
            row = replace(row, gain_survival=survival, verdict=verdict, losses=losses)
        return replace(row, bootstrap={name: value for name, value in resampled.items() if value})


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
