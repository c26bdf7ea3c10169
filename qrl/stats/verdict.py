"""The verdict on the gain under a scheme: lost, survives, reduced, or inconclusive.

A reader wants to know what is left of the gain. So each word is a claim that is *shown*, by 95 % bounds, and the first
one that is shown is the verdict:

1. *lost*: more than half of the gain is lost; all of it, if no gain is shown under the scheme.
2. *survives*: a gain is shown under the scheme, and less of it is lost than the margin. This is a non-inferiority test:
   that no loss is significant is no evidence of survival.
3. *reduced*: some of the gain is lost.
4. *inconclusive*: none of these. What is shown all the same is said, and how many questions would decide.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from qrl.stats.estimate import LEVEL, TAIL, Estimate, quantile, signed
from qrl.stats.shares import Share
from qrl.stats.simulate import Patterns, first_of, questions_to_decide
from qrl.stats.text import interval, percent_interval

Word = Literal["lost", "survives", "reduced", "inconclusive"]
WORDS: tuple[Word, ...] = get_args(Word)

POWER = 0.80  # of `smallest_effect` and of the n that would decide
MIN_MARGIN = 0.01  # accuracy: a smaller loss than this is of no practical interest
MARGIN_SHARE = 0.1  # of the gain
KINK = MIN_MARGIN / MARGIN_SHARE  # the gain at which the default margin turns from `MIN_MARGIN` into a share of it
FLOOR = 0.05  # accuracy: below this a cell can hardly lose more
CEILING = 0.95  # accuracy: above this a cell can hardly gain more
FEW_CHANGES = 100  # expected changes: below this, the n that would decide comes from simulation
FURTHEST = 1000  # times the present questions: a larger n is not named
MOST_SEEDS = 1000  # more training runs are not named


@dataclass(frozen=True)
class Verdict:
    """A study's conclusion about the gain under one scheme, with its reason.

    Attributes:
        verdict: one of `WORDS`.
        reason: what is shown, with the bounds that show it.
        margin: the largest loss of accuracy that still counts as survival.
        smallest_effect: the change of the gain that this n detects with 80 % power.
        gain_is_shown: whether the gain at full precision is shown to be above 0.
        kept: the share of the gain that is kept; None if no gain is shown at full precision, or if nothing bounds it.
        all_lost: whether no gain is shown under the scheme, where the verdict is `lost`.
        more_than_half_kept: whether that is shown.
        remarks: on cells at floor or ceiling, and on a gain that is no larger than the margin.
        n_to_decide: questions that would settle an inconclusive verdict with 80 % power, if the estimates are the
            truth; None if it is settled, or if no n up to a thousand times the present one would.
        seeds_to_decide: training runs that would do so at this n, where there are several.
        p_value: one-sided, of the claim that the verdict makes; None if it makes none.
    """

    verdict: Word
    reason: str
    margin: float
    smallest_effect: float
    gain_is_shown: bool = False
    kept: Estimate | None = None
    all_lost: bool = False
    more_than_half_kept: bool = False
    remarks: tuple[str, ...] = ()
    n_to_decide: int | None = None
    seeds_to_decide: int | None = None
    p_value: float | None = None

    @property
    def headline(self) -> str:
        """The verdict and the share of the gain that is kept: `reduced: 62 % [58, 66] of the gain is kept`."""
        word = "lost, all of it" if self.all_lost else self.verdict
        if not self.gain_is_shown:
            return f"{word}: no gain is shown at full precision"
        if self.kept is None:
            return f"{word}: what share of the gain is kept cannot be bounded"
        return f"{word}: {percent_interval(self.kept)} of the gain is kept"


@dataclass(frozen=True)
class Gains:
    """The gain at full precision and under a scheme, and the claims that their bounds show.

    Attributes:
        share: the gain under the scheme as a part of the gain at full precision.
        set_margin: loss of accuracy that still counts as survival; None for `default_margin`.
    """

    share: Share
    set_margin: float | None = None

    @property
    def full(self) -> Estimate:
        return self.share.whole

    @property
    def quantized(self) -> Estimate:
        return self.share.part

    @property
    def survival(self) -> Estimate:
        return self.share.difference

    @property
    def margin(self) -> float:
        """The largest loss that counts as survival; the default one is estimated."""
        return default_margin(self.full.estimate) if self.set_margin is None else self.set_margin

    @cached_property
    def half(self) -> Estimate:
        """(g_q − b_q) − ½ (g − b): above 0 if more than half of the gain is kept."""
        return self.share.beyond(0.5)

    @cached_property
    def survival_tests(self) -> list[tuple[Estimate, float]]:
        """Estimates, each with the number that it must be above if the loss is smaller than the margin.

        A tenth of an *estimated* gain is a margin with an error. There the contrast that includes this error is tested:
        whether more than nine tenths are kept. Which margin applies, 0.01 or a tenth, is estimated too: as long as the
        gain's interval contains 0.1, where the two meet, both tests must be passed. The true margin is the larger of
        the two, so that each test alone keeps the level, and a wrong choice between them only makes the claim harder.

        Source: a non-inferiority test, with a fixed margin or with one that is a share of an estimated effect (the
            fixed-margin and the synthesis method of FDA, Non-Inferiority Clinical Trials to Establish Effectiveness,
            2016). Both tests at their level: intersection-union test, Casella and Berger, Statistical Inference, 2nd
            ed. (2002), section 8.2.3.
        """
        if self.set_margin is not None:
            return [(self.survival, -self.set_margin)]
        fixed = (self.survival, -MIN_MARGIN)
        if self.full.high <= KINK:
            return [fixed]
        of_gain = (self.share.beyond(1 - MARGIN_SHARE), 0.0)
        if self.full.low >= KINK:
            return [of_gain]
        return [fixed, of_gain]

    @property
    def is_shown(self) -> bool:
        return self.full.low > 0

    @property
    def is_shown_quantized(self) -> bool:
        return self.quantized.low > 0

    @property
    def is_more_than_half_lost(self) -> bool:
        return self.half.upper < 0

    @property
    def is_more_than_half_kept(self) -> bool:
        return self.half.lower > 0

    @property
    def is_within_margin(self) -> bool:
        return all(estimate.lower > bound for estimate, bound in self.survival_tests)

    @property
    def is_reduced(self) -> bool:
        return self.survival.upper < 0

    def word(self) -> Word:
        """Return the verdict: the first claim that is shown."""
        if not self.is_shown:
            return "inconclusive"
        if self.is_more_than_half_lost:
            return "lost"
        if self.is_within_margin and self.is_shown_quantized:
            return "survives"
        return "reduced" if self.is_reduced else "inconclusive"


def default_margin(gain: float) -> float:
    """Return a tenth of the full-precision gain, at least 0.01."""
    return max(MIN_MARGIN, gain * MARGIN_SHARE)


def judge(gains: Gains, accuracies: dict[str, float], patterns: Patterns | None = None) -> Verdict:
    """Return the verdict on the gain under one scheme, with its reason.

    Gains are shown by their two-sided 95 % intervals, as the table prints them; claims about gain survival by one-sided
    95 % bounds, so that each is wrong in at most 5 % of studies.

    Args:
        gains: at full precision and under the scheme.
        accuracies: cell's name → accuracy, of the four cells.
        patterns: how often the four cells have each combination of outcomes, for the n that would decide; None if that
            is unknown, or if questions or runs depend on each other.
    """
    word = gains.word()
    reason, p_value = _REASONS[word](gains)
    n_to_decide = None
    seeds_to_decide = None
    if word == "inconclusive":
        ways = _ways_to_decide(gains)
        n_to_decide = _questions_to_decide(gains, ways, patterns)
        seeds_to_decide = _seeds_to_decide(gains, ways)
    return Verdict(
        verdict=word,
        reason=reason,
        margin=gains.margin,
        smallest_effect=smallest_detectable(gains.survival),
        gain_is_shown=gains.is_shown,
        kept=gains.share.kept,
        all_lost=word == "lost" and not gains.is_shown_quantized,
        more_than_half_kept=gains.is_shown and gains.is_more_than_half_kept,
        remarks=(*_remarks_on_survival(gains, word), *_remarks_on_cells(accuracies)),
        n_to_decide=n_to_decide,
        seeds_to_decide=seeds_to_decide,
        p_value=p_value,
    )


def _lost(gains: Gains) -> tuple[str, float]:
    p_value = gains.half.p_below(0)
    if not gains.is_shown_quantized:
        return f"the gain under the scheme, {interval(gains.quantized)}, is not shown to be above 0", p_value
    kept = gains.share.kept
    if kept is None:
        return "more than half of the gain is shown to be lost", p_value
    return f"at most {_percent(kept.upper)} of the gain is shown to be kept", p_value


def _survives(gains: Gains) -> tuple[str, float]:
    p_value = max(estimate.p_above(bound) for estimate, bound in gains.survival_tests)
    return f"a loss of the margin, {gains.margin:.3f}, is excluded", p_value


def _reduced(gains: Gains) -> tuple[str, float]:
    p_value = gains.survival.p_below(0)
    if gains.is_more_than_half_kept:
        return "a loss is shown, and more than half of the gain is shown to be kept", p_value
    return "a loss is shown; whether more than half of the gain is kept is not shown", p_value


def _inconclusive(gains: Gains) -> tuple[str, None]:
    if not gains.is_shown:
        gain = interval(gains.full)
        return f"the full-precision gain, {gain}, is not shown to be above 0, so there is nothing to survive", None
    if gains.is_within_margin:
        reason = f"the gain under the scheme, {interval(gains.quantized)}, is not shown to be above 0"
    else:
        bounds = f"{signed(gains.survival.lower)} and {signed(gains.survival.upper)}"
        reason = f"neither a loss nor its absence within the margin, {gains.margin:.3f}, is shown: the one-sided 95 % "
        reason += f"bounds of gain survival are {bounds}"
    kept = gains.share.kept
    if kept and kept.lower >= 0.005:  # less is shown as 0 %
        reason += f"; at least {_percent(kept.lower)} of the gain is shown to be kept"
    return reason, None


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


_REASONS: dict[Word, Callable[[Gains], tuple[str, float | None]]] = {
    "lost": _lost,
    "survives": _survives,
    "reduced": _reduced,
    "inconclusive": _inconclusive,
}


def _remarks_on_survival(gains: Gains, word: Word) -> list[str]:
    """Return a remark on a gain that survives: if it is no larger than the margin, or if a loss of it is shown."""
    if word != "survives":
        return []
    if gains.full.estimate <= gains.margin:
        gain = signed(gains.full.estimate)
        return [
            f"the full-precision gain, {gain}, is no larger than the margin, so all that is shown is that some is left"
        ]
    if gains.is_reduced:
        return [f"a loss is shown too, {signed(gains.survival.estimate)}, and is smaller than the margin"]
    return []


def _remarks_on_cells(accuracies: dict[str, float]) -> list[str]:
    """Return a remark on each cell at floor or ceiling: differences on other scales than points may look larger."""
    remarks = []
    for name, rate in accuracies.items():
        if rate < FLOOR:
            remarks.append(f"{name} is at the floor (accuracy {rate:.3f}, below {FLOOR:g}) and can hardly lose more")
        elif rate > CEILING:
            remarks.append(
                f"{name} is at the ceiling (accuracy {rate:.3f}, above {CEILING:g}) and can hardly gain more"
            )
    return remarks


def smallest_detectable(contrast: Estimate, tail: float = TAIL) -> float:
    """Return the smallest true value of a contrast that clears its bound with error `tail` at the verdicts' power.

    Source: a z test's detectable effect, (z_tail + z_power) σ, with the estimate's own reach in place of z_tail σ.
    """
    reach = max(contrast.reach(tail, upwards=False), contrast.reach(tail, upwards=True))
    return reach + quantile(POWER) * contrast.stderr


@dataclass(frozen=True)
class _Condition:
    """What must hold for a claim to be shown: a bound of an estimate clears a number.

    Attributes:
        estimate: that must be far enough from the number.
        distance: from the number to the estimate, on the side of the claim; not above 0 if the claim is false.
        tail: error of the bound.
        upwards: whether it is the upper bound.
    """

    estimate: Estimate
    distance: float
    tail: float = 1 - LEVEL
    upwards: bool = False

    def questions(self) -> float:
        """Return how many times the questions are needed, if error and bound shrink with their root."""
        detectable = self.estimate.reach(self.tail, upwards=self.upwards) + quantile(POWER) * self.estimate.stderr
        return (detectable / self.distance) ** 2

    def is_met(self, questions: float, runs: int) -> bool:
        """Return whether that many times the questions and that many runs show the claim with `POWER`."""
        if self.estimate.runs is None:
            return self.questions() <= questions
        projected = self.estimate.runs.projected(questions, runs)
        detectable = projected.reach(self.tail, upwards=self.upwards) + quantile(POWER) * projected.stderr
        return detectable <= self.distance


def _ways_to_decide(gains: Gains) -> list[list[_Condition]]:
    """Return for each verdict that the estimates allow, if they are the truth, what must be shown for it."""
    gain = _Condition(gains.full, gains.full.estimate, TAIL)
    gain_quantized = _Condition(gains.quantized, gains.quantized.estimate, TAIL)
    within_margin = [_Condition(estimate, estimate.estimate - bound) for estimate, bound in gains.survival_tests]
    lost = [gain, _Condition(gains.half, -gains.half.estimate, upwards=True)]
    survives = [gain, *within_margin, gain_quantized]
    reduced = [gain, _Condition(gains.survival, -gains.survival.estimate, upwards=True)]

    ways = (lost, survives, reduced)
    return [way for way in ways if all(condition.distance > 1e-9 for condition in way)]


def _questions_to_decide(gains: Gains, ways: list[list[_Condition]], patterns: Patterns | None) -> int | None:
    """Return the questions that would settle the verdict if the estimates are the truth."""
    if not ways:
        return None
    present = gains.full.n
    if gains.full.runs is not None:
        if gains.survival.few:
            return None  # the bounds are exact ones, which no formula projects over several runs
        runs = gains.full.runs.count
        sizes = range(present + 1, FURTHEST * present + 1)
        return first_of(sizes, lambda n: _is_decided(ways, n / present, runs))

    factor = min(max(condition.questions() for condition in way) for way in ways)
    questions = max(present + 1, math.ceil(present * factor))
    # With few changes the bounds are exact ones, which do not shrink as the formula says: studies are drawn instead.
    if patterns is not None and patterns.changes(min(questions, FURTHEST * present)) < FEW_CHANGES:
        return questions_to_decide(patterns, _word_of(gains.set_margin), present + 1, FURTHEST * present)
    return questions if questions <= FURTHEST * present else None


def _seeds_to_decide(gains: Gains, ways: list[list[_Condition]]) -> int | None:
    """Return the training runs that would settle the verdict with the present questions; None for a single run."""
    if not ways or gains.full.runs is None or gains.survival.few:
        return None
    counts = range(gains.full.runs.count + 1, MOST_SEEDS + 1)
    return first_of(counts, lambda runs: _is_decided(ways, 1.0, runs))


def _is_decided(ways: list[list[_Condition]], questions: float, runs: int) -> bool:
    """Return whether `questions` times the questions and that many runs show any of the verdicts."""
    return any(all(condition.is_met(questions, runs) for condition in way) for way in ways)


def _word_of(margin: float | None) -> Callable[[Share], Word]:
    return lambda share: Gains(share, margin).word()
