"""What a comparison is computed from: outcomes per question, or counts alone. Both compute contrasts of cells."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np

from qrl import stats
from qrl.names import BASE
from qrl.stats import Estimate
from qrl.stats.rates import is_binary
from qrl.stats.simulate import Patterns

Cell = tuple[str, str]  # (variant, scheme)
BOOTSTRAP_SEED = 0
_BITS = 60  # cells at most that are coded as bits of one 64-bit number


@dataclass(frozen=True)
class Counts:
    """Right answers per cell, as if every cell had its own questions."""

    cells: dict[Cell, int]
    n: int
    paired = False
    runs: ClassVar[tuple[str, ...]] = ()
    groups: ClassVar[tuple[np.ndarray, ...]] = ()
    samples: ClassVar[Mapping[Cell, int]] = {}
    clusters: ClassVar[int | None] = None
    differing: ClassVar[Mapping[Cell, int]] = {}
    effective_clusters: ClassVar[float | None] = None
    partial: ClassVar[bool] = False

    def accuracy(self, cell: Cell) -> Estimate:
        return stats.accuracy(self.cells[cell], self.n)

    def contrast(self, weights: Mapping[Cell, float]) -> Estimate:
        correct = [self.cells[cell] for cell in weights]
        return stats.independent_contrast(correct, [self.n] * len(weights), list(weights.values()))

    def pass_at(self, cell: Cell) -> dict[int, Estimate]:
        return {}

    def mcnemar(self, a: Cell, b: Cell) -> None:
        return None

    def bootstrap(self, weights: Mapping[Cell, float]) -> None:
        return None

    def patterns(self, cells: Sequence[Cell]) -> None:
        return None

    def each_run(self) -> list["Counts"]:
        return []


@dataclass(frozen=True)
class Questions:
    """Outcomes per question: paired by question, training runs as a random effect, samples averaged per question.

    Attributes:
        runs: seeds of the training runs; one empty label if they are not named.
        cells: cell → per run (n_s,) the share of each question's samples that are right; 0 or 1 for one sample.
        groups: per run (n_s,) a number for each question, or for its group of questions.
        samples: cell → answers to each question.
        n: distinct questions over all runs.
        clusters: number of groups of questions, or None if questions are independent.
        differing: cell of the base → questions on which its answers differ between seeds, though the base is one model;
            only cells with such questions.
        partial: whether an answer has partial credit, so that right and wrong, as McNemar's test and pass@k count them,
            are not defined.
    """

    runs: tuple[str, ...]
    cells: dict[Cell, tuple[np.ndarray, ...]]
    groups: tuple[np.ndarray, ...]
    samples: dict[Cell, int]
    n: int
    clusters: int | None
    differing: dict[Cell, int]
    partial: bool = False
    paired = True

    def accuracy(self, cell: Cell) -> Estimate:
        """Return the share of right answers, or the mean credit; pass@1 if there are several samples.

        The error is binomial for independent questions, one run and one sample.
        """
        correct = self.cells[cell]
        if len(self.runs) == 1 and self.clusters is None and self.samples[cell] == 1 and is_binary(correct[0]):
            return stats.accuracy(int(correct[0].sum()), len(correct[0]))
        return self._rate(cell, correct)

    def pass_at(self, cell: Cell) -> dict[int, Estimate]:
        """Return k → pass@k, for k = 2, 4, 8 … and all of the cell's samples; none with partial credit."""
        if self.partial:
            return {}
        samples = self.samples[cell]
        right_counts = [np.rint(shares * samples) for shares in self.cells[cell]]  # by run, of a question's samples
        by_k = {}
        for k in stats.every_k(samples):
            by_k[k] = self._rate(cell, [stats.pass_at(k, counts, samples) for counts in right_counts])
        return by_k

    def contrast(self, weights: Mapping[Cell, float], *, vary: bool | None = None) -> Estimate:
        """Return a weighted sum of cells' accuracies: paired by question, averaged over training runs.

        Args:
            weights: by cell.
            vary: whether runs have weights of their own; None: unless all cells are the base's.
        """
        factors = list(weights.values())
        if len(self.runs) == 1 and self.clusters is None:
            outcomes, counts = self._combinations
            rows = [self._order.index(cell) for cell in weights]
            return stats.contrast(outcomes[rows], factors, counts=counts)
        outcomes_by_run = []
        for run in range(len(self.runs)):
            outcomes_by_run.append(np.stack([self.cells[cell][run] for cell in weights]))
        if len(self.runs) == 1:
            return stats.contrast(outcomes_by_run[0], factors, self._clusters)
        if vary is None:
            vary = any(variant != BASE for variant, _ in weights)
        return stats.contrast_over_runs(outcomes_by_run, factors, self.groups, self.runs, self.n, vary=vary)

    @property
    def _order(self) -> list[Cell]:
        return list(self.cells)

    @cached_property
    def _combinations(self) -> tuple[np.ndarray, np.ndarray]:
        """One run's (cells, k) different combinations of outcomes, and (k,) how many questions have each.

        Every contrast is computed from these: a million questions have at most a few hundred.
        """
        outcomes = np.stack([self.cells[cell][0] for cell in self.cells])
        if not is_binary(outcomes) or len(outcomes) > _BITS:
            return outcomes, np.ones(outcomes.shape[1])
        # A question's outcomes are the bits of one number.
        codes = (1 << np.arange(len(outcomes), dtype=np.int64)) @ outcomes.astype(np.int64)
        _, first, counts = np.unique(codes, return_index=True, return_counts=True)
        return outcomes[:, first], counts

    def patterns(self, cells: Sequence[Cell]) -> Patterns | None:
        """Return how often four cells have each combination of outcomes, to draw studies from.

        None for several runs, groups of questions or shares: one question says too little there.
        """
        if len(self.runs) > 1 or self.clusters is not None:
            return None
        outcomes, counts = self._combinations
        if not is_binary(outcomes):
            return None
        of_cells = outcomes[[self._order.index(cell) for cell in cells]]
        return Patterns(of_cells, counts / counts.sum())

    def each_run(self) -> list["Questions"]:
        """Return the outcomes of each of several runs alone; none for a single run."""
        if len(self.runs) == 1:
            return []
        runs = []
        for index, label in enumerate(self.runs):
            cells = {cell: (outcomes[index],) for cell, outcomes in self.cells.items()}
            groups = self.groups[index]
            runs.append(replace(self, runs=(label,), cells=cells, groups=(groups,), n=groups.size))
        return runs

    @property
    def effective_clusters(self) -> float | None:
        """How many groups of equal size would be as informative as these; None if questions are independent."""
        if self.clusters is None:
            return None
        groups = np.concatenate(self.groups)
        return stats.Groups.of(groups, len(groups)).effective

    def mcnemar(self, a: Cell, b: Cell) -> float | None:
        """Return McNemar's exact p of two cells.

        None for several runs, samples or groups of questions, and for partial credit, where it is not defined.
        """
        if self.partial or len(self.runs) > 1 or self.clusters is not None:
            return None
        if max(self.samples[a], self.samples[b]) > 1:
            return None
        return stats.mcnemar(self.cells[a][0], self.cells[b][0])

    def bootstrap(self, weights: Mapping[Cell, float]) -> Estimate | None:
        """Return the contrast by resampling questions; None for several runs, since that leaves out run effects."""
        if len(self.runs) > 1:
            return None
        outcomes = [self.cells[cell][0] for cell in weights]
        return stats.bootstrap(outcomes, list(weights.values()), self._clusters, seed=BOOTSTRAP_SEED)

    @property
    def _clusters(self) -> np.ndarray | None:
        return None if self.clusters is None else self.groups[0]

    def _rate(self, cell: Cell, values: Sequence[np.ndarray]) -> Estimate:
        if len(self.runs) == 1:
            return stats.rate(values[0], self._clusters)
        return stats.rate_over_runs(values, self.groups, self.runs, self.n, vary=cell[0] != BASE)
