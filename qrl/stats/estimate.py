"""An estimate with its uncertainty, and the training runs behind it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from qrl.stats.tails import Tails

LEVEL = 0.95  # of every interval, and of the one-sided bounds that verdicts use
TAIL = (1 - LEVEL) / 2  # on either side of a two-sided interval
SMALLEST_P = 1e-100  # no p-value is smaller: none is 0


@dataclass(frozen=True)
class Runs:
    """The training runs behind an estimate: a run's value is the recipe's, plus a run effect, plus its question error.

    Attributes:
        labels: the runs' seeds.
        values: each run's own estimate; its error comes from the questions alone.
        spread: sample variance of these estimates, with S − 1 degrees of freedom.
        unshared: mean variance of a run's estimate that comes from questions and is not shared with the other runs.
        shared: variance that comes from questions which all runs have in common; more runs do not reduce it. 0 if each
            run has its own questions.
        pooled: the contrast of all runs' answers as if one run gave them: what the questions alone allow.
    """

    labels: tuple[str, ...]
    values: tuple[Estimate, ...]
    spread: float
    unshared: float
    shared: float
    pooled: Estimate

    @property
    def count(self) -> int:
        return len(self.labels)

    @property
    def between_variance(self) -> float:
        """Variance of the runs' true values by the method of moments: spread minus question error. May be negative."""
        return self.spread - self.unshared

    @property
    def between_sd(self) -> float:
        """Standard deviation of the runs' true values; a negative variance counts as 0."""
        return math.sqrt(max(0.0, self.between_variance))

    @property
    def within_sd(self) -> float:
        """Standard error of one run's estimate that comes from its questions."""
        return math.sqrt(self.unshared + self.shared)

    @property
    def stderr(self) -> float:
        """Standard error of the mean over runs; more runs reduce all of it but the shared part."""
        return math.sqrt(max(self.spread, self.unshared) / self.count + self.shared)

    def reach(self, tail: float, *, upwards: bool) -> float:
        """Return the distance from the mean over runs to its one-sided bound with error `tail`.

        Each variance is scaled by the t quantile of its own degrees of freedom, and the two add in quadrature. At any
        ratio of the two this covers at least its level, while Satterthwaite's single t with pooled degrees of freedom
        covers as little as 88 % of studies of two runs (`tests/stats/test_stats_runs.py`). If every run has its own
        questions, this is the t interval of the runs' estimates. It is never narrower than that of the pooled
        questions, so it includes their corrections for few changes.

        Source: Banerjee, Sankhyā 22 (1960) 357, for variances added; crossed random effects of runs and questions:
            Clark, J. Verbal Learning and Verbal Behavior 12 (1973) 335.
        """
        runs_quantile = quantile(tail, self.count - 1)
        questions_quantile = quantile(tail, self.pooled.df)
        # The quantiles are squared, so their signs do not matter.
        runs_and_questions = runs_quantile**2 * self.spread / self.count + questions_quantile**2 * self.shared
        questions_alone = questions_quantile**2 * (self.unshared / self.count + self.shared)
        reach = math.sqrt(max(runs_and_questions, questions_alone))
        return max(reach, self.pooled.reach(tail, upwards=upwards))

    def projected(self, questions: float, runs: int) -> Runs:
        """Return the runs expected with `questions` times the questions and `runs` runs, if the variances are true."""
        between = max(0.0, self.between_variance)
        unshared = self.unshared / questions
        shared = self.shared / questions
        pooled = replace(
            self.pooled, stderr=math.sqrt(unshared / runs + shared), df=max(1.0, self.pooled.df * questions), tails=None
        )
        return Runs(
            labels=self.labels[:1] * runs,
            values=(),
            spread=between + unshared,
            unshared=unshared,
            shared=shared,
            pooled=pooled,
        )


@dataclass(frozen=True)
class Estimate:
    """A number with its uncertainty.

    `low` and `high` bound the two-sided 95 % interval; `n` counts questions; `df` are the degrees of freedom of the t
    distribution behind the interval, infinite for a normal one. With several training runs, `runs` replaces `df`.
    `tails` widens the interval where few answers change, or most in one direction. `minimum` and `maximum` are what the
    number can be: the interval of a difference never leaves ±1. `sums` are ways to write the number as a weighted sum
    of other estimates; it is bounded no more tightly than the best of them. `one_sided` are the one-sided 95 % bounds
    where these do not follow from the error.
    """

    estimate: float
    stderr: float
    low: float
    high: float
    n: int
    df: float = math.inf
    runs: Runs | None = None
    tails: Tails | None = None
    minimum: float = -math.inf
    maximum: float = math.inf
    sums: tuple[tuple[tuple[Estimate, float], ...], ...] = ()
    one_sided: tuple[float, float] | None = None

    def __str__(self) -> str:
        return f"{signed(self.estimate)} [{signed(self.low)}, {signed(self.high)}] (n = {self.n})"

    def scaled(self, scale: float, shift: float = 0.0) -> Estimate:
        """Return the estimate in another unit, without the fields that hold for values in 0..1 only."""
        if (scale, shift) == (1, 0):
            return self
        return Estimate(
            estimate=self.estimate * scale + shift,
            stderr=self.stderr * scale,
            low=self.low * scale + shift,
            high=self.high * scale + shift,
            n=self.n,
            df=self.df,
        )

    def bounded(self) -> Estimate:
        """Return the estimate with the two-sided 95 % interval that its error gives, cut at `least` and `most`."""
        low = self.estimate - self.reach(TAIL, upwards=False)
        high = self.estimate + self.reach(TAIL, upwards=True)
        return replace(self, low=max(self.minimum, low), high=min(self.maximum, high))

    @property
    def lower(self) -> float:
        """One-sided 95 % lower bound."""
        if self.one_sided:
            return self.one_sided[0]
        return max(self.minimum, self.estimate - self.reach(1 - LEVEL, upwards=False))

    @property
    def upper(self) -> float:
        """One-sided 95 % upper bound."""
        if self.one_sided:
            return self.one_sided[1]
        return min(self.maximum, self.estimate + self.reach(1 - LEVEL, upwards=True))

    def reach(self, tail: float, *, upwards: bool) -> float:
        """Return the distance from the estimate to its one-sided bound with error `tail`, above or below."""
        if self.runs:
            reach = self.runs.reach(tail, upwards=upwards)
        else:
            reach = -quantile(tail, self.df) * self.stderr
            if self.tails:
                reach = self.tails.reach(tail, reach, upwards=upwards)
        if not self.sums:
            return reach
        shortest = min(_reach_of_sum(summands, tail, upwards=upwards) for summands in self.sums)
        return max(reach, shortest)

    @property
    def few(self) -> bool:
        """Whether few answers change, so that its bounds are exact ones."""
        questions = self.runs.pooled if self.runs else self
        return questions.tails is not None and questions.tails.few

    def p_above(self, bound: float) -> float:
        """Return the one-sided p-value of "the true value is at most `bound`"."""
        above = self.estimate > bound
        tail = self._tail(abs(self.estimate - bound), upwards=not above)
        return tail if above else 1 - tail

    def p_below(self, bound: float) -> float:
        """Return the one-sided p-value of "the true value is at least `bound`"."""
        below = self.estimate < bound
        tail = self._tail(abs(self.estimate - bound), upwards=below)
        return tail if below else 1 - tail

    @property
    def p_two_sided(self) -> float:
        """Two-sided p-value of "the true value is 0"; for one run's paired outcomes, the paired t test's."""
        return 2 * self._tail(abs(self.estimate), upwards=self.estimate < 0)

    def _tail(self, distance: float, *, upwards: bool) -> float:
        """Return the error of a one-sided bound at this distance: closed form for a plain t, root finding otherwise."""
        from scipy.special import ndtr, stdtr

        if self.runs is None and self.tails is None and not self.sums:
            t = -distance / self.stderr
            tail = ndtr(t) if math.isinf(self.df) else stdtr(self.df, t)
            return max(SMALLEST_P, float(tail))

        # The reach shrinks as the tail grows, and is searched on a logarithmic scale for the tail with this distance.
        from scipy.optimize import root_scalar

        def beyond(log_tail: float) -> float:
            return self.reach(math.exp(log_tail), upwards=upwards) - distance

        bracket = (math.log(SMALLEST_P), math.log(0.5))
        if beyond(bracket[0]) <= 0:
            return SMALLEST_P
        if beyond(bracket[1]) >= 0:
            return 0.5
        return math.exp(root_scalar(beyond, method="brentq", bracket=bracket, xtol=1e-12).root)


def bounded_estimate(
    estimate: float,
    stderr: float,
    n: int,
    *,
    df: float = math.inf,
    runs: Runs | None = None,
    tails: Tails | None = None,
    limits: tuple[float, float] = (-math.inf, math.inf),
) -> Estimate:
    """Return an estimate with the two-sided 95 % interval that its error gives.

    Args:
        estimate, stderr, n, df, runs, tails: as for `Estimate`.
        limits: the least and the most that the number can be.
    """
    minimum, maximum = limits
    unbounded = Estimate(estimate, stderr, minimum, maximum, n, df, runs, tails, minimum, maximum)
    return unbounded.bounded()


def _reach_of_sum(summands: tuple[tuple[Estimate, float], ...], tail: float, *, upwards: bool) -> float:
    """Return the distance from a weighted sum of estimates to its bound: the summands' distances in quadrature."""
    squares = 0.0
    for summand, weight in summands:
        same_direction = upwards if weight > 0 else not upwards
        squares += (weight * summand.reach(tail, upwards=same_direction)) ** 2
    return math.sqrt(squares)


@lru_cache(maxsize=1024)  # a few arguments recur many times
def quantile(probability: float, df: float = math.inf) -> float:
    """Return a quantile of the t distribution with `df` degrees of freedom; of the normal one if `df` is infinite."""
    from scipy.special import ndtri, stdtrit

    return float(ndtri(probability) if math.isinf(df) else stdtrit(df, probability))


def signed(value: float) -> str:
    """Return a difference as text with sign and three decimals: `+0.040`, and `0.000` if it rounds to zero."""
    text = f"{value:+.3f}".replace("-", "−")
    return text[1:] if float(f"{value:.3f}") == 0 else text
