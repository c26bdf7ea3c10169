"""Two variants' accuracies under a scheme, on scales other than points: as a ratio of shares kept, and in log-odds.

A variant with a higher accuracy has more points to lose. As a share of its accuracy it may lose less. Which of the two
is meant by "more fragile" is the reader's choice, so a comparison needs both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from qrl.stats.estimate import Estimate

SIGNS = (1.0, -1.0, -1.0, 1.0)  # of trained under q, trained, base under q, base
_LARGEST = 700.0  # exponent of a float


def ratio_of_shares(accuracies: Sequence[float], contrast: Callable[[Sequence[float]], Estimate], n: int) -> Estimate:
    """Return (trained_q / trained) / (base_q / base): above 1 if the trained variant keeps more of its accuracy.

    Args:
        accuracies: (4,) of trained under q, trained, base under q, base.
        contrast: weights of the four cells → weighted sum of their accuracies.
        n: questions.

    Source: delta method for the logarithm, with derivative 1/p, and the bounds of `contrasts`.
    """
    rates = [_inside(rate, n) for rate in accuracies]
    logarithm = sum(sign * math.log(rate) for sign, rate in zip(SIGNS, rates, strict=True))
    change = _around(logarithm, contrast([sign / rate for sign, rate in zip(SIGNS, rates, strict=True)]))
    estimate = _exponential(change.estimate)
    return Estimate(estimate, estimate * change.stderr, _exponential(change.low), _exponential(change.high), n)


def difference_in_log_odds(
    accuracies: Sequence[float], contrast: Callable[[Sequence[float]], Estimate], n: int
) -> Estimate:
    """Return the change of the trained variant's log-odds under q minus the base's: above 0 if it loses less.

    Args:
        accuracies, contrast, n: as for `ratio_of_shares`.

    Source: delta method for the logit, with derivative 1/(p(1 − p)), and the bounds of `contrasts`.
    """
    rates = [_inside(rate, n) for rate in accuracies]
    change = sum(sign * math.log(rate / (1 - rate)) for sign, rate in zip(SIGNS, rates, strict=True))
    weights = [sign / (rate * (1 - rate)) for sign, rate in zip(SIGNS, rates, strict=True)]
    return _around(change, contrast(weights))


def _inside(rate: float, n: int) -> float:
    """Return a rate that has a logarithm: with none or all of n right, half an answer is added on either side.

    Source: Haldane, Ann. Hum. Genet. 20 (1956) 309.
    """
    return rate if 0 < rate < 1 else (rate * n + 0.5) / (n + 1)


def _exponential(logarithm: float) -> float:
    """Return e to this power, or the largest one that a float can hold."""
    return math.exp(min(logarithm, _LARGEST))


def _around(centre: float, error: Estimate) -> Estimate:
    """Return an estimate with the error of another number."""
    low = centre - (error.estimate - error.low)
    high = centre + (error.high - error.estimate)
    return Estimate(centre, error.stderr, low, high, error.n)
