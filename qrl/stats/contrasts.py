"""Contrasts: weighted sums of cells' accuracies, paired by question or from counts alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from qrl.stats.estimate import LEVEL, Estimate, quantile
from qrl.stats.tails import Tails

TAIL = (1 - LEVEL) / 2


def contrast(outcomes: ArrayLike, weights: Sequence[float], clusters: ArrayLike | None = None) -> Estimate:
    """Weighted sum of cells' accuracies over the same questions: per-question mean, its stderr and t interval.

    Where few questions give another value than all the others, or nearly all of those in one direction, the interval reaches
    further (`tails`). Where every question gives the same value the sample's own stderr is 0, which n questions cannot
    support: with none of n deviating, up to 1 − 0.025^(1/n) of all questions may (about 3.7/n), each by as much as the
    weights allow. The interval is then that, and the stderr the one that belongs to it.

    Args:
        outcomes: (cells, n) 0 or 1, or the share of a question's samples that are right; column j is the same question in
            every row.
        weights: (cells,) such as (1, −1) for a difference.
        clusters: (n,) label of each question's group, or None where questions are independent.

    Raises:
        ValueError: n < 2, fewer than two groups, or shapes that do not fit.

    Source: paired differences, Miller, arXiv 2411.00640, section 4; the bound at zero deviations is Clopper and Pearson's.
    """
    values, (least, most) = weighted(outcomes, weights), span(weights)
    mean = float(values.mean()) if values.size else math.nan
    stderr, groups = stderr_of_mean(values, clusters)
    tails = Tails.of(per_group(values, clusters), least, most)
    if stderr < 1e-12:
        stderr = max(mean - least, most - mean) * (1 - TAIL ** (1 / groups)) / quantile(1 - TAIL, groups - 1)
    return Estimate(mean, stderr, 0, 0, len(values), df=groups - 1, tails=tails, **limits(weights)).bounded()


def independent_contrast(correct: Sequence[int], n: Sequence[int], weights: Sequence[float]) -> Estimate:
    """Weighted sum of cells' accuracies from counts alone, as if every cell had questions of its own.

    Args:
        correct: (cells,) right answers.
        n: (cells,) questions asked.
        weights: (cells,) such as (1, −1) for a difference.

    Returns:
        Estimate with a normal interval; `n` is the smallest cell's. A cell with none or all right has no sample variance
        and takes Agresti and Coull's rate (two right and two wrong added) for its variance alone.

    Raises:
        ValueError: a cell with n < 2 or a count outside 0..n.

    Source: variances of independent binomial rates add, var = Σ w² p(1 − p)/n; Agresti and Coull, Am. Stat. 52 (1998) 119.
    """
    mean, variance = 0.0, 0.0
    for right, asked, weight in zip(correct, n, weights, strict=True):
        if asked < 2 or not 0 <= right <= asked:
            raise ValueError(f"{right} right of {asked} gives no accuracy: expected n >= 2 and 0 <= correct <= n.")
        mean += weight * right / asked
        rate = right / asked if 0 < right < asked else (right + 2) / (asked + 4)
        variance += weight**2 * rate * (1 - rate) / asked
    return Estimate(mean, math.sqrt(variance), 0, 0, min(n), **limits(weights)).bounded()


def bootstrap(
    outcomes: ArrayLike,
    weights: Sequence[float],
    clusters: ArrayLike | None = None,
    *,
    seed: int,
    samples: int = 10_000,
) -> Estimate:
    """The same contrast by resampling questions, all cells of a question together: a check of the closed form.

    Args:
        outcomes: (cells, n), as for `contrast`.
        weights: (cells,).
        clusters: (n,) label of each question's group; groups are then resampled whole.
        seed: of the resampling.
        samples: resampled studies.

    Returns:
        Estimate with the resamples' standard deviation as stderr and their percentiles as interval.

    Source: Efron, Ann. Stat. 7 (1979) 1. Few distinct values occur, so a resample is one multinomial draw of their counts.
    """
    values = weighted(outcomes, weights)
    sums, sizes = values, np.ones(len(values))
    if clusters is not None:
        _, group = np.unique(np.asarray(clusters), return_inverse=True)
        sums, sizes = np.bincount(group, weights=values), np.bincount(group).astype(float)
    kinds, counts = np.unique(np.stack([sums.round(12), sizes]), axis=1, return_counts=True)
    rng, means = np.random.default_rng(seed), []
    for size in [1000] * (samples // 1000) + [
        samples % 1000
    ]:  # a few MB at a time, where every question has a value of its own
        drawn = rng.multinomial(counts.sum(), counts / counts.sum(), size=size)
        means.append((drawn @ kinds[0]) / (drawn @ kinds[1]))
    means = np.concatenate(means)
    low, high = np.quantile(means, [TAIL, 1 - TAIL])
    return Estimate(float(values.mean()), float(means.std(ddof=1)), float(low), float(high), len(values))


def weighted(outcomes: ArrayLike, weights: Sequence[float]) -> np.ndarray:
    """(n,) weighted sum over cells, question by question."""
    outcomes, weights = np.asarray(outcomes, dtype=float), np.asarray(weights, dtype=float)
    if outcomes.ndim != 2 or weights.shape != outcomes.shape[:1]:
        raise ValueError(
            f"Outcomes of shape {outcomes.shape} do not fit {weights.shape} weights: expected (cells, n) and (cells,)."
        )
    return weights @ outcomes


def span(weights: Sequence[float]) -> tuple[float, float]:
    """The least and the most that a weighted sum of shares can be."""
    signs = np.asarray(weights, dtype=float)
    return float(signs[signs < 0].sum()), float(signs[signs > 0].sum())


def limits(weights: Sequence[float]) -> dict[str, float]:
    """What a difference can be, as an `Estimate` takes it; nothing for one cell, whose interval is `rates`' matter."""
    least, most = span(weights)
    return {"least": least, "most": most} if least < 0 else {}


def per_group(values: np.ndarray, clusters: ArrayLike | None) -> np.ndarray:
    """(groups,) each group's sum, scaled so that their mean is that of the values."""
    if clusters is None:
        return values
    _, group = np.unique(np.asarray(clusters), return_inverse=True)
    sums = np.bincount(group, weights=values)
    return sums * (len(sums) / len(values))


def stderr_of_mean(values: np.ndarray, clusters: ArrayLike | None) -> tuple[float, int]:
    """Standard error of the mean, and the number of independent groups behind it."""
    centred = values - values.mean() if values.size else values
    groups = len(values)
    if clusters is not None:
        labels = np.asarray(clusters)
        if labels.shape != values.shape:
            raise ValueError(
                f"{labels.shape} clusters do not fit {values.shape} questions: expected one label per question."
            )
        distinct, group = np.unique(labels, return_inverse=True)
        groups = len(distinct)
        centred = np.bincount(group, weights=centred, minlength=1)
    if groups < 2:
        raise ValueError(f"{len(values)} questions in {groups} groups give no error bar: expected at least 2 groups.")
    return math.sqrt(groups / (groups - 1) * float(centred @ centred)) / len(values), groups
