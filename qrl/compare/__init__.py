"""The table of cells: six accuracies become gains, gain survival, a verdict.

A *cell* is one variant under one scheme; every other variant is compared with `base`. All numbers are contrasts of cells
(`stats`), paired by question where outcomes are known, independent where only counts are. Where there are several training
runs, what is compared is the mean over them, and the spread between them is in every error.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from qrl import names, stats
from qrl.compare import compatibility, record, table
from qrl.compare.evidence import Cell, Counts, Questions
from qrl.compare.outcomes import check_grid, outcomes
from qrl.compare.read import read_counts, read_questions
from qrl.errors import BadInput
from qrl.stats import Estimate
from qrl.stats.verdict import Verdict, judge

__all__ = ["Cell", "Comparison", "Row", "from_counts", "from_questions", "read_counts", "read_questions", "write"]


@dataclass(frozen=True)
class Row:
    """One trained variant under one scheme, against base.

    `delta` is trained − base; `losses` the difference of each of the two to itself at full precision, base first. At full
    precision there are no losses, and neither gain survival nor a verdict is defined. `mcnemar` tests `delta` and
    exists where outcomes are paired, one run's and one a question; `bootstrap` repeats `delta` and gain survival by
    resampling; `p_holm` is the verdict's p-value corrected for all verdicts of the study.
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
        """Whether a verdict stands after Holm's correction; None where nothing was claimed."""
        claimed = self.verdict is not None and self.verdict.verdict != "inconclusive"
        return self.p_holm < 1 - stats.LEVEL if claimed else None


@dataclass(frozen=True)
class Comparison:
    """All cells and what follows from them.

    Attributes:
        cells: (variant, scheme) → accuracy with binomial (or clustered) stderr and Wilson interval.
        evidence: what contrasts are computed from.
        margin: loss of gain that counts as survival; None: half the full-precision gain, at least 0.02.
        engine: what answered every cell, with its version; empty where that is not known.
    """

    cells: dict[Cell, Estimate]
    evidence: Questions | Counts = field(repr=False)
    margin: float | None
    engine: str = ""

    @property
    def n(self) -> int:
        """Different questions that every cell answered."""
        return self.evidence.n

    @property
    def paired(self) -> bool:
        """Whether outcomes are known per question, or only counts."""
        return self.evidence.paired

    @property
    def clusters(self) -> int | None:
        """Groups of questions, or None where questions are independent."""
        return self.evidence.clusters

    @property
    def runs(self) -> tuple[str, ...]:
        """Labels of the training runs, their seeds; none where only counts are known."""
        return self.evidence.runs

    @cached_property
    def pass_at(self) -> dict[Cell, dict[int, Estimate]]:
        """Cell → k → pass@k, where a cell has several samples per question."""
        found = {cell: self.evidence.pass_at(cell) for cell in self.cells}
        return {cell: by_k for cell, by_k in found.items() if by_k}

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
        tested = [i for i, row in enumerate(rows) if row.verdict and row.verdict.p_value is not None]
        for i, p in zip(tested, stats.holm([rows[i].verdict.p_value for i in tested]), strict=True):
            rows[i] = replace(rows[i], p_holm=p)
        return tuple(rows)

    def row(self, scheme: str, variant: str | None = None) -> Row:
        """The row of a scheme; of the first trained variant unless another is named."""
        variant = variant or self.variants[1]
        return next(row for row in self.rows if (row.variant, row.scheme) == (variant, scheme))

    def difference(self, a: Cell, b: Cell) -> Estimate:
        """accuracy(a) − accuracy(b) with its 95 % interval, paired where outcomes are.

        Raises:
            BadInput: a cell that was not evaluated.
        """
        for cell in (a, b):
            if cell not in self.cells:
                raise BadInput(
                    f"There is no cell {names.cell_name(*cell)}: expected one of {', '.join(names.cell_name(*known) for known in self.cells)}."
                )
        return self.evidence.contrast({a: 1, b: -1})

    def table_json(self) -> dict[str, Any]:
        """The contract `table.json`; see `record.as_json`."""
        return record.as_json(self)

    def markdown(self) -> str:
        """The study as tables that a person reads."""
        return table.as_markdown(self)

    def sentence(self) -> str:
        """The verdict on gain survival, one sentence per quantized scheme."""
        return table.as_sentence(self)

    def metrics(self) -> dict[str, float]:
        """`compare/delta_<scheme>` and `compare/gain_survival_<scheme>`, each with `_stderr`, `_low` and `_high`."""
        return record.as_metrics(self)

    def _row(self, variant: str, scheme: str) -> Row:
        trained, base = (variant, scheme), (names.BASE, scheme)
        trained_fp, base_fp = (variant, names.FULL), (names.BASE, names.FULL)
        gain = {trained: 1, base: -1}
        row = Row(variant, scheme, self.difference(trained, base), self.evidence.mcnemar(trained, base))
        if resampled := self.evidence.bootstrap(gain):
            row.bootstrap["delta"] = resampled
        if scheme == names.FULL:
            return row
        survival, kept = (gain | {trained_fp: -share, base_fp: share} for share in (1, 0.5))
        if resampled := self.evidence.bootstrap(survival):
            row.bootstrap["gain_survival"] = resampled
        estimate = self.evidence.contrast(survival)
        accuracies = {
            names.cell_name(*cell): self.cells[cell].estimate for cell in (base_fp, trained_fp, base, trained)
        }
        verdict = judge(
            self.difference(trained_fp, base_fp), estimate, self.evidence.contrast(kept), accuracies, self.margin
        )
        losses = {names.BASE: self.difference(base, base_fp), variant: self.difference(trained, trained_fp)}
        return replace(row, gain_survival=estimate, verdict=verdict, losses=losses)


def from_questions(frame: pd.DataFrame, *, margin: float | None = None) -> Comparison:
    """Compares cells whose answers are known question by question: everything is paired.

    Args:
        frame: columns variant, scheme, question, correct (0/1); optionally cluster (groups of questions, which widen the
            errors as they should), seed (training runs, a random effect) and sample (several answers to a question).
        margin: loss of gain, in accuracy, that still counts as survival.

    Raises:
        BadInput: columns missing, outcomes other than 0 and 1, duplicates, cells on different questions, no base or full.
    """
    evidence = Questions(outcomes(frame))
    cells = {cell: evidence.accuracy(cell) for cell in _ordered(evidence.outcomes.cells)}
    return Comparison(cells, evidence, _margin(margin), compatibility.engine(frame))


def from_counts(counts: dict[str, Any], *, margin: float | None = None) -> Comparison:
    """Compares cells of which only the number of right answers is known, as if each had questions of its own.

    Args:
        counts: `{"n": 100, "base": {"full": 68, …}, "grpo": {…}}`.
        margin: loss of gain, in accuracy, that still counts as survival.

    Raises:
        BadInput: no n, counts outside 0..n, or cells that no gain can be computed from.
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
                f"Cell {names.cell_name(*cell)} has {count!r} right answers, but must have a whole number from 0 to n = {n}."
            )
    if not correct:
        raise BadInput('The counts name no cell: expected {"n": 100, "base": {"full": 68}, "grpo": {"full": 72}}.')
    check_grid(correct, n)
    evidence = Counts(correct, n)
    return Comparison({cell: evidence.accuracy(cell) for cell in _ordered(correct)}, evidence, _margin(margin))


def write(comparison: Comparison, out: str | Path) -> None:
    """Writes table.md, table.json and figures/*.png into `out`, each whole or not at all.

    Raises:
        BadInput: `out` cannot be written to.
    """
    from qrl import figures

    out = Path(out)
    try:
        (out / names.FIGURES).mkdir(parents=True, exist_ok=True)
        table.write(comparison, out)
        figures.matrix(comparison, out / names.FIGURES / "matrix.png")
        if len(comparison.schemes) > 1:
            figures.survival(comparison, out / names.FIGURES / "survival.png")
    except OSError as error:
        raise BadInput(
            f"The comparison cannot be written to {out} ({error.strerror or error}): give a folder that is writable and has space."
        ) from None


def _ordered(cells: dict[Cell, Any]) -> dict[Cell, Any]:
    """Base before the trained variants, full before the quantized schemes, known ones before the user's own."""

    def place(cell: Cell) -> tuple:
        variant, scheme = cell
        known = names.SCHEMES.index(scheme) if scheme in names.SCHEMES else len(names.SCHEMES)
        return variant != names.BASE, variant != names.GRPO, variant, known, scheme

    return {cell: cells[cell] for cell in sorted(cells, key=place)}


def _margin(margin: float | None) -> float | None:
    if margin is not None and not 0 < margin < 1:
        raise BadInput(
            f"The margin is {margin!r}, but must lie between 0 and 1: the loss of accuracy that still counts as survival."
        )
    return margin
