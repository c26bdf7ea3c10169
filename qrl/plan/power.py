"""The probability that a study of a given size reaches its verdict, by the rule of `verdict.judge` itself.

Studies are drawn as the assumptions expect them (`Assumptions.patterns`), and each is judged. So a plan has every part
of the verdict's rule: exact bounds where few answers change, a margin that is estimated from the gain, and several
training runs. Where an n is computed, its probability has a Monte Carlo error of about 0.016; with several runs, 0.023.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from qrl.plan.assumptions import Assumptions
from qrl.stats.contrasts import contrast, limits
from qrl.stats.estimate import Estimate, Runs
from qrl.stats.simulate import (
    TRAINED,
    TRAINED_Q,
    Claim,
    Contrasts,
    Patterns,
    Weights,
    is_likely,
    least_questions,
    share_of_gain,
)
from qrl.stats.verdict import WORDS, Gains, Word

LEAST_QUESTIONS = 10
MOST_QUESTIONS = 10**7
STUDIES = 600  # drawn where an n is computed
STUDIES_OF_RUNS = 300  # the same of several training runs, which take longer to judge
# Weights of the cells: base, trained, and both under the scheme.
GAIN = (-1, 1, 0, 0)
SURVIVAL = (1, -1, -1, 1)
TYPICAL = 200  # studies; the median of their intervals is typical


@dataclass(frozen=True)
class Studies:
    """Studies that are expected, to draw from.

    Attributes:
        assumed: `checked`.
        seeds: training runs; 1 is about that run alone, without the spread between runs.
    """

    assumed: Assumptions
    seeds: int = 1

    @property
    def count(self) -> int:
        """How many are drawn where an n is computed."""
        return STUDIES if self.seeds == 1 else STUDIES_OF_RUNS

    @cached_property
    def patterns(self) -> Patterns:
        return self.assumed.patterns()

    def draw(self, rng: np.random.Generator, n: int) -> Contrasts:
        """Draw one study with n questions of each training run."""
        if self.seeds == 1:
            return self.patterns.study(rng, n)
        sets = self.seeds if self.assumed.own_questions else 1
        counts = rng.multinomial(n, self.patterns.probabilities, size=sets)
        return _OverRuns(self.patterns.outcomes, counts, self._run_effects(rng)).contrast

    def _run_effects(self, rng: np.random.Generator) -> np.ndarray:
        """Return (seeds, 4) what each run adds to the accuracy of each cell."""
        gains = rng.normal(scale=self.assumed.between_gain, size=self.seeds)
        survivals = rng.normal(scale=self.assumed.between_survival, size=self.seeds)
        effects = np.zeros((self.seeds, 4))
        effects[:, TRAINED] = gains
        effects[:, TRAINED_Q] = gains + survivals
        return effects


def shows_gain(of_cells: Contrasts) -> bool:
    """Return whether the 95 % interval of the full-precision gain is above 0."""
    return of_cells(GAIN).low > 0


def shows_loss(of_cells: Contrasts) -> bool:
    """Return whether the 95 % interval of gain survival is below 0."""
    return of_cells(SURVIVAL).high < 0


def gives(verdict: Word, margin: float | None) -> Claim:
    """Return the claim that a study comes to this verdict."""
    return lambda of_cells: Gains(share_of_gain(of_cells), margin).word() == verdict


@dataclass(frozen=True)
class _OverRuns:
    """One study of several training runs, as `stats.contrast_over_runs` sees it.

    Attributes:
        outcomes: (4, k) combinations of the cells' outcomes.
        counts: (runs, k) how many questions of each run have each combination, or (1, k) if all share their questions.
        effects: (runs, 4) what each run adds to the accuracies.
    """

    outcomes: np.ndarray
    counts: np.ndarray
    effects: np.ndarray

    def contrast(self, weights: Weights) -> Estimate:
        """Return a weighted sum of cells' accuracies, averaged over runs."""
        values = np.asarray(weights) @ self.outcomes
        n = int(self.counts[0].sum())
        question_means = self.counts @ values / n
        question_variance = float((self.counts @ values**2 / n - question_means**2).mean()) / (n - 1)
        run_means = question_means + self.effects @ np.asarray(weights)
        run_variance = float(run_means.var(ddof=1))

        # All questions as if they were of one run: bounds are exact there, where few answers change.
        totals = self.counts.sum(axis=0)
        occurs = totals > 0
        pooled = contrast(self.outcomes[:, occurs], weights, counts=totals[occurs])

        own_variance = question_variance  # of questions that each run has for itself: it shrinks with more runs
        shared_variance = 0.0
        if len(self.counts) == 1:
            own_variance = 0.0
            shared_variance = question_variance
        if max(run_variance, question_variance) < 1e-24:
            shared_variance = pooled.stderr**2

        labels = ("",) * len(run_means)
        runs = Runs(labels, (), run_variance, own_variance, shared_variance, pooled)
        mean = float(run_means.mean())
        degrees_of_freedom = len(run_means) - 1
        return Estimate(
            mean, runs.stderr, 0, 0, int(totals.sum()), degrees_of_freedom, runs, None, *limits(weights)
        ).bounded()


@dataclass(frozen=True)
class Chances:
    """Probabilities of what a study shows.

    Attributes:
        shown: that the 95 % interval of the full-precision gain is above 0.
        words: verdict → its probability.
    """

    shown: float
    words: dict[Word, float]


def chances(assumed: Assumptions, n: int, seeds: int = 1, *, studies: int | None = None) -> Chances:
    """Return what studies of n questions show, and how often.

    Args:
        assumed: the study that is expected, `checked`.
        n: questions of every training run.
        seeds: training runs; 1 is about that run alone, without the spread between runs.
        studies: number of draws; None for twice as many as where an n is computed.
    """
    planned = Studies(assumed, seeds)
    rng = np.random.default_rng(0)
    studies = studies or 2 * planned.count
    gains_of_studies = [Gains(share_of_gain(planned.draw(rng, n)), assumed.margin) for _ in range(studies)]
    verdicts = Counter(gains.word() for gains in gains_of_studies)
    gains_shown = sum(gains.is_shown for gains in gains_of_studies)
    return Chances(gains_shown / studies, {word: verdicts[word] / studies for word in WORDS})


def questions(assumed: Assumptions, seeds: int, claim: Claim, power: float) -> int | None:
    """Return how many questions of each run show a claim with this probability; None if no number does."""
    planned = Studies(assumed, seeds)
    return least_questions(planned.draw, claim, LEAST_QUESTIONS, MOST_QUESTIONS, power=power, studies=planned.count)


def is_shown_often(assumed: Assumptions, n: int, seeds: int, claim: Claim, power: float) -> bool:
    """Return whether studies of n questions show a claim with this probability."""
    planned = Studies(assumed, seeds)
    return is_likely(planned.draw, claim, n, power, studies=planned.count // 2)


def half_widths(assumed: Assumptions, n: int, seeds: int) -> tuple[float, float]:
    """Return the typical half-widths of the 95 % intervals of gain and gain survival: medians over studies."""
    planned = Studies(assumed, seeds)
    rng = np.random.default_rng(0)
    gains = []
    survivals = []
    for _ in range(TYPICAL):
        of_cells = planned.draw(rng, n)
        gains.append(of_cells(GAIN))
        survivals.append(of_cells(SURVIVAL))
    return _half_width(gains), _half_width(survivals)


def _half_width(estimates: list[Estimate]) -> float:
    return float(np.median([(estimate.high - estimate.low) / 2 for estimate in estimates]))
