"""Several training runs of one recipe: the run is a random effect, besides the questions.

A run's contrast is θ + aₛ + (its question error): θ is the recipe's value, aₛ the run's own effect. The errors of two
runs are correlated to the extent that they answered the same questions: all of them (crossed), none (nested), or some.
More runs do not reduce that shared part. The estimate of θ is the plain mean over runs, each counting once.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from qrl.stats.clusters import Groups
from qrl.stats.contrasts import clustered_contrast, contrast, limits, stderr_of_mean, weighted
from qrl.stats.estimate import Estimate, Runs, bounded_estimate
from qrl.stats.rates import clustered, is_binary


def contrast_over_runs(
    outcomes: Sequence[ArrayLike],
    weights: Sequence[float],
    groups: Sequence[ArrayLike],
    labels: Sequence[str],
    n: int,
    *,
    vary: bool = True,
) -> Estimate:
    """Return a contrast averaged over training runs, with the spread between runs in its error.

    Args:
        outcomes: per run s, (cells, n_s) in 0..1, column j being the same question in every row.
        weights: (cells,), such as (1, −1) for a difference.
        groups: per run, (n_s,) whole numbers that identify each question, or its group of questions; the same number in
            every run that answered it.
        labels: one label per run.
        n: distinct questions over all runs.
        vary: whether runs have weights of their own. False if all cells are the base's, which is one model under every
            seed: the error is then that of the questions, with the corrections of `contrast`.

    Returns:
        Estimate, with `runs` if they vary. If no question and no run deviates from any other, the error is the one that
        `contrast` gives in that case.

    Raises:
        ValueError: fewer than two runs, or shapes that do not match.

    Source: E[spread of the runs' estimates] = between + unshared, and the mean's variance = (between + unshared)/S +
        shared, by the method of moments; on the same questions this is Clark's (MS_runs + MS_questions −
        MS_residual)/(nS), J. Verbal Learning and Verbal Behavior 12 (1973) 335.
    """
    if len(outcomes) < 2 or not len(outcomes) == len(groups) == len(labels):
        lengths = f"Got {len(outcomes)} runs, {len(groups)} sets of groups and {len(labels)} labels"
        raise ValueError(f"{lengths}: expected the same number of each, at least 2.")
    values = [weighted(run, weights) for run in outcomes]
    unshared, shared = _question_variance(values, groups)
    means = [float(run.mean()) for run in values]
    mean = float(np.mean(means))
    pooled = _pooled(values, groups, weights, n)
    if not vary:
        stderr = math.sqrt(unshared / len(values) + shared)
        if stderr <= 1e-12:  # no question deviates, which n questions cannot support
            stderr = pooled.stderr
        return bounded_estimate(mean, stderr, n, df=pooled.df, tails=pooled.tails, limits=limits(weights))

    spread = float(np.var(means, ddof=1))
    if max(spread, unshared + shared) < 1e-24:
        shared = pooled.stderr**2
    each_run = [contrast(outcome, weights, group) for outcome, group in zip(outcomes, groups, strict=True)]
    runs = Runs(tuple(labels), tuple(each_run), spread, unshared, shared, pooled)
    return bounded_estimate(mean, runs.stderr, n, df=len(labels) - 1, runs=runs, limits=limits(weights))


def _pooled(values: Sequence[np.ndarray], groups: Sequence[ArrayLike], weights: Sequence[float], n: int) -> Estimate:
    """Return the contrast of all runs' answers as if one run gave them, clustered by question or group of questions."""
    all_values = np.concatenate(values)
    all_groups = Groups.of(np.concatenate(groups), len(all_values))
    return clustered_contrast(all_values, all_groups, weights, n)


def rate_over_runs(
    values: Sequence[ArrayLike], groups: Sequence[ArrayLike], labels: Sequence[str], n: int, *, vary: bool
) -> Estimate:
    """Return the mean of shares per question, averaged over training runs.

    Args:
        values: per run s, (n_s,) in 0..1 per question.
        groups, labels, n: as for `contrast_over_runs`.
        vary: as for `contrast_over_runs`; without it the interval is Wilson's.
    """
    shares = [np.asarray(run, dtype=float) for run in values]
    if vary:
        mean = contrast_over_runs([run[None] for run in shares], (1,), groups, labels, n)
        return replace(mean, minimum=0.0, maximum=1.0).bounded()
    unshared, shared = _question_variance(shares, groups)
    mean = float(np.mean([run.mean() for run in shares]))
    stderr = math.sqrt(unshared / len(shares) + shared)
    _, degrees, effective_groups = stderr_of_mean(np.concatenate(shares), np.concatenate(groups))
    return clustered(mean, stderr, n, degrees, effective_groups, binary=all(map(is_binary, shares)))


def _question_variance(values: Sequence[np.ndarray], groups: Sequence[ArrayLike]) -> tuple[float, float]:
    """Return what the runs' means owe to their questions: the variance of each run alone, and what runs share.

    The first is a mean over runs. The second is the covariance of two runs' means, from the groups of questions that
    both answered, at least 0 since runs of one recipe are exchangeable. Both have the correction of `clusters`.
    """
    group_count = 1 + max(int(np.max(run)) for run in groups)
    scaled = np.zeros((len(values), group_count))
    for row, outcomes, index in zip(scaled, values, groups, strict=True):
        sizes = np.bincount(index, minlength=group_count)
        if np.count_nonzero(sizes) < 2:
            raise ValueError(
                "A run has questions of one group only, which give no error bar: expected at least 2 groups."
            )
        sums = np.bincount(index, weights=outcomes - outcomes.mean(), minlength=group_count)
        row[:] = sums / np.sqrt(1 - sizes / len(outcomes)) / len(outcomes)
    covariance = scaled @ scaled.T
    variances = np.diag(covariance)
    within = float(variances.mean())
    runs = len(values)
    mean_covariance = float(covariance.sum() - variances.sum()) / (runs * (runs - 1))
    shared = min(within, max(0.0, mean_covariance))
    return within - shared, shared
