"""Several training runs of one recipe: the run is a random effect, beside the questions.

A run's contrast is θ + aₛ + (its questions' error): θ is the recipe's, aₛ the run's own. Two runs' errors are correlated as
far as they answered the same questions (crossed: all of them; nested: none; or in between), and that part no further run
makes smaller. What is reported for θ is the plain mean over runs, each counting once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from qrl.stats.contrasts import contrast, limits, weighted
from qrl.stats.estimate import Estimate, Runs
from qrl.stats.rates import effective_n, wilson


def contrast_over_runs(
    outcomes: Sequence[ArrayLike],
    weights: Sequence[float],
    groups: Sequence[ArrayLike],
    labels: Sequence[str],
    n: int,
    *,
    vary: bool = True,
) -> Estimate:
    """Weighted sum of cells' accuracies, averaged over training runs, with the spread between runs in its error.

    Args:
        outcomes: per run s, (cells, n_s) in 0..1, column j being the same question in every row.
        weights: (cells,) such as (1, −1) for a difference.
        groups: per run, (n_s,) whole numbers naming each question, or the group of questions that it belongs to, the same
            number in every run that asked it.
        labels: of the runs.
        n: different questions in all.
        vary: whether runs have weights of their own; False where all cells are the base's, one model however often it was
            asked: then the error is that of the questions, with what few changes add to it, as in `contrast`.

    Returns:
        Estimate with `runs`, where they vary. Where no question and no run deviates from any other, the error is the one that `contrast`
        gives in that case.

    Raises:
        ValueError: fewer than two runs, or shapes that do not fit.

    Source: E[spread of the runs' estimates] = between + own, and the mean's variance = (between + own)/S + shared, by the
        method of moments; on the same questions this is Clark's (MS_runs + MS_questions − MS_residual)/(nS), J. Verbal
        Learning and Verbal Behavior 12 (1973) 335.
    """
    if len(outcomes) < 2 or not len(outcomes) == len(groups) == len(labels):
        raise ValueError(
            f"{len(outcomes)} runs with {len(groups)} sets of groups and {len(labels)} labels: expected the same number, at least 2."
        )
    values = [weighted(each, weights) for each in outcomes]
    questions = Questions.behind(values, groups)
    means = [float(each.mean()) for each in values]
    if not vary:
        pooled = _pooled(outcomes, weights, groups)
        stderr = questions.stderr if questions.stderr > 1e-12 else pooled.stderr
        found = Estimate(
            float(np.mean(means)), stderr, 0, 0, n, df=questions.groups - 1, tails=pooled.tails, **limits(weights)
        )
        return found.bounded()
    alone = tuple(contrast(outcome, weights, group) for outcome, group in zip(outcomes, groups, strict=True))
    spread, shared = float(np.var(means, ddof=1)), questions.shared
    if max(spread, questions.own + shared) < 1e-24:
        shared = _pooled(outcomes, weights, groups).stderr ** 2
    runs = Runs(tuple(labels), alone, spread, questions.own, shared, questions.groups)
    return Estimate(
        float(np.mean(means)), runs.stderr, 0, 0, n, df=len(labels) - 1, runs=runs, **limits(weights)
    ).bounded()


def _pooled(outcomes: Sequence[ArrayLike], weights: Sequence[float], groups: Sequence[ArrayLike]) -> Estimate:
    """All runs' answers as one run's, those to one question or group of them kept together."""
    return contrast(np.concatenate(outcomes, axis=1), weights, np.concatenate(groups))


def rate_over_runs(
    values: Sequence[ArrayLike], groups: Sequence[ArrayLike], labels: Sequence[str], n: int, *, vary: bool
) -> Estimate:
    """Mean of shares per question, averaged over training runs.

    Args:
        values: per run s, (n_s,) in 0..1 per question.
        groups: per run, as for `contrast_over_runs`.
        labels: of the runs.
        n: different questions in all.
        vary: whether each run has weights of its own; False for the base, which is one model however often it was asked:
            its error is that of its questions, and its interval Wilson's.
    """
    if vary:
        found = contrast_over_runs([np.asarray(each)[None] for each in values], (1,), groups, labels, n)
        return replace(found, least=0.0, most=1.0).bounded()
    arrays = [np.asarray(each, dtype=float) for each in values]
    questions = Questions.behind(arrays, groups)
    mean = float(np.mean([each.mean() for each in arrays]))
    binary = all(np.isin(each, (0, 1)).all() for each in arrays)
    return wilson(mean, questions.stderr, n, effective_n(mean, questions.stderr, questions.groups, binary=binary, n=n))


@dataclass(frozen=True)
class Questions:
    """What runs' means owe to their questions.

    Attributes:
        variances: (S,) of each run's mean.
        own: mean variance of a run that is not shared with the others.
        shared: covariance of two runs' means, from the groups of questions that both answered. It cannot be negative where
            runs of one recipe are exchangeable, so an estimate below 0 counts as 0.
        groups: in all.
    """

    variances: np.ndarray
    own: float
    shared: float
    groups: int

    @property
    def stderr(self) -> float:
        """Of the mean over runs, were the runs all there are: questions alone."""
        return math.sqrt(self.own / len(self.variances) + self.shared)

    @classmethod
    def behind(cls, values: Sequence[np.ndarray], groups: Sequence[ArrayLike]) -> Questions:
        """From each run's (n_s,) values and group numbers."""
        size = 1 + max(int(np.max(each)) for each in groups)
        sums = np.stack(
            [np.bincount(g, weights=v - v.mean(), minlength=size) for v, g in zip(values, groups, strict=True)]
        )
        seen = np.stack([np.bincount(each, minlength=size) > 0 for each in groups])
        counts = seen.sum(axis=1)
        if counts.min() < 2:
            raise ValueError(
                "A run has questions of one group only, which give no error bar: expected at least 2 groups in each."
            )
        scaled = sums * (np.sqrt(counts / (counts - 1)) / [len(each) for each in values])[:, None]
        covariance = scaled @ scaled.T
        variances, runs = np.diag(covariance), len(values)
        within = float(variances.mean())
        shared = min(within, max(0.0, float(covariance.sum() - variances.sum()) / (runs * (runs - 1))))
        return cls(variances, within - shared, shared, int(seen.any(axis=0).sum()))
