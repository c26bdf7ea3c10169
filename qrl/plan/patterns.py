"""How often a question has each combination of outcomes in four cells, from accuracies and correlations.

A verdict depends on more than accuracies: twenty answers that turn wrong are not twenty-five that turn wrong and five
that turn right. Given moments leave some freedom, and the distribution taken is the one nearest to a reference: equal
chances for all sixteen combinations, or a pilot's own. Combinations that a pilot never had do not occur then.
"""

import math
from dataclasses import dataclass

import numpy as np

from qrl.stats.simulate import Patterns

# The sixteen combinations of four outcomes, right (1) or wrong (0), each equally often: the bits of 0 to 15.
ALL = Patterns(np.array([(np.arange(16) >> cell) & 1 for cell in range(4)], dtype=float), np.ones(16) / 16)
NEWTON_STEPS = 200
CONVERGED = 1e-14  # half the squared Newton step, in the metric of the curvature


@dataclass(frozen=True)
class Moment:
    """The mean over questions of a product of cells' outcomes.

    Attributes:
        cells: one for its accuracy, two for how often both are right.
        value: the required mean.
        slack: how readily it gives way if no questions have all moments; 0 is never.
    """

    cells: tuple[int, ...]
    value: float
    slack: float


def nearest(reference: Patterns, moments: list[Moment]) -> Patterns:
    """Return the distribution with these moments that is nearest to the reference.

    If none has them all, those with the most slack are missed by the least.

    Source: the distribution of least Kullback-Leibler divergence under moment constraints, Csiszár, Ann. Probab. 3
        (1975) 146: an exponential tilt of the reference. Its dual has a ridge here, so that a solution always exists
        (Altun and Smola, COLT 2006).
    """
    features = np.array([reference.outcomes[list(moment.cells)].prod(axis=0) for moment in moments])
    required = np.array([moment.value for moment in moments])
    slack = np.array([moment.slack for moment in moments])
    log_reference = np.log(np.maximum(reference.probabilities, 1e-300))

    def dual(tilt: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the objective and the probabilities at a tilt."""
        logits = log_reference + tilt @ features
        largest = logits.max()
        weights = np.exp(logits - largest)
        total = weights.sum()
        objective = largest + math.log(total) - float(tilt @ required) + 0.5 * float(slack @ tilt**2)
        return objective, weights / total

    tilt = np.zeros(len(moments))
    objective, probabilities = dual(tilt)
    for _ in range(NEWTON_STEPS):
        means = features @ probabilities
        gradient = means - required + slack * tilt
        curvature = (features * probabilities) @ features.T - np.outer(means, means) + np.diag(slack + 1e-13)
        step = np.linalg.solve(curvature, gradient)
        decrement = float(gradient @ step) / 2
        if decrement < CONVERGED:
            break
        size = 1.0  # halved until the objective falls as far as its slope promises (Armijo's rule)
        while size > 1e-10:
            next_tilt = tilt - size * step
            next_objective, next_probabilities = dual(next_tilt)
            if next_objective < objective - 0.1 * size * decrement:
                break
            size /= 2
        else:
            break
        tilt = next_tilt
        objective = next_objective
        probabilities = next_probabilities
    return Patterns(reference.outcomes, probabilities)


def correlation(patterns: Patterns, a: int, b: int) -> float | None:
    """Return Pearson's correlation of two cells' outcomes; None if one of them never varies."""
    rates = patterns.outcomes @ patterns.probabilities
    centred = patterns.outcomes - rates[:, None]
    covariance = (centred * patterns.probabilities) @ centred.T
    variances = covariance[a, a] * covariance[b, b]
    if variances <= 1e-18:
        return None
    return float(covariance[a, b] / math.sqrt(variances))
