"""Contrasts of cells of one task, over the seeds that all of them have: in points, as shares kept, in log-odds.

A cell is a variant under a scheme. Cells of different parts of the study were run under different seeds, so each
contrast uses the seeds that its own cells share. It is paired by question, over seeds (random) and questions.
"""

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[4]))

import pandas as pd

from qrl import names, stats
from qrl.compare.evidence import Questions
from qrl.compare.outcomes import Answered
from qrl.stats import Estimate, Share

BASE, GRPO, SFT, FULL = names.BASE, names.GRPO, names.SFT, names.FULL
SEEN = (0, 1)  # seeds that were seen before the design; no contrast uses them
CALIBRATED = (names.AWQ_CT, names.GPTQ, names.GPTQ_INT3, names.GPTQ_INT2)  # a seed draws their calibration set
LEAST = 0.01  # accuracy of the other variant under a scheme, below which a ratio is not tested
Cell = tuple[str, str]  # variant, scheme
Weights = Mapping[Cell, float]


class Evidence:
    """The answers of one task.

    Attributes:
        seeds: cell → the seeds under which it was evaluated, without those of SEEN.
    """

    def __init__(self, frame: pd.DataFrame, *, one_base: bool = True) -> None:
        """Sort answers by cell.

        Args:
            frame: a row each: seed, variant, scheme, question, correct.
            one_base: whether the base is the same model under every seed.
        """
        new = frame[~frame["seed"].isin(SEEN)]
        self._one_base = one_base
        keys = [new["variant"].astype(str), new["scheme"].astype(str)]
        self._rows: dict[Cell, pd.DataFrame] = {(str(v), str(q)): rows for (v, q), rows in new.groupby(keys)}
        self.seeds = {cell: tuple(sorted(rows["seed"].unique())) for cell, rows in self._rows.items()}
        self._aligned: dict[frozenset[Cell], Questions] = {}

    @property
    def cells(self) -> set[Cell]:
        """All cells."""
        return set(self._rows)

    def shared(self, cells: Iterable[Cell]) -> tuple[int, ...]:
        """Return the seeds that all of these cells have; none if a cell is missing."""
        seeds = [set(self.seeds.get(cell, ())) for cell in cells]
        return tuple(sorted(set.intersection(*seeds))) if seeds else ()

    def contrast(self, weights: Weights) -> Estimate | None:
        """Return a weighted sum of accuracies; None if the cells share no seed."""
        if not self.shared(weights):
            return None
        vary = not self._one_base or any(variant != BASE or scheme in CALIBRATED for variant, scheme in weights)
        aligned = self._align(weights)
        return aligned.contrast({_alone(cell): weight for cell, weight in weights.items()}, vary=vary)

    def accuracy(self, cell: Cell) -> Estimate | None:
        """Return a cell's accuracy; None if it was not evaluated."""
        return self.contrast({cell: 1.0})

    def by_seed(self, cell: Cell) -> dict[int, float]:
        """Return a cell's accuracy under each seed."""
        rows = self._rows.get(cell)
        return {} if rows is None else rows.groupby("seed")["correct"].mean().to_dict()

    def asked(self, cell: Cell) -> dict[int, int]:
        """Return how many questions a cell was asked under each seed."""
        rows = self._rows.get(cell)
        return {} if rows is None else rows.groupby("seed").size().to_dict()

    def _align(self, cells: Iterable[Cell]) -> Questions:
        """Return the outcomes of cells, each as a variant of its own."""
        cells = tuple(cells)
        key = frozenset(cells)
        if key not in self._aligned:
            seeds = self.shared(cells)
            parts = [self._rows[cell].assign(variant=_alone(cell)[0], scheme=FULL) for cell in cells]
            rows = pd.concat(parts, ignore_index=True)
            rows = rows[rows["seed"].isin(seeds)]
            first = rows[rows["variant"] == _alone(cells[0])[0]].assign(variant=BASE)  # a table has one base
            self._aligned[key] = Answered(pd.concat([first, rows], ignore_index=True)).outcomes
        return self._aligned[key]


def _alone(cell: Cell) -> Cell:
    """Return a cell under a name that is a variant's."""
    return "+".join(cell), FULL


def loss(variant: str, scheme: str, weight: float = 1.0) -> dict[Cell, float]:
    """Return what quantization costs a variant: full precision minus the scheme."""
    return {(variant, FULL): weight, (variant, scheme): -weight}


def loss_over(variant: str, other: str, scheme: str) -> dict[Cell, float]:
    """Return loss(other) − loss(variant): below 0 if the variant loses more. Beside the base it is gain survival."""
    return loss(other, scheme) | loss(variant, scheme, -1.0)


@dataclass(frozen=True)
class Comparison:
    """What a scheme costs a variant and another one.

    Attributes:
        points: loss(other) − loss(variant).
        log_ratio: logarithm of `ratio`, whose p-value is tested.
        ratio: of accuracy kept, variant / other.
        log_odds: change of the variant's log-odds minus that of the other's.
        least: the other's accuracy under the scheme.
    """

    variant: str
    other: str
    scheme: str
    seeds: tuple[int, ...]
    points: Estimate
    log_ratio: Estimate
    ratio: Estimate
    log_odds: Estimate
    least: float

    @property
    def p_points(self) -> float:
        """P-value of "the loss is the same", in points."""
        return self.points.p_two_sided

    @property
    def p_ratio(self) -> float | None:
        """P-value of "the share kept is the same"; None where the other keeps too little."""
        return None if self.least < LEAST else self.log_ratio.p_two_sided


def compare(evidence: Evidence, variant: str, other: str, scheme: str) -> Comparison | None:
    """Return what a scheme costs a variant and another; None if the four cells share no seed."""
    cells = ((variant, scheme), (variant, FULL), (other, scheme), (other, FULL))
    seeds = evidence.shared(cells)
    if not seeds:
        return None
    means = [_mean(evidence.by_seed(cell), seeds) for cell in cells]
    points = evidence.contrast(loss_over(variant, other, scheme))
    n = points.n

    def weighted(weights: Sequence[float]) -> Estimate:
        return evidence.contrast(dict(zip(cells, weights, strict=True)))

    ratio = stats.ratio_of_shares(means, weighted, n)
    # The same linear terms as in `ratio_of_shares`, as one estimate that has its seeds and so a p-value.
    terms = [sign / max(mean, 0.5 / n) for sign, mean in zip((1, -1, -1, 1), means, strict=True)]
    log_ratio = replace(weighted(terms), estimate=math.log(ratio.estimate), minimum=-math.inf, maximum=math.inf)
    log_odds = stats.difference_in_log_odds(means, weighted, n)
    return Comparison(variant, other, scheme, seeds, points, log_ratio.bounded(), ratio, log_odds, means[2])


def of_one_seed(evidence: Evidence, found: Comparison, seed: int) -> tuple[float, float, float]:
    """Return points, ratio and difference in log-odds of one seed; nan where a logarithm is not defined."""
    cells = ((found.variant, found.scheme), (found.variant, FULL), (found.other, found.scheme), (found.other, FULL))
    kept, full, other_kept, other_full = (evidence.by_seed(cell)[seed] for cell in cells)
    points = (kept - full) - (other_kept - other_full)
    ratio = (kept / full) / (other_kept / other_full) if full and other_kept else math.nan
    odds = [math.log(rate / (1 - rate)) if 0 < rate < 1 else math.nan for rate in (kept, full, other_kept, other_full)]
    return points, ratio, (odds[0] - odds[1]) - (odds[2] - odds[3])


def gain_kept(evidence: Evidence, variant: str, scheme: str) -> Estimate | None:
    """Return the share of the gain over the base that is kept; None if it is not defined."""
    quantized = {(variant, scheme): 1.0, (BASE, scheme): -1.0}
    full = {(variant, FULL): 1.0, (BASE, FULL): -1.0}
    return _share(evidence, quantized, full)


def accuracy_kept(evidence: Evidence, variant: str, scheme: str) -> Estimate | None:
    """Return accuracy under the scheme / at full precision; None if it is not defined."""
    return _share(evidence, {(variant, scheme): 1.0}, {(variant, FULL): 1.0})


def _share(evidence: Evidence, part: Weights, whole: Weights) -> Estimate | None:
    if not evidence.shared((*part, *whole)):
        return None
    common = {cell: 0.0 for cell in (*part, *whole)}  # so that all contrasts have the same seeds

    def less(share: float) -> Estimate:
        return evidence.contrast(common | dict(part) | {cell: -share * weight for cell, weight in whole.items()})

    found = Share(evidence.contrast(common | dict(part)), evidence.contrast(common | dict(whole)), less(1.0), less)
    return found.kept


def _mean(by_seed: Mapping[int, float], seeds: Sequence[int]) -> float:
    return sum(by_seed[seed] for seed in seeds) / len(seeds)
