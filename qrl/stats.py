"""Intervals that can carry a verdict: accuracies, paired differences, gain survival.

Everything a study claims is a *contrast*: a weighted sum of cells' accuracies. One cell has the weight 1; a gain is
grpo − base; gain survival is a difference of two gains. All cells answer the same questions, so a contrast is
computed per question and then averaged, and what the questions share cancels. Where only counts exist, cells are taken
as independent, which costs width but invents nothing.

Left out: what several training seeds need, a random effect of their own; `compare` refuses to pool them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

LEVEL = 0.95  # of every interval, and of the one-sided bounds that verdicts look at


@dataclass(frozen=True)
class Estimate:
    """A number with its uncertainty.

    `low` and `high` bound the two-sided 95 % interval; `n` counts questions; `df` are the degrees of freedom of the t
    distribution behind the interval, infinite where it is the normal one.
    """

    estimate: float
    stderr: float
    low: float
    high: float
    n: int
    df: float = math.inf

    @property
    def lower(self) -> float:
        """One-sided 95 % lower bound."""
        return self.estimate - quantile(LEVEL, self.df) * self.stderr

    @property
    def upper(self) -> float:
        """One-sided 95 % upper bound."""
        return self.estimate + quantile(LEVEL, self.df) * self.stderr

    def p_above(self, bound: float) -> float:
        """One-sided p-value of "the true value is not above `bound`"."""
        from scipy.special import ndtr, stdtr

        t = (bound - self.estimate) / self.stderr
        return float(ndtr(t) if math.isinf(self.df) else stdtr(self.df, t))


def accuracy(correct: int, n: int) -> Estimate:
    """Share of right answers, with binomial standard error and Wilson interval.

    Args:
        correct: right answers, 0..n.
        n: questions asked.

    Raises:
        ValueError: n < 2, which supports no error bar, or `correct` outside 0..n.

    Source: Wilson, JASA 22 (1927) 209; the stderr is √(p(1 − p)/n), which is 0 at p = 0 and 1, where the interval is not.
    """
    if n < 2 or not 0 <= correct <= n:
        raise ValueError(f"{correct} right of {n} gives no accuracy: expected n >= 2 and 0 <= correct <= n.")
    rate = correct / n
    return _wilson(rate, math.sqrt(rate * (1 - rate) / n), n, effective=n)


def clustered_accuracy(correct: ArrayLike, clusters: ArrayLike) -> Estimate:
    """Share of right answers where questions come in groups: clustered stderr, Wilson interval at the effective n.

    Args:
        correct: (n,) 0 or 1 per question.
        clusters: (n,) label of each question's group.

    Raises:
        ValueError: fewer than two questions or two groups.

    Source: Miller, arXiv 2411.00640, equation 4, times G/(G − 1) for G groups, so that groups of one give the usual error.
    """
    values = np.asarray(correct, dtype=float)
    plain = accuracy(int(values.sum()), len(values))
    stderr, _ = _stderr(values, clusters)
    effective = plain.estimate * (1 - plain.estimate) / stderr**2 if stderr > 0 else len(np.unique(clusters))
    return _wilson(plain.estimate, stderr, plain.n, effective)


def contrast(outcomes: ArrayLike, weights: Sequence[float], clusters: ArrayLike | None = None) -> Estimate:
    """Weighted sum of cells' accuracies over the same questions: per-question mean, its stderr and t interval.

    Where every question gives the same value the sample's own stderr is 0, which n questions cannot support: with none
    of n deviating, up to 1 − 0.025^(1/n) of all questions may (about 3.7/n), each by as much as the weights allow. The
    interval is then that, and the stderr the one that belongs to it.

    Args:
        outcomes: (cells, n) 0 or 1, column j being the same question in every row.
        weights: (cells,) such as (1, −1) for a difference.
        clusters: (n,) label of each question's group, or None where questions are independent.

    Raises:
        ValueError: n < 2, fewer than two groups, or shapes that do not fit.

    Source: paired differences, Miller, arXiv 2411.00640, section 4; the bound at zero deviations is Clopper and Pearson's.
    """
    outcomes, weights = np.asarray(outcomes, dtype=float), np.asarray(weights, dtype=float)
    if outcomes.ndim != 2 or weights.shape != outcomes.shape[:1]:
        raise ValueError(f"Outcomes of shape {outcomes.shape} do not fit {weights.shape} weights: expected (cells, n) and (cells,).")
    values = weights @ outcomes
    mean = float(values.mean()) if values.size else math.nan
    stderr, groups = _stderr(values, clusters)
    width = quantile((1 + LEVEL) / 2, groups - 1)
    if stderr < 1e-12:
        reach = max(mean - weights[weights < 0].sum(), weights[weights > 0].sum() - mean)
        stderr = reach * (1 - ((1 - LEVEL) / 2) ** (1 / groups)) / width
    return Estimate(mean, stderr, mean - width * stderr, mean + width * stderr, len(values), df=groups - 1)


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
        mean += weight * accuracy(right, asked).estimate
        rate = right / asked if 0 < right < asked else (right + 2) / (asked + 4)
        variance += weight**2 * rate * (1 - rate) / asked
    stderr, width = math.sqrt(variance), quantile((1 + LEVEL) / 2, math.inf)
    return Estimate(mean, stderr, mean - width * stderr, mean + width * stderr, min(n))


def bootstrap(outcomes: ArrayLike, weights: Sequence[float], *, seed: int, samples: int = 10_000) -> Estimate:
    """The same contrast by resampling questions, all cells of a question together: a check of the closed form.

    Args:
        outcomes: (cells, n) 0 or 1, as for `contrast`.
        weights: (cells,).
        seed: of the resampling.
        samples: resampled studies.

    Returns:
        Estimate with the resamples' standard deviation as stderr and their percentiles as interval.

    Source: Efron, Ann. Stat. 7 (1979) 1. Few distinct values occur, so a resample is one multinomial draw of their counts.
    """
    values, counts = np.unique(np.asarray(weights, dtype=float) @ np.asarray(outcomes, dtype=float), return_counts=True)
    n = int(counts.sum())
    means = np.random.default_rng(seed).multinomial(n, counts / n, size=samples) @ values / n
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(float(values @ counts / n), float(means.std(ddof=1)), float(low), float(high), n)


def mcnemar(a: ArrayLike, b: ArrayLike) -> float:
    """Exact two-sided p-value of "both cells are equally accurate", from the questions on which they disagree.

    Args:
        a, b: (n,) 0 or 1, the same questions in the same order.

    Returns:
        p in (0, 1]; 1 where the cells agree everywhere.

    Source: McNemar, Psychometrika 12 (1947) 153, with the binomial distribution in place of chi squared.
    """
    from scipy.special import bdtr

    a, b = np.asarray(a, dtype=bool), np.asarray(b, dtype=bool)
    only_a, only_b = int((a & ~b).sum()), int((b & ~a).sum())
    disagreements = only_a + only_b
    return min(1.0, 2 * float(bdtr(min(only_a, only_b), disagreements, 0.5))) if disagreements else 1.0


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values corrected for having asked several questions at once.

    Source: Holm, Scand. J. Stat. 6 (1979) 65: the k-th smallest of m is multiplied by m − k + 1, and never falls below the one before.
    """
    order = np.argsort(p_values, kind="stable")
    steps = np.asarray(p_values, dtype=float)[order] * np.arange(len(order), 0, -1)
    corrected = np.empty(len(order))
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(steps))
    return corrected.tolist()


def signed(value: float) -> str:
    """A difference as text: sign and three decimals, `+0.040`; what rounds to nothing is `0.000`."""
    text = f"{value:+.3f}".replace("-", "−")
    return text[1:] if float(f"{value:.3f}") == 0 else text


def _stderr(values: np.ndarray, clusters: ArrayLike | None) -> tuple[float, int]:
    """Standard error of the mean, and the number of independent groups behind it."""
    labels = np.arange(len(values)) if clusters is None else np.asarray(clusters)
    if labels.shape != values.shape:
        raise ValueError(f"{labels.shape} clusters do not fit {values.shape} questions: expected one label per question.")
    _, group = np.unique(labels, return_inverse=True)
    groups = int(group.max(initial=-1)) + 1
    if groups < 2:
        raise ValueError(f"{len(values)} questions in {groups} groups give no error bar: expected at least 2 groups.")
    sums = np.bincount(group, weights=values - values.mean())
    return math.sqrt(groups / (groups - 1) * float(sums @ sums)) / len(values), groups


def _wilson(rate: float, stderr: float, n: int, effective: float) -> Estimate:
    z = quantile((1 + LEVEL) / 2)
    shrink = 1 + z**2 / effective
    centre = (rate + z**2 / (2 * effective)) / shrink
    half = z / shrink * math.sqrt(rate * (1 - rate) / effective + z**2 / (4 * effective**2))
    return Estimate(rate, stderr, max(0.0, centre - half), min(1.0, centre + half), n)


def quantile(probability: float, df: float = math.inf) -> float:
    """Quantile of the t distribution with `df` degrees of freedom; of the normal one where they are infinite."""
    from scipy.special import ndtri, stdtrit

    return float(ndtri(probability) if math.isinf(df) else stdtrit(df, probability))
