"""What a comparison rests on: outcomes question by question, or counts alone. Contrasts of cells are asked of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qrl import stats
from qrl.compare.outcomes import Outcomes
from qrl.names import BASE
from qrl.stats import Estimate

Cell = tuple[str, str]  # (variant, scheme)
BOOTSTRAP_SEED = 0


@dataclass(frozen=True)
class Counts:
    """Right answers of each cell, as if every cell had questions of its own."""

    correct: dict[Cell, int]
    n: int
    paired = False
    runs: tuple[str, ...] = ()
    clusters: int | None = None

    def accuracy(self, cell: Cell) -> Estimate:
        return stats.accuracy(self.correct[cell], self.n)

    def contrast(self, weights: dict[Cell, float]) -> Estimate:
        return stats.independent_contrast(
            [self.correct[cell] for cell in weights], [self.n] * len(weights), list(weights.values())
        )

    def pass_at(self, cell: Cell) -> dict[int, Estimate]:
        return {}

    def samples(self, cell: Cell) -> int:
        return 1

    def mcnemar(self, a: Cell, b: Cell) -> None:
        return None

    def bootstrap(self, weights: dict[Cell, float]) -> None:
        return None


@dataclass(frozen=True)
class Questions:
    """Outcomes per question: everything is paired, training runs are a random effect, samples are averaged per question."""

    outcomes: Outcomes
    paired = True

    @property
    def runs(self) -> tuple[str, ...]:
        """Labels of the training runs."""
        return self.outcomes.runs

    @property
    def n(self) -> int:
        return self.outcomes.n

    @property
    def clusters(self) -> int | None:
        return self.outcomes.clusters

    def samples(self, cell: Cell) -> int:
        """Answers to each question."""
        return self.outcomes.samples[cell]

    def accuracy(self, cell: Cell) -> Estimate:
        """Share right, pass@1 where there are several samples; binomial error where questions are plain and one run answered."""
        correct = self.outcomes.cells[cell]
        if (
            len(self.runs) == 1
            and self.clusters is None
            and self.samples(cell) == 1
            and np.isin(correct[0], (0, 1)).all()
        ):
            return stats.accuracy(int(correct[0].sum()), len(correct[0]))
        return self._rate(cell, correct)

    def pass_at(self, cell: Cell) -> dict[int, Estimate]:
        """k → pass@k, for k = 2, 4, 8 … and all of the cell's samples."""
        samples = self.samples(cell)
        right = [np.rint(each * samples) for each in self.outcomes.cells[cell]]
        return {
            k: self._rate(cell, [stats.pass_at(k, each, samples) for each in right]) for k in stats.every_k(samples)
        }

    def contrast(self, weights: dict[Cell, float]) -> Estimate:
        """Weighted sum of cells' accuracies: paired by question, averaged over training runs."""
        signs = list(weights.values())
        if len(self.runs) == 1:
            return stats.contrast(self._stacked(weights, 0), signs, self._clusters)
        stacked = [self._stacked(weights, run) for run in range(len(self.runs))]
        vary = any(variant != BASE for variant, _ in weights)
        return stats.contrast_over_runs(stacked, signs, self.outcomes.groups, self.runs, self.n, vary=vary)

    def mcnemar(self, a: Cell, b: Cell) -> float | None:
        """Exact p of two cells' disagreements; None where it is not defined: several runs, or several samples."""
        if len(self.runs) > 1 or max(self.samples(a), self.samples(b)) > 1:
            return None
        return stats.mcnemar(self.outcomes.cells[a][0], self.outcomes.cells[b][0])

    def bootstrap(self, weights: dict[Cell, float]) -> Estimate | None:
        """The contrast by resampling questions; None where there are several runs, whose effects questions do not carry."""
        if len(self.runs) > 1:
            return None
        return stats.bootstrap(self._stacked(weights, 0), list(weights.values()), self._clusters, seed=BOOTSTRAP_SEED)

    @property
    def _clusters(self) -> np.ndarray | None:
        return None if self.clusters is None else self.outcomes.groups[0]

    def _stacked(self, weights: dict[Cell, float], run: int) -> np.ndarray:
        return np.stack([self.outcomes.cells[cell][run] for cell in weights])

    def _rate(self, cell: Cell, values: Sequence[np.ndarray]) -> Estimate:
        if len(self.runs) == 1:
            return stats.rate(values[0], self._clusters)
        return stats.rate_over_runs(values, self.outcomes.groups, self.runs, self.n, vary=cell[0] != BASE)
