"""A number with its uncertainty, and what several training runs say of theirs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from qrl.stats.tails import Tails

LEVEL = 0.95  # of every interval, and of the one-sided bounds that verdicts look at


@dataclass(frozen=True)
class Runs:
    """The training runs behind an estimate: a run's value is the recipe's, plus the run's own effect, plus its questions' error.

    Attributes:
        labels: of the runs, their seeds.
        values: each run's own estimate, whose error is that of its questions alone.
        spread: sample variance of these estimates, S − 1 degrees of freedom.
        own: mean variance that a run's estimate owes to questions and is not shared with the other runs.
        shared: what it owes to questions that all runs have in common; no further run makes it smaller. 0 where each run
            has questions of its own.
        groups: independent groups of questions.
    """

    labels: tuple[str, ...]
    values: tuple[Estimate, ...]
    spread: float
    own: float
    shared: float
    groups: int

    @property
    def count(self) -> int:
        return len(self.labels)

    @property
    def between_variance(self) -> float:
        """Of the runs' true values, by the method of moments: what their spread has over their questions' error. May be negative."""
        return self.spread - self.own

    @property
    def between_sd(self) -> float:
        """Standard deviation of the runs' true values; a negative variance counts as 0."""
        return math.sqrt(max(0.0, self.between_variance))

    @property
    def within_sd(self) -> float:
        """Standard error that one run's estimate has from its questions."""
        return math.sqrt(self.own + self.shared)

    @property
    def stderr(self) -> float:
        """Of the mean over runs: between-run variance and own error shrink with the runs, the shared error does not."""
        return math.sqrt(max(self.spread, self.own) / self.count + self.shared)

    def reach(self, tail: float) -> float:
        """Distance from the mean over runs to its one-sided bound with error `tail`.

        Each variance takes the t quantile of its own degrees of freedom, and they add in quadrature: at no ratio of the two
        does this cover less than it says, while Satterthwaite's one t with pooled degrees of freedom covers down to 88 % of
        studies of two runs (`tests/test_stats_runs.py`). Where every run has questions of its own it is the t interval of
        the runs' estimates. Never narrower than the questions alone make it.

        Source: Banerjee, Sankhyā 22 (1960) 357, for variances added; crossed random effects of runs and questions: Clark,
            J. Verbal Learning and Verbal Behavior 12 (1973) 335.
        """
        of_runs, of_questions = (
            quantile(tail, self.count - 1),
            quantile(tail, self.groups - 1),
        )  # signs do not matter: squared
        both = of_runs**2 * self.spread / self.count + of_questions**2 * self.shared
        return math.sqrt(max(both, of_questions**2 * (self.own / self.count + self.shared)))

    def projected(self, questions: float, runs: int) -> Runs:
        """What these variances would be with so many times the questions and with so many runs, were they the truth."""
        between = max(0.0, self.between_variance)
        own, shared = self.own / questions, self.shared / questions
        groups = max(2, round(self.groups * questions))
        return Runs(self.labels[:1] * runs, (), between + own, own, shared, groups)


@dataclass(frozen=True)
class Estimate:
    """A number with its uncertainty.

    `low` and `high` bound the two-sided 95 % interval; `n` counts questions; `df` are the degrees of freedom of the t
    distribution behind the interval, infinite where it is the normal one. `runs` is there where several training runs are
    behind it: then they, not `df`, say how far the interval reaches. `tails` is what few or lopsided changes add to it, and
    `least` and `most` are what the number can be: an interval of a difference never leaves ±1.
    """

    estimate: float
    stderr: float
    low: float
    high: float
    n: int
    df: float = math.inf
    runs: Runs | None = None
    tails: Tails | None = None
    least: float = -math.inf
    most: float = math.inf

    @property
    def lower(self) -> float:
        """One-sided 95 % lower bound."""
        return max(self.least, self.estimate - self.reach(1 - LEVEL, upwards=False))

    @property
    def upper(self) -> float:
        """One-sided 95 % upper bound."""
        return min(self.most, self.estimate + self.reach(1 - LEVEL, upwards=True))

    def reach(self, tail: float, *, upwards: bool) -> float:
        """Distance from the estimate to its one-sided bound with error `tail`, above or below."""
        if self.runs:
            return self.runs.reach(tail)
        reach = -quantile(tail, self.df) * self.stderr
        return self.tails.reach(tail, reach, upwards=upwards) if self.tails else reach

    def bounded(self) -> Estimate:
        """The estimate with its two-sided 95 % interval, within what is possible."""
        tail = (1 - LEVEL) / 2
        low, high = self.estimate - self.reach(tail, upwards=False), self.estimate + self.reach(tail, upwards=True)
        return replace(self, low=max(self.least, low), high=min(self.most, high))

    def p_above(self, bound: float) -> float:
        """One-sided p-value of "the true value is not above `bound`"."""
        below = self.estimate > bound
        tail = self._tail(abs(self.estimate - bound), upwards=not below)
        return tail if below else 1 - tail

    @property
    def p_two_sided(self) -> float:
        """Two-sided p-value of "the true value is 0"; on one run's paired outcomes that of the paired t test."""
        return 2 * self._tail(abs(self.estimate), upwards=self.estimate < 0)

    def _tail(self, distance: float, *, upwards: bool) -> float:
        """The error at which a one-sided bound lies this far from the estimate; by search where it is not t's alone."""
        from scipy.special import ndtr, stdtr

        if self.runs is None and self.tails is None:
            t = -distance / self.stderr
            return float(ndtr(t) if math.isinf(self.df) else stdtr(self.df, t))
        from scipy.optimize import brentq

        def beyond(log_tail: float) -> float:
            return self.reach(math.exp(log_tail), upwards=upwards) - distance

        least, most = math.log(1e-100), math.log(0.5)
        if beyond(least) <= 0:
            return 0.0
        return math.exp(brentq(beyond, least, most, xtol=1e-12)) if beyond(most) < 0 else 0.5

    def projected(self, questions: float = 1.0, runs: int | None = None) -> Estimate:
        """This estimate, of several runs, with so many times the questions and with so many runs."""
        expected = self.runs.projected(questions, runs or self.runs.count)
        return replace(self, stderr=expected.stderr, n=max(2, round(self.n * questions)), runs=expected)


@lru_cache(maxsize=1024)  # the same few are asked for again and again
def quantile(probability: float, df: float = math.inf) -> float:
    """Quantile of the t distribution with `df` degrees of freedom; of the normal one where they are infinite."""
    from scipy.special import ndtri, stdtrit

    return float(ndtri(probability) if math.isinf(df) else stdtrit(df, probability))


def signed(value: float) -> str:
    """A difference as text: sign and three decimals, `+0.040`; what rounds to nothing is `0.000`."""
    text = f"{value:+.3f}".replace("-", "−")
    return text[1:] if float(f"{value:.3f}") == 0 else text
