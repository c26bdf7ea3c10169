"""Planning before any GPU time: the questions and training runs that a verdict needs, or what a given number can show.

With `n`: what n questions can show. With `effect`: how many questions show an effect of that size. With neither: how
many questions show the gain, and give the verdict, that the assumptions expect.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from qrl.errors import BadInput
from qrl.plan.assumptions import Assumptions, check_range, largest_correlation, of_pilot
from qrl.plan.power import GAIN, SURVIVAL, chance_above, chance_decided, chance_shown, half_width
from qrl.stats.verdict import CEILING, FLOOR, POWER, least

__all__ = ["Assumptions", "Plan", "Row", "make", "of_pilot"]

SEEDS = (2, 3, 4, 5, 6, 8, 10, 15, 20)  # tried if a spread between runs is expected and no number of runs is given
MOST_QUESTIONS = 10**7


@dataclass(frozen=True)
class Row:
    """The plan for one number of training runs; a number is None if nothing up to the limit reaches the power.

    Attributes:
        seeds: training runs.
        n: questions of each run; None if that is what is computed.
        n_gain, n_verdict: questions that show the gain, and that give the expected verdict, with the wanted power.
        n_effect_gain, n_effect_survival: questions that show a gain, and a change of the gain, of the given effect.
        power_gain, power_verdict: probability of each at n.
        half_gain, half_survival: typical half-width of their 95 % intervals at n, accuracy.
        least_gain, least_change, largest_drop: smallest gain and smallest change of the gain that n shows, and the
            largest loss of gain with the verdict `survives`, with the wanted power, accuracy.
    """

    seeds: int
    n: int | None = None
    n_gain: int | None = None
    n_verdict: int | None = None
    n_effect_gain: int | None = None
    n_effect_survival: int | None = None
    power_gain: float | None = None
    power_verdict: float | None = None
    half_gain: float | None = None
    half_survival: float | None = None
    least_gain: float | None = None
    least_change: float | None = None
    largest_drop: float | None = None


@dataclass(frozen=True)
class Plan:
    """The assumptions, the given n or effect, and a row per number of training runs.

    `verdict` is the one that the assumptions lead to, `survives` or `lost`; None if the expected loss equals the
    margin.
    """

    assumed: Assumptions
    power: float
    n: int | None
    effect: float | None
    verdict: str | None
    rows: tuple[Row, ...]

    def chances(self, n: int, seeds: int) -> tuple[float, float]:
        """Return the probability that the gain shows, and that of the expected verdict."""
        decided = chance_decided(self.assumed, n, seeds, verdict=self.verdict) if self.verdict else 0.0
        return chance_shown(self.assumed, n, seeds), decided


def make(
    assumed: Assumptions,
    *,
    n: int | None = None,
    effect: float | None = None,
    power: float = POWER,
    seeds: int | None = None,
) -> Plan:
    """Return a plan for a study, by the rule that its verdict will follow.

    Args:
        assumed: the study as it is expected to be.
        n: questions of each training run, if given.
        effect: a gain, or a change of the gain, to be shown; accuracy.
        power: wanted probability.
        seeds: training runs; None for one, or for several numbers to choose from if runs are expected to differ.

    Raises:
        BadInput: a number is out of range, or both n and effect are given.
    """
    assumed = assumed.checked()
    if n is not None and effect is not None:
        choice = "give n to learn which effect it shows, or the effect to learn which n it needs"
        raise BadInput(f"plan accepts --n or --effect, not both: {choice}.")
    if n is not None and not 10 <= n <= MOST_QUESTIONS:
        raise BadInput(f"'n' is {n}, but must be from 10 to {MOST_QUESTIONS:,}: questions of each training run.")
    check_range("power", power, 0.5, 0.999, "the probability that the study shows a true effect")
    left = CEILING - assumed.base_accuracy
    if effect is not None and not 0 < effect <= left:
        raise BadInput(f"'effect' is {effect:g}, but must be above 0 and at most {left:.3g}, the room to the ceiling.")
    if seeds is not None and not 1 <= seeds <= 1000:
        raise BadInput(f"'seeds' is {seeds}, but must be from 1 to 1000: training runs.")
    spread = assumed.between_gain > 0 or assumed.between_survival > 0
    if seeds == 1 and spread:
        problem = "One training run cannot measure the spread between runs"
        raise BadInput(f"{problem}, so --between-seed-sd needs --seeds of 2 or more: omit one of the two.")
    distance = assumed.expected_margin - assumed.drop
    verdict = None if abs(distance) < 1e-9 else "survives" if distance > 0 else "lost"
    plan = Plan(assumed, power, n, effect, verdict, ())
    counts = (seeds,) if seeds else SEEDS if spread else (1,)
    return replace(plan, rows=tuple(_row(plan, count) for count in counts))


def _row(plan: Plan, seeds: int) -> Row:
    assumed, power, n, effect = plan.assumed, plan.power, plan.n, plan.effect
    if n is not None:
        shown, decided = plan.chances(n, seeds)
        left = CEILING - assumed.base_accuracy
        return Row(
            seeds,
            n,
            power_gain=shown,
            power_verdict=decided,
            half_gain=half_width(assumed, n, seeds, GAIN),
            half_survival=half_width(assumed, n, seeds, SURVIVAL),
            least_gain=_smallest(lambda gain: chance_shown(_with_gain(assumed, gain), n, seeds) >= power, left),
            least_change=_smallest(lambda change: chance_above(assumed, n, seeds, SURVIVAL, change) >= power, 1.0),
            largest_drop=_largest_drop(assumed, n, seeds, power),
        )
    if effect is not None:
        n_gain = _questions(partial(chance_shown, _with_gain(assumed, effect), seeds=seeds), power)
        n_survival = _questions(partial(chance_above, assumed, seeds=seeds, which=SURVIVAL, truth=effect), power)
        return Row(seeds, n_effect_gain=n_gain, n_effect_survival=n_survival)
    decides = partial(chance_decided, assumed, seeds=seeds, verdict=plan.verdict)
    n_verdict = _questions(decides, power) if plan.verdict else None
    return Row(seeds, n_gain=_questions(partial(chance_shown, assumed, seeds=seeds), power), n_verdict=n_verdict)


def _questions(chance: Callable[[int], float], power: float) -> int | None:
    return least(lambda n: chance(n) >= power, 10, MOST_QUESTIONS)


def _with_gain(assumed: Assumptions, gain: float) -> Assumptions:
    """Return the same study with another gain, none of it lost, and at most the correlation that it can have."""
    most = 0.999 * largest_correlation(assumed.base_accuracy, assumed.base_accuracy + gain)
    return replace(assumed, gain=gain, drop=0.0, correlation=min(assumed.correlation, most))


def _largest_drop(assumed: Assumptions, n: int, seeds: int, power: float) -> float | None:
    """Return the largest loss of gain with which `survives` still has this power; None if no loss has it."""

    trained = assumed.base_accuracy + assumed.gain

    def with_drop(drop: float) -> Assumptions:
        most = 0.999 * largest_correlation(trained, trained - drop) if drop else 1.0
        return replace(assumed, drop=drop, scheme_correlation=min(assumed.scheme_correlation, most))

    top = min(assumed.expected_margin, trained - FLOOR)
    left = _smallest(lambda less: chance_decided(with_drop(top - less), n, seeds) >= power, top)
    return None if left is None else top - left


def _smallest(holds: Callable[[float], bool], top: float) -> float | None:
    """Return the smallest number up to `top`, to four decimals, for which a monotone condition holds."""
    step = least(lambda step: holds(min(top, step * 1e-4)), 1, max(1, round(top / 1e-4)))
    return None if step is None else min(top, step * 1e-4)
