"""How often a study of a given size comes to a verdict, by drawing such studies and judging them by the verdict's rule.

All that a verdict needs of a question are the outcomes of four cells: sixteen combinations. A study of n questions is
one draw of how often each occurs, so that a thousand studies take seconds at any n. Formulas from normal distributions
fail where few answers change, where the bounds are exact ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import ArrayLike

from qrl.stats.contrasts import contrast
from qrl.stats.estimate import Estimate
from qrl.stats.shares import Share

BASE, TRAINED, BASE_Q, TRAINED_Q = range(4)
STUDIES = 400  # drawn for each n: a probability of 0.8 has a Monte Carlo error of 0.02
POWER = 0.80
_DIGITS = 2  # of an n that decides: it is no more precise


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

    def share(self, counts: np.ndarray) -> Share:
        """Return the gain under the scheme as a part of the gain at full precision.

        Args:
            counts: (k,) how many questions have each combination.
        """
        seen = counts > 0
        of_cells = partial(contrast, self.outcomes[:, seen], counts=counts[seen])
        return share_of_gain(lambda weights: of_cells(weights=weights))

    def chance(self, word_of: Callable[[Share], str], words: set[str], n: int, *, seed: int = 0) -> float:
        """Return the share of drawn studies of n questions that come to one of the verdicts.

        Args:
            word_of: the rule.
            words: verdicts that count.
            n: questions.
            seed: of the draws.
        """
        draws = np.random.default_rng(seed).multinomial(n, self.probabilities, size=STUDIES)
        studies, repeats = np.unique(draws, axis=0, return_counts=True)
        found = [word_of(self.share(counts)) in words for counts in studies]
        return float(np.average(found, weights=repeats))


def share_of_gain(of_cells: Callable[[tuple[float, float, float, float]], Estimate]) -> Share:
    """Return the gain under a scheme as a part of the gain at full precision.

    Args:
        of_cells: weights of base, trained, base under the scheme, trained under it → their weighted sum.
    """
    return Share(
        part=of_cells((0, 0, -1, 1)),
        whole=of_cells((-1, 1, 0, 0)),
        difference=of_cells((1, -1, -1, 1)),
        less=lambda share: of_cells((share, -share, -1, 1)),
    )


def questions_to_decide(patterns: Patterns, word_of: Callable[[Share], str], first: int, last: int) -> int | None:
    """Return a number of questions from `first` to `last` at which a verdict other than `inconclusive` comes.

    Returns:
        n with two significant digits, with a probability of `POWER`; None if none up to `last` has it.
    """
    decided = {"lost", "survives", "reduced"}

    def decides(n: int) -> bool:
        return patterns.chance(word_of, decided, n) >= POWER

    low, high = first, first
    while not decides(high):
        if high >= last:
            return None
        low, high = high, min(2 * high, last)
    while high - low > 10 ** max(0, len(str(high)) - _DIGITS):
        middle = (low + high) // 2
        low, high = (low, middle) if decides(middle) else (middle, high)
    return high
