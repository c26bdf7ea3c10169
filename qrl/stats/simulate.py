"""How often a study of a given size comes to a verdict, by drawing such studies and judging them by the verdict's rule.

All that a verdict needs of a question are the outcomes of four cells: sixteen combinations. A study of n questions is
one draw of how often each occurs, so that a thousand studies take seconds at any n. Formulas from normal distributions
fail where few answers change, where the bounds are exact ones.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike

from qrl.stats.contrasts import contrast
from qrl.stats.estimate import Estimate
from qrl.stats.shares import Share

BASE, TRAINED, BASE_Q, TRAINED_Q = range(4)
STUDIES = 400  # drawn for each n: a probability of 0.8 has a Monte Carlo error of 0.02
FIRST_STUDIES = 50  # enough to see that a probability is far from the wanted one
FAR = 3.0  # Monte Carlo errors
POWER = 0.80  # of an n that decides

Number = TypeVar("Number", int, float)
Weights = tuple[float, float, float, float]  # of the four cells
Contrasts = Callable[[Weights], Estimate]  # of one study: the weighted sum of its cells' accuracies
Study = Callable[[np.random.Generator, int], Contrasts]  # draws a study of n questions
Claim = Callable[[Contrasts], bool]


@dataclass(frozen=True)
class Patterns:
    """How often the four cells of a verdict have each combination of outcomes on a question.

    Attributes:
        outcomes: (4, k) of base and trained at full precision, then of both under the scheme; in 0..1.
        probabilities: (k,) of the combinations, which add up to 1.
    """

    outcomes: np.ndarray
    probabilities: np.ndarray

    @classmethod
    def of(cls, outcomes: ArrayLike) -> Patterns:
        """Return the combinations in (4, n) outcomes of a study."""
        columns, counts = np.unique(np.asarray(outcomes, dtype=float), axis=1, return_counts=True)
        return cls(columns, counts / counts.sum())

    def changes(self, n: float) -> float:
        """Return how many of n questions change between full precision and the scheme, in either cell."""
        base, trained, base_q, trained_q = self.outcomes
        changed = (base != base_q) | (trained != trained_q)
        return n * float(self.probabilities[changed].sum())

    def study(self, rng: np.random.Generator, n: int) -> Contrasts:
        """Draw a study of n questions."""
        counts = rng.multinomial(n, self.probabilities)
        occurred = counts > 0
        outcomes = self.outcomes[:, occurred]
        repeats = counts[occurred]
        return lambda weights: contrast(outcomes, weights, counts=repeats)


def share_of_gain(of_cells: Contrasts) -> Share:
    """Return the gain under a scheme as a part of the gain at full precision.

    Args:
        of_cells: weights of base, trained, base under the scheme, trained under it → their weighted sum.
    """
    return Share(
        part=of_cells((0, 0, -1, 1)),
        whole=of_cells((-1, 1, 0, 0)),
        difference=of_cells((1, -1, -1, 1)),
        excess_over=lambda share: of_cells((share, -share, -1, 1)),
    )


def is_likely(study: Study, claim: Claim, n: int, power: float, *, studies: int = STUDIES, seed: int = 0) -> bool:
    """Return whether a study of n questions shows a claim with this probability; a few draws may settle it.

    Args:
        study, claim: what is drawn, and what it must show.
        n: questions.
        power: wanted probability.
        studies: most draws.
        seed: of the draws. One seed for all n keeps the random differences between sizes small.
    """
    rng = np.random.default_rng(seed)
    successes = 0
    draws = 0
    while draws < studies:
        successes += sum(claim(study(rng, n)) for _ in range(FIRST_STUDIES))
        draws += FIRST_STUDIES
        error = math.sqrt(power * (1 - power) / draws)
        if abs(successes / draws - power) > FAR * error:
            break
    return successes >= power * draws


def two_digits(first: float, last: float) -> list[float]:
    """Return all numbers with two significant digits above `first`, up to `last`. Simulation finds none more exactly.

    Args:
        first, last: above 0.
    """
    numbers = []
    for exponent in range(math.floor(math.log10(first)) - 1, math.ceil(math.log10(last))):
        numbers += [float(f"{digits}e{exponent}") for digits in range(10, 100)]
    return [number for number in numbers if first < number <= last]


def first_of(candidates: Sequence[Number], holds: Callable[[Number], bool]) -> Number | None:
    """Return the first of the candidates for which a monotone condition holds; None if none does."""
    index = bisect_left(candidates, True, key=holds)
    return candidates[index] if index < len(candidates) else None


def least_questions(
    study: Study, claim: Claim, first: int, last: int, *, power: float = POWER, studies: int = STUDIES
) -> int | None:
    """Return how many questions show a claim with the wanted probability.

    Args:
        study, claim, power, studies: as for `is_likely`.
        first, last: where to look.

    Returns:
        `first`, or n with two significant digits; None if none up to `last` has this probability.
    """
    sizes = [first, *(number for number in two_digits(first, last) if number == round(number))]
    n = first_of(sizes, lambda n: is_likely(study, claim, round(n), power, studies=studies))
    return None if n is None else round(n)


def questions_to_decide(patterns: Patterns, word_of: Callable[[Share], str], first: int, last: int) -> int | None:
    """Return a number of questions from `first` to `last` at which a verdict other than `inconclusive` comes.

    Returns:
        As `least_questions`.
    """

    def decides(of_cells: Contrasts) -> bool:
        return word_of(share_of_gain(of_cells)) != "inconclusive"

    return least_questions(patterns.study, decides, first, last)
