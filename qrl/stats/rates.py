"""Shares of right answers: accuracy, accuracy in groups, pass@k."""

import math

import numpy as np
from numpy.typing import ArrayLike

from qrl.stats.contrasts import check_count, stderr_of_mean
from qrl.stats.estimate import TAIL, Estimate, quantile


def accuracy(correct: int, n: int) -> Estimate:
    """Return the share of right answers, with binomial standard error and Wilson interval.

    Args:
        correct: right answers, 0..n.
        n: questions.

    Raises:
        ValueError: n < 2, which supports no error bar, or `correct` outside 0..n.

    Source: Wilson, JASA 22 (1927) 209; the stderr is √(p(1 − p)/n), which is 0 at p = 0 and 1, where the interval is
        not.
    """
    check_count(correct, n)
    share = correct / n
    return _wilson(share, math.sqrt(share * (1 - share) / n), n, effective=n)


def rate(values: ArrayLike, clusters: ArrayLike | None = None) -> Estimate:
    """Return the mean of shares per question, with clustered stderr and Wilson's interval at the effective n.

    Args:
        values: (n,) in 0..1 per question: 0 or 1, the mean over a question's samples, or its pass@k.
        clusters: (n,) label of each question's group; None if questions are independent.

    Raises:
        ValueError: fewer than two questions or two groups, or a value outside 0..1.

    Source: Miller, arXiv 2411.00640, equation 4, with the correction of `clusters`, which is G/(G − 1) for G groups of
        equal size, so that groups of one give the usual error. Averaging a question's samples first is the same as
        clustering the samples by question. Effective n, shortened for the t distribution of few groups: Korn and
        Graubard, Survey Methodology 24 (1998) 193.
    """
    shares = np.asarray(values, dtype=float)
    if shares.size and not (shares.min() >= 0 and shares.max() <= 1):
        raise ValueError(f"Shares range from {shares.min()} to {shares.max()}: expected 0 to 1.")
    stderr, degrees, groups = stderr_of_mean(shares, clusters)
    return clustered(float(shares.mean()), stderr, len(shares), degrees, groups, binary=is_binary(shares))


def pass_at(k: int, correct: ArrayLike, samples: int) -> np.ndarray:
    """Return an unbiased estimate of the chance that at least one of k answers to a question is right.

    Args:
        k: answers that a user would draw, 1..samples.
        correct: (n,) right answers among each question's samples.
        samples: answers to each question.

    Returns:
        (n,) 1 − C(samples − c, k) / C(samples, k); its mean is pass@k, and `rate` gives the stderr over questions.

    Raises:
        ValueError: k outside 1..samples, or a count outside 0..samples.

    Source: Chen et al., arXiv 2107.03374, equation 1.
    """
    counts = np.asarray(correct)
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} cannot be estimated from {samples} samples: expected k from 1 to {samples}.")
    if counts.size and not (counts.min() >= 0 and counts.max() <= samples):
        actual = f"Right answers per question range from {counts.min()} to {counts.max()}"
        raise ValueError(f"{actual}: expected 0 to {samples}.")
    by_count = [1 - math.comb(samples - c, k) / math.comb(samples, k) for c in range(samples + 1)]
    return np.array(by_count)[counts.astype(int)]


def every_k(samples: int) -> list[int]:
    """Return the k of pass@k to report: 2, 4, 8 … and all samples; none for one sample."""
    if samples <= 1:
        return []
    powers_of_two = {2**i for i in range(1, samples.bit_length())}
    return sorted(powers_of_two | {samples})


def is_binary(shares: np.ndarray) -> bool:
    """Return whether every share is 0 or 1."""
    return bool(np.isin(shares, (0, 1)).all())


def clustered(share: float, stderr: float, n: int, degrees: float, groups: float, *, binary: bool) -> Estimate:
    """Return a share with Wilson's interval at the number of independent questions that would have this stderr.

    Args:
        degrees: of freedom of the stderr.
        groups: independent groups of questions, which count if all shares are equal.
        binary: whether outcomes are 0 or 1; the number of questions is then at most n.
    """
    effective = groups
    if stderr > 0:
        effective = share * (1 - share) / stderr**2 * (quantile(1 - TAIL) / quantile(1 - TAIL, degrees)) ** 2
        if binary:
            effective = min(effective, n)
    return _wilson(share, stderr, n, effective)


def _wilson(share: float, stderr: float, n: int, effective: float) -> Estimate:
    """Return a share with Wilson's interval at `effective` questions."""
    z = quantile(1 - TAIL)
    shrink = 1 + z**2 / effective
    centre = (share + z**2 / (2 * effective)) / shrink
    half_width = z / shrink * math.sqrt(share * (1 - share) / effective + z**2 / (4 * effective**2))
    low = max(0.0, centre - half_width)
    high = min(1.0, centre + half_width)
    # At shares of 0 and 1, rounding can put the ends on the wrong side of the share.
    return Estimate(share, stderr, min(low, share), max(high, share), n)
