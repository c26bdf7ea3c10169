"""The verdict on gain survival: the gain survives, it is lost, or this many questions cannot tell.

A non-inferiority test: "no significant loss" is no evidence of survival, so survival has to be shown against a margin.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from qrl.stats import LEVEL, Estimate, quantile, signed

TAIL = (1 - LEVEL) / 2  # on either side of a two-sided interval

POWER = 0.80  # of "the smallest effect this n could have seen" and "the n that would decide"
MIN_MARGIN = 0.02  # accuracy: a smaller loss than this is of no practical interest
KINK = 2 * MIN_MARGIN  # the gain at which the default margin turns from `MIN_MARGIN` into half the gain
FLOOR, CEILING = 0.05, 0.95  # accuracy: beyond these a cell has no room to lose or to gain


@dataclass(frozen=True)
class Verdict:
    """What a study may say about the gain under one scheme, and why.

    `margin` is the loss of accuracy that still counts as survival; `smallest_effect` the change of the gain that this n
    would have seen in four studies of five; `n_to_decide` the questions that would settle an open verdict as often, None
    where it is settled or no n would settle it; `seeds_to_decide` the training runs that would at this n, where there are
    several; `p_value` the one-sided one against the margin, None where there was nothing to test.
    """

    verdict: Literal["survives", "lost", "inconclusive"]
    reason: str
    margin: float
    smallest_effect: float
    n_to_decide: int | None = None
    seeds_to_decide: int | None = None
    p_value: float | None = None


def default_margin(gain: float) -> float:
    """Half the full-precision gain, at least 0.02: what survives keeps more than half of what training gave."""
    return max(MIN_MARGIN, gain / 2)


def judge(
    gain: Estimate, survival: Estimate, kept: Estimate, accuracies: dict[str, float], margin: float | None = None
) -> Verdict:
    """The verdict on gain survival under one scheme.

    `survives` if the one-sided 95 % lower bound of gain survival lies above −margin, `lost` if the upper bound lies below
    it, else `inconclusive`; always `inconclusive` where the full-precision gain's interval is not above 0 or a cell sits
    at floor or ceiling, and instead of `survives` where the gain is no larger than the margin. What the default margin, an
    *estimated* one, adds to that is in `_against`.

    Args:
        gain: full-precision gain, g_fp − b_fp.
        survival: (g_q − b_q) − (g_fp − b_fp).
        kept: (g_q − b_q) − ½ (g_fp − b_fp), above 0 where more than half of the gain is kept.
        accuracies: cell's name → accuracy, of the four cells.
        margin: loss of accuracy that still counts as survival; None takes `default_margin`.
    """
    tested = _against(gain, survival, kept, margin)
    margin, smallest = tested.margin, seen(survival)
    edge = _edge(accuracies)
    if edge:
        return Verdict("inconclusive", edge, margin, smallest)
    if not gain.low > 0:
        interval = f"{signed(gain.estimate)} [{signed(gain.low)}, {signed(gain.high)}]"
        reason = f"the full-precision gain, {interval}, is not shown to be above 0: no gain, nothing to survive"
        return Verdict("inconclusive", reason, margin, smallest, *_to_decide(gain, tested))
    if tested.p_survives < 1 - LEVEL and gain.estimate <= margin:
        reason = f"the full-precision gain, {signed(gain.estimate)}, is no larger than the margin, {margin:.3f}: losing all of it would pass for survival"
        return Verdict("inconclusive", reason, margin, smallest, p_value=tested.p_survives)
    if tested.p_survives < 1 - LEVEL:
        bound = f"the one-sided 95 % lower bound of gain survival, {signed(survival.lower)}"
        if tested.tail == TAIL:
            bound = f"the lower end of gain survival's 95 % interval, {signed(survival.low)} (two margins could hold, so each gets half the error),"
        reason = f"{bound.rstrip(',')}, lies above −margin, {signed(-margin)}"
        return Verdict("survives", reason, margin, smallest, p_value=tested.p_survives)
    if tested.p_lost < 1 - LEVEL:
        reason = f"the one-sided 95 % upper bound of gain survival, {signed(survival.upper)}, lies below −margin, {signed(-margin)}"
        return Verdict("lost", reason, margin, smallest, p_value=tested.p_lost)
    reason = f"the one-sided 95 % bounds of gain survival, {signed(survival.lower)} and {signed(survival.upper)}, lie on both sides of −margin, {signed(-margin)}"
    if not survival.lower <= -margin <= survival.upper:
        reason = f"the margin, {margin:.3f}, follows a gain that is itself estimated, and with that error counted −margin lies within the bounds"
    return Verdict(
        "inconclusive", reason, margin, smallest, *_to_decide(gain, tested), min(tested.p_survives, tested.p_lost)
    )


@dataclass(frozen=True)
class _Tested:
    """Both claims' p-values against a margin, and the estimates and bounds that a larger study would have to tell apart."""

    margin: float
    p_survives: float
    p_lost: float
    tests: list[tuple[Estimate, float]]
    tail: float = 1 - LEVEL


def _against(gain: Estimate, survival: Estimate, kept: Estimate, margin: float | None) -> _Tested:
    """Gain survival against its margin, with the margin's own error where it has one.

    Half an *estimated* gain is a margin with an error: there the bound of `kept` must agree, which asks the same question with
    that error counted in. And which of the two the margin is, 0.02 or half the gain, is itself estimated: as long as the
    gain's interval holds 0.04, where they meet, surviving means to lose less than either, so either may show it, at
    half the error each; and being lost to lose more than both, so both must.

    Source: a non-inferiority test, with a fixed margin or with one that is a share of an estimated effect (the fixed-margin
        and the synthesis method of FDA, Non-Inferiority Clinical Trials to Establish Effectiveness, 2016). Claims of the form
        "either" and "both": union-intersection and intersection-union tests, Casella and Berger, Statistical Inference,
        2nd ed. (2002), section 8.2.3, the former with Bonferroni's bound.
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
    for name, rate in accuracies.items():
        if not FLOOR <= rate <= CEILING:
            place, room = ("floor", "lose") if rate < FLOOR else ("ceiling", "gain")
            return f"{name} sits at the {place} (accuracy {rate:.3f}), without room to {room}, so differences between cells mean little"
    return None


def seen(contrast: Estimate, tail: float = TAIL, power: float = POWER) -> float:
    """The smallest true value of a contrast whose bound, with error `tail`, clears 0 with this power.

    Source: a z test's detectable effect, (z_tail + z_power) σ, with the estimate's own reach in place of z_tail σ.
    """
    return max(contrast.reach(tail, upwards=upwards) for upwards in (False, True)) + quantile(power) * contrast.stderr


def _to_decide(gain: Estimate, tested: _Tested) -> tuple[int | None, int | None]:
    """Questions, and training runs where there are several, at which the gain and the verdict would both be settled with
    `POWER`, if the estimates were the truth; None where no number up to a thousand times the present one would."""
    settled = [(gain, gain.estimate, TAIL)] + [
        (test, abs(test.estimate - bound), tested.tail) for test, bound in tested.tests
    ]
    if gain.estimate <= 0 or min(distance for _, distance, _ in settled) < 1e-9:
        return None, None

    if gain.runs is None:  # every reach and stderr shrinks with the root of n
        times = max(seen(value, tail) / distance for value, distance, tail in settled) ** 2
        n = max(gain.n + 1, math.ceil(gain.n * times))
        return (n if n <= 1000 * gain.n else None), None

    def decides(questions: float = 1.0, runs: int | None = None) -> bool:
        return all(seen(value.projected(questions, runs), tail) <= distance for value, distance, tail in settled)

    n = least(lambda n: decides(questions=n / gain.n), gain.n + 1, 1000 * gain.n)
    return n, least(lambda runs: decides(runs=runs), gain.runs.count + 1, 1000)


def least(holds: Callable[[int], bool], first: int, last: int) -> int | None:
    """The smallest whole number from `first` to `last` at which something that stays true becomes true; None: at none."""
    if not holds(last):
        return None
    while first < last:
        middle = (first + last) // 2
        first, last = (first, middle) if holds(middle) else (middle + 1, last)
    return first
