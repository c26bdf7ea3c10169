"""What a comparison is computed from: outcomes per question, or counts alone. Both compute contrasts of cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from qrl import stats
from qrl.compare.outcomes import Outcomes
from qrl.names import BASE
from qrl.stats import Estimate
from qrl.stats.rates import is_binary

Cell = tuple[str, str]  # (variant, scheme)
BOOTSTRAP_SEED = 0


@dataclass(frozen=True)
class Counts:
    """Right answers per cell, as if every cell had its own questions."""

    correct: dict[Cell, int]
    n: int
    paired = False
    runs: ClassVar[tuple[str, ...]] = ()
    clusters: ClassVar[int | None] = None
    differing: ClassVar[Mapping[Cell, int]] = {}
    answered: ClassVar[int] = 0

    def accuracy(self, cell: Cell) -> Estimate:
        return stats.accuracy(self.correct[cell], self.n)

    def contrast(self, weights: Mapping[Cell, float]) -> Estimate:
        correct = [self.correct[cell] for cell in weights]
        return stats.independent_contrast(correct, [self.n] * len(weights), list(weights.values()))

    def pass_at(self, cell: Cell) -> dict[int, Estimate]:
        return {}

    def samples(self, cell: Cell) -> int:
        return 1

    def mcnemar(self, a: Cell, b: Cell) -> None:
        return None

    def bootstrap(self, weights: Mapping[Cell, float]) -> None:
        return None


@dataclass(frozen=True)
class Questions:
    """Outcomes per question: paired by question, training runs as a random effect, samples averaged per question."""

    outcomes: Outcomes
    paired = True

    @property
    def runs(self) -> tuple[str, ...]:
        """Seeds of the training runs."""
        return self.outcomes.runs

    @property
    def n(self) -> int:
        return self.outcomes.n

    @property
    def clusters(self) -> int | None:
        return self.outcomes.clusters

    @property
    def differing(self) -> Mapping[Cell, int]:
        """Cell of the base → questions that it answers differently under different seeds."""
        return self.outcomes.differing

    @property
    def answered(self) -> int:
        """Questions summed over runs."""
        return sum(len(groups) for groups in self.outcomes.groups)

    def samples(self, cell: Cell) -> int:
        """Return the number of answers to each question."""
        return self.outcomes.samples[cell]

    def accuracy(self, cell: Cell) -> Estimate:
        """Return the share of right answers; pass@1 if there are several samples.

        The error is binomial for independent questions, one run and one sample.
        """
        correct = self.outcomes.cells[cell]
        if len(self.runs) == 1 and self.clusters is None and self.samples(cell) == 1 and is_binary(correct[0]):
            return stats.accuracy(int(correct[0].sum()), len(correct[0]))
        return self._rate(cell, correct)

    def pass_at(self, cell: Cell) -> dict[int, Estimate]:
        """Return k → pass@k, for k = 2, 4, 8 … and all of the cell's samples."""
        samples = self.samples(cell)
        right = [np.rint(run * samples) for run in self.outcomes.cells[cell]]
        return {k: self._rate(cell, [stats.pass_at(k, run, samples) for run in right]) for k in stats.every_k(samples)}

    def contrast(self, weights: Mapping[Cell, float]) -> Estimate:
        """Return a weighted sum of cells' accuracies: paired by question, averaged over training runs."""
        signs = list(weights.values())
        if len(self.runs) == 1:
            return stats.contrast(self._stacked(weights, 0), signs, self._clusters)
        stacked = [self._stacked(weights, run) for run in range(len(self.runs))]
        vary = any(variant != BASE for variant, _ in weights)
        return stats.contrast_over_runs(stacked, signs, self.outcomes.groups, self.runs, self.n, vary=vary)

    def mcnemar(self, a: Cell, b: Cell) -> float | None:
        """Return McNemar's exact p of two cells; None for several runs or samples, where it is not defined."""
        if len(self.runs) > 1 or max(self.samples(a), self.samples(b)) > 1:
            return None
        return stats.mcnemar(self.outcomes.cells[a][0], self.outcomes.cells[b][0])

    def bootstrap(self, weights: Mapping[Cell, float]) -> Estimate | None:
        """Return the contrast by resampling questions; None for several runs, whose effects questions do not carry."""
        if len(self.runs) > 1:
            return None
        return stats.bootstrap(self._stacked(weights, 0), list(weights.values()), self._clusters, seed=BOOTSTRAP_SEED)

    @property
    def _clusters(self) -> np.ndarray | None:
        return None if self.clusters is None else self.outcomes.groups[0]

    def _stacked(self, weights: Mapping[Cell, float], run: int) -> np.ndarray:
        return np.stack([self.outcomes.cells[cell][run] for cell in weights])

    def _rate(self, cell: Cell, values: Sequence[np.ndarray]) -> Estimate:
        if len(self.runs) == 1:
            return stats.rate(values[0], self._clusters)
        return stats.rate_over_runs(values, self.outcomes.groups, self.runs, self.n, vary=cell[0] != BASE)
