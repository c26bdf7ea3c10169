"""Contrasts: weighted sums of cells' accuracies, paired by question or from counts alone."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from qrl.stats.clusters import Groups
from qrl.stats.estimate import TAIL, Estimate, bounded_estimate, quantile
from qrl.stats.tails import Tails

MOST_KINDS = 256  # different sums that a bootstrap draws from


def contrast(
    outcomes: ArrayLike, weights: Sequence[float], clusters: ArrayLike | None = None, *, counts: ArrayLike | None = None
) -> Estimate:
    """Return a weighted sum of cells' accuracies over the same questions: per-question mean, stderr and t interval.

    The interval is wider than the t interval where few questions differ from the rest, or where nearly all of those
    differ in one direction (`tails`). If every question gives the same value, the sample's stderr is 0, which n
    questions cannot support: with none of n deviating, up to 1 − 0.025^(1/n) of all questions may (about 3.7/n), each
    by as much as the weights allow. That bound is then the interval, and the stderr is the one that matches it.

    Args:
        outcomes: (cells, n) 0 or 1, or the share of a question's samples that are right; column j is the same question
            in every row.
        weights: (cells,), such as (1, −1) for a difference.
        clusters: (n,) label of each question's group; None if questions are independent.
        counts: (n,) how many questions have the outcomes of a column; None if each column is one question. Not for
            clusters.

    Raises:
        ValueError: n < 2, fewer than two groups, or shapes that do not match.

    Source: paired differences, Miller, arXiv 2411.00640, section 4; bound at zero deviations, Clopper and Pearson.
    """
    values = weighted(outcomes, weights)
    minimum, maximum = _extremes(weights)
    groups = None if clusters is None else Groups.of(clusters, len(values))
    if groups and groups.sizes.max(initial=0) > 1:
        return clustered_contrast(values, groups, weights)

    # Equal values are counted, so that counts and single questions give the same digits.
    values, kind = np.unique(values, return_inverse=True)
    questions_of_column = None if counts is None else np.asarray(counts, dtype=float)
    repeats = np.bincount(kind, weights=questions_of_column).astype(float)
    n = round(float(repeats.sum()))
    _check_independent(n, n)
    mean = float(values @ repeats) / n
    stderr = math.sqrt(float(repeats @ (values - mean) ** 2) / (n - 1) / n)
    tails = Tails.of(values, repeats, minimum, maximum)
    if stderr < 1e-12:
        stderr = _unseen(mean, minimum, maximum, n) / quantile(1 - TAIL, n - 1)
    return bounded_estimate(mean, stderr, n, df=n - 1, tails=tails, limits=limits(weights))


def clustered_contrast(
    values: np.ndarray, groups: Groups, weights: Sequence[float], questions: int | None = None
) -> Estimate:
    """Return the contrast of weighted sums in groups that are independent of each other.

    The skewness is that of groups. Where few questions change, the bounds are at least as wide as those of independent
    questions.

    Args:
        values: (n,) weighted sums, as `weighted` returns them.
        groups: of the n values.
        weights: (cells,) of the sums.
        questions: how many of the values are different questions; None if all are. The answers of several runs to a
            question count once.

    Raises:
        ValueError: fewer than two groups.
    """
    minimum, maximum = _extremes(weights)
    n = len(values)
    if questions is None:
        questions = n
    _check_independent(n, len(groups.sizes))
    mean = float(values.mean())
    stderr = groups.stderr_of_mean(values)
    degrees = groups.degrees_of_freedom(values)
    tails = Tails.of(values, np.full(n, questions / n), minimum, maximum).of_groups(groups.sums(values - mean), n)
    if stderr < 1e-12:
        stderr = _unseen(mean, minimum, maximum, groups.effective) / quantile(1 - TAIL, degrees)
    return bounded_estimate(mean, stderr, questions, df=degrees, tails=tails, limits=limits(weights))


def _unseen(mean: float, minimum: float, maximum: float, n: float) -> float:
    """Return how far the true mean may be from one from which none of n values deviates."""
    return max(mean - minimum, maximum - mean) * (1 - TAIL ** (1 / n))


def _check_independent(n: int, groups: int) -> None:
    if groups < 2:
        raise ValueError(f"{n} questions in {groups} groups give no error bar: expected at least 2 groups.")


def relative_change(after: ArrayLike, before: ArrayLike) -> Estimate:
    """Return mean(after) / mean(before) − 1 over the same questions, with its interval.

    Args:
        after, before: (n,) one number at least 0 per question, such as tokens; `before` is not 0 everywhere.

    Raises:
        ValueError: n < 2.

    Source: the error of a ratio over questions, Cochran, Sampling Techniques, 3rd ed., equation 6.13, with the
        bounds of `contrast` for after − ratio · before.
    """
    numbers = np.stack([np.asarray(after, dtype=float), np.asarray(before, dtype=float)])
    mean_after, mean_before = numbers.mean(axis=1)
    ratio = mean_after / mean_before

    # `contrast` takes values in 0..1, so the numbers are divided by the largest one.
    largest = numbers.max()
    error = contrast(numbers / largest, (1, -ratio))
    return Estimate(
        estimate=float(ratio - 1),
        stderr=float(error.stderr * largest / mean_before),
        low=max(-1.0, float(ratio - 1 + error.low * largest / mean_before)),
        high=float(ratio - 1 + error.high * largest / mean_before),
        n=numbers.shape[1],
    )


def independent_contrast(correct: Sequence[int], n: Sequence[int], weights: Sequence[float]) -> Estimate:
    """Return a weighted sum of cells' accuracies from counts alone, as if each cell had its own questions.

    Args:
        correct: (cells,) right answers.
        n: (cells,) questions.
        weights: (cells,), such as (1, −1) for a difference.

    Returns:
        Estimate with a normal interval; its `n` is the smallest cell's. A cell with none or all right has no sample
        variance, so its variance comes from Agresti and Coull's rate (two right and two wrong answers added).

    Raises:
        ValueError: a cell has n < 2, or a count is outside 0..n.

    Source: variances of independent binomial rates add, var = Σ w² p(1 − p)/n; Agresti and Coull, Am. Stat. 52 (1998)
        119.
    """
    mean = 0.0
    variance = 0.0
    for count, size, weight in zip(correct, n, weights, strict=True):
        check_count(count, size)
        mean += weight * count / size
        rate = count / size if 0 < count < size else (count + 2) / (size + 4)
        variance += weight**2 * rate * (1 - rate) / size
    return bounded_estimate(mean, math.sqrt(variance), min(n), limits=limits(weights))


def bootstrap(
    outcomes: ArrayLike, weights: Sequence[float], clusters: ArrayLike | None = None, *, seed: int
) -> Estimate:
    """Return the same contrast by 10,000 resamples of questions, all cells of each together: checks the closed form.

    Args:
        outcomes, weights, clusters: as for `contrast`; groups are resampled whole.
        seed: of the resampling.

    Returns:
        Estimate with the standard deviation of the resamples as stderr and their percentiles as interval.

    Source: Efron, Ann. Stat. 7 (1979) 1. Few distinct values occur, so a resample is one multinomial draw of their
        counts.
    """
    values = weighted(outcomes, weights)
    if clusters is None:
        sums, counts = np.unique(_few_kinds(values).round(12), return_counts=True)
        sizes = np.ones(len(sums))
    else:
        groups = Groups.of(clusters, len(values))
        rounded_sums = _few_kinds(groups.sums(values)).round(12)
        kinds, counts = np.unique(np.stack([rounded_sums, groups.sizes.astype(float)]), axis=1, return_counts=True)
        sums, sizes = kinds

    rng = np.random.default_rng(seed)
    means = []
    for _ in range(10):  # chunks of a few MB if every question has its own value
        resamples = rng.multinomial(counts.sum(), counts / counts.sum(), size=1000)
        means.append((resamples @ sums) / (resamples @ sizes))
    resampled_means = np.concatenate(means)
    low, high = np.quantile(resampled_means, [TAIL, 1 - TAIL])
    return Estimate(float(values.mean()), float(resampled_means.std(ddof=1)), float(low), float(high), len(values))


def _few_kinds(sums: np.ndarray) -> np.ndarray:
    """Return the sums, or where nearly all differ, each at the nearest of `MOST_KINDS` even steps, with the same mean.

    A resample draws a number per kind: with graded scores of 20,000 questions, 10,000 resamples took half a minute. The
    steps add a variance of step²/12, far below what a check of the third decimal sees.
    """
    step = float(np.ptp(sums)) / (MOST_KINDS - 1)
    if len(sums) <= MOST_KINDS or len(np.unique(sums.round(12))) <= MOST_KINDS:
        return sums
    stepped = sums.min() + step * np.rint((sums - sums.min()) / step)
    return stepped + (sums.mean() - stepped.mean())


def check_count(correct: int, n: int) -> None:
    """Raise ValueError if `correct` of `n` answers give no accuracy with an error bar."""
    if n < 2 or not 0 <= correct <= n:
        raise ValueError(f"{correct} right of {n} gives no accuracy: expected n >= 2 and 0 <= correct <= n.")


def weighted(outcomes: ArrayLike, weights: Sequence[float]) -> np.ndarray:
    """Return the (n,) weighted sums over cells, question by question."""
    cells = np.asarray(outcomes, dtype=float)
    factors = np.asarray(weights, dtype=float)
    if cells.ndim != 2 or factors.shape != cells.shape[:1]:
        shapes = f"Outcomes of shape {cells.shape} do not match weights of shape {factors.shape}"
        raise ValueError(f"{shapes}: expected (cells, n) and (cells,).")
    return factors @ cells


def _extremes(weights: Sequence[float]) -> tuple[float, float]:
    """Return the least and the most that a weighted sum of shares can be."""
    least = sum(weight for weight in weights if weight < 0)
    most = sum(weight for weight in weights if weight > 0)
    return float(least), float(most)


def limits(weights: Sequence[float]) -> tuple[float, float]:
    """Return `_extremes` for a difference; no limits for a single cell, since `rates` makes the interval of those."""
    minimum, maximum = _extremes(weights)
    return (minimum, maximum) if minimum < 0 else (-math.inf, math.inf)


def stderr_of_mean(values: np.ndarray, clusters: ArrayLike | None) -> tuple[float, float, float]:
    """Return the standard error of the mean, its degrees of freedom, and the number of independent groups behind it."""
    n = len(values)
    if clusters is None:
        _check_independent(n, n)
        return float(np.std(values, ddof=1)) / math.sqrt(n), n - 1, n
    groups = Groups.of(clusters, n)
    _check_independent(n, len(groups.sizes))
    return groups.stderr_of_mean(values), groups.degrees_of_freedom(values), groups.effective
