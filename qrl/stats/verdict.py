"""The verdict on gain survival: the gain survives, it is lost, or the sample is too small to decide.

This is a non-inferiority test. "No significant loss" is no evidence of survival, so survival must be shown against a
margin.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from qrl.stats.estimate import LEVEL, TAIL, Estimate, quantile, signed
from qrl.stats.text import interval

POWER = 0.80  # of `smallest_effect` and of the n that would decide
MIN_MARGIN = 0.02  # accuracy: a smaller loss than this is of no practical interest
KINK = 2 * MIN_MARGIN  # the gain at which the default margin turns from `MIN_MARGIN` into half the gain
FLOOR, CEILING = 0.05, 0.95  # accuracy: beyond these a cell can hardly lose or gain


@dataclass(frozen=True)
class Verdict:
    """A study's conclusion about the gain under one scheme, with its reason.

    `margin` is the largest loss of accuracy that still counts as survival. `smallest_effect` is the change of the gain
    that this n detects with 80 % power. `n_to_decide` is the number of questions that would settle an inconclusive
    verdict with 80 % power, None if it is settled or if no n up to a thousand times the present one would;
    `seeds_to_decide` is the number of training runs that would do so at this n, where there are several. `p_value` is
    one-sided, against the margin; None if there was nothing to test.
    """

    verdict: Literal["survives", "lost", "inconclusive"]
    reason: str
    margin: float
    smallest_effect: float
    n_to_decide: int | None = None
    seeds_to_decide: int | None = None
    p_value: float | None = None


def default_margin(gain: float) -> float:
    """Return half the full-precision gain, at least 0.02: a gain that survives keeps more than half of itself."""
    return max(MIN_MARGIN, gain / 2)


def judge(
    gain: Estimate, survival: Estimate, kept: Estimate, accuracies: dict[str, float], margin: float | None = None
) -> Verdict:
    """Return the verdict on gain survival under one scheme.

    `survives` if the one-sided 95 % lower bound of gain survival is above −margin, `lost` if the upper bound is below
    it, else `inconclusive`. Always `inconclusive` if the interval of the full-precision gain is not above 0, or if a
    cell is at floor or ceiling; also instead of `survives` if the gain is no larger than the margin. The default margin
    is *estimated*; `_against` says what that adds.

    Args:
        gain: full-precision gain, g_full − b_full.
        survival: (g_q − b_q) − (g_full − b_full).
        kept: (g_q − b_q) − ½ (g_full − b_full), above 0 if more than half of the gain is kept.
        accuracies: cell's name → accuracy, of the four cells.
        margin: loss of accuracy that still counts as survival; None for `default_margin`.
    """
    tested = _against(gain, survival, kept, margin)
    survives, lost = tested.p_survives < 1 - LEVEL, tested.p_lost < 1 - LEVEL
    margin, below = tested.margin, signed(-tested.margin)
    conclude = partial(Verdict, margin=margin, smallest_effect=smallest_detectable(survival))
    if edge := _edge(accuracies):
        return conclude("inconclusive", edge)
    if not gain.low > 0:
        reason = f"the full-precision gain, {interval(gain)}, is not shown to be above 0"
        reason += ", so there is nothing to survive"
        if tested.undecidable(gain):
            reason += f"; a gain no larger than the margin, {margin:.3f}, could not be said to survive at any n"
        return conclude("inconclusive", reason, **_to_decide(gain, tested))
    if survives and gain.estimate <= margin:
        reason = f"the full-precision gain, {signed(gain.estimate)}, is no larger than the margin, {margin:.3f}"
        reason += ", so even losing all of it would count as survival"
        return conclude("inconclusive", reason, p_value=tested.p_survives)
    if survives:
        bound = f"the one-sided 95 % lower bound of gain survival, {signed(survival.lower)},"
        if tested.tail == TAIL:
            bound = f"the lower end of the 95 % interval of gain survival, {signed(survival.low)},"
            bound += " (used because either margin may apply, so each gets half the error)"
        return conclude("survives", f"{bound} is above −margin, {below}", p_value=tested.p_survives)
    if lost:
        reason = f"the one-sided 95 % upper bound of gain survival, {signed(survival.upper)}, is below −margin, {below}"
        return conclude("lost", reason, p_value=tested.p_lost)
    bounds = f"{signed(survival.lower)} and {signed(survival.upper)}"
    reason = f"−margin, {below}, is between the one-sided 95 % bounds of gain survival, {bounds}"
    if not survival.lower <= -margin <= survival.upper:
        reason = (
            f"the margin, {margin:.3f}, is half of an estimated gain, and once the error of that estimate is included"
        )
        reason += ", −margin is within the one-sided 95 % bounds"
    p_value = min(tested.p_survives, tested.p_lost)
    return conclude("inconclusive", reason, p_value=p_value, **_to_decide(gain, tested))


@dataclass(frozen=True)
class _Tested:
    """The p-values of both claims against a margin, and the estimates and bounds that a larger study must separate."""

    margin: float
    p_survives: float
    p_lost: float
    tests: list[tuple[Estimate, float]]
    tail: float = 1 - LEVEL

    def undecidable(self, gain: Estimate) -> bool:
        """Whether the estimates, if they are the truth, allow no verdict: all of the gain is within the margin."""
        survival, bound = self.tests[0]
        return gain.estimate <= self.margin and survival.estimate >= bound


def _against(gain: Estimate, survival: Estimate, kept: Estimate, margin: float | None) -> _Tested:
    """Test gain survival against its margin, including the margin's own error if it is estimated.

    Half an *estimated* gain is a margin with an error. There the bound of `kept`, which includes that error, must
    agree. Which margin applies, 0.02 or half the gain, is estimated too. As long as the gain's interval contains 0.04,
    where the two meet, surviving means losing less than either margin, so either test may show it, at half the error
    each; being lost means losing more than both, so both tests must show it.

    Source: a non-inferiority test, with a fixed margin or with one that is a share of an estimated effect (the
        fixed-margin and the synthesis method of FDA, Non-Inferiority Clinical Trials to Establish Effectiveness, 2016).
        Claims of the form "either" and "both": union-intersection and intersection-union tests, Casella and Berger,
        Statistical Inference, 2nd ed. (2002), section 8.2.3, the former with Bonferroni's bound.
    """
    fixed = default_margin(gain.estimate) if margin is None else margin
    tests = [(survival, -fixed)]
    p_fixed = survival.p_above(-fixed)
    if margin is not None or gain.high <= KINK:
        return _Tested(fixed, p_fixed, 1 - p_fixed, tests)
    p_kept = kept.p_above(0)
    p_half, p_lost = max(p_fixed, p_kept), 1 - min(p_fixed, p_kept)
    if gain.low >= KINK:
        return _Tested(fixed, p_half, p_lost, [*tests, (kept, 0.0)])
    p_either = min(1.0, 2 * min(p_half, survival.p_above(-MIN_MARGIN)))
    return _Tested(fixed, p_either, p_lost, [*tests, (kept, 0.0)] if fixed > MIN_MARGIN else tests, TAIL)


def _edge(accuracies: dict[str, float]) -> str | None:
    """Return a sentence about the first cell at floor or ceiling, if there is one."""
    for name, rate in accuracies.items():
        if not FLOOR <= rate <= CEILING:
            edge, change = ("floor", "lose") if rate < FLOOR else ("ceiling", "gain")
            at_edge = f"{name} is at the {edge} (accuracy {rate:.3f}) and can hardly {change} anything"
            return f"{at_edge}, so differences between cells mean little"
    return None


def smallest_detectable(contrast: Estimate, tail: float = TAIL) -> float:
    """Return the smallest true value of a contrast that clears its bound with error `tail` at the verdicts' power.

    Source: a z test's detectable effect, (z_tail + z_power) σ, with the estimate's own reach in place of z_tail σ.
    """
    return max(contrast.reach(tail, upwards=upwards) for upwards in (False, True)) + quantile(POWER) * contrast.stderr


def _to_decide(gain: Estimate, tested: _Tested) -> dict[str, Any]:
    """Return `n_to_decide` and `seeds_to_decide` of the verdict, if the estimates are the truth."""
    settled = [(gain, gain.estimate, TAIL)]
    settled += [(test, abs(test.estimate - bound), tested.tail) for test, bound in tested.tests]
    if gain.estimate <= 0 or tested.undecidable(gain) or min(distance for _, distance, _ in settled) < 1e-9:
        return {}
    if gain.runs is None:  # every reach and stderr shrinks with the root of n
        times = max(smallest_detectable(value, tail) / distance for value, distance, tail in settled) ** 2
        n = max(gain.n + 1, math.ceil(gain.n * times))
        return {"n_to_decide": n if n <= 1000 * gain.n else None}

    def decides(questions: float, runs: int) -> bool:
        expected = (
            (value.runs.projected(questions, runs), distance, tail) for value, distance, tail in settled if value.runs
        )
        return all(of.reach(tail) + quantile(POWER) * of.stderr <= distance for of, distance, tail in expected)

    present = gain.runs.count
    n = least(lambda n: decides(n / gain.n, present), gain.n + 1, 1000 * gain.n)
    return {"n_to_decide": n, "seeds_to_decide": least(lambda runs: decides(1.0, runs), present + 1, 1000)}


def least(holds: Callable[[int], bool], first: int, last: int) -> int | None:
    """Return the smallest integer from `first` to `last` for which a monotone condition holds; None if none does."""
    numbers = range(first, last + 1)
    index = bisect_left(numbers, True, key=holds)
    return numbers[index] if index < len(numbers) else None
