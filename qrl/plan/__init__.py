"""Before any GPU time: how many questions, and training runs, a verdict will need, or what those at hand can show.

n       given: what so many questions can see
effect  given: how many questions it takes to see it
neither        how many it takes to show the gain, and to reach the verdict, that the assumptions expect
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from qrl.errors import BadInput
from qrl.plan.assumptions import Assumptions, largest_correlation, of_pilot
from qrl.plan.power import chance_decided, chance_seen, chance_shown, half_width
from qrl.stats.verdict import CEILING, FLOOR, POWER, least

__all__ = ["Assumptions", "Plan", "Row", "make", "of_pilot"]

SEEDS = (
    2,
    3,
    4,
    5,
    6,
    8,
    10,
    15,
    20,
)  # looked at where a spread between runs is expected and no number of runs is given
MOST_QUESTIONS = 10**7


@dataclass(frozen=True)
class Row:
    """What a number of training runs means for the plan; numbers are None where no size, or no effect, does it.

    Attributes:
        seeds: training runs.
        n: questions of each run; None where it is asked for.
        n_gain, n_verdict: questions that show the gain, and that reach the expected verdict, with the wanted power.
        n_effect_gain, n_effect_survival: questions that show a gain, and a change of the gain, of the wanted effect.
        power_gain, power_verdict: the chances of both at n.
        half_gain, half_survival: half of the 95 % interval that each will typically have at n, accuracy.
        least_gain, least_change, largest_drop: smallest gain and change of the gain that n shows, largest loss of gain under
            which it still says `survives`, with the wanted power, accuracy.
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
    """The assumptions, what was asked, and a row per number of training runs.

    `verdict` is the one that the assumptions lead to, `survives` or `lost`; None where the loss is the margin itself.
    """

    assumed: Assumptions
    power: float
    n: int | None
    effect: float | None
    verdict: str | None
    rows: tuple[Row, ...]

    def chances(self, n: int, seeds: int) -> tuple[float, float]:
        """Chance that the gain shows, and of the expected verdict."""
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
    """A plan for a study, by the rule that its verdict will follow.

    Args:
        assumed: the study as it is expected to be.
        n: questions of each training run, if they are given.
        effect: a gain, or a change of the gain, to be seen; accuracy.
        power: wanted chance.
        seeds: training runs; None is one, or several numbers to choose from where a spread between runs is expected.

    Raises:
        BadInput: a number out of its range, or both n and effect.
    """
    assumed = assumed.checked()
    if n is not None and effect is not None:
        raise BadInput(
            "plan takes --n or --effect, not both: give n to learn which effect it sees, or the effect to learn which n it needs."
        )
    if n is not None and not 10 <= n <= MOST_QUESTIONS:
        raise BadInput(f"'n' is {n}, but must lie from 10 to {MOST_QUESTIONS:,}: questions of each training run.")
    if not 0.5 <= power <= 0.999:
        raise BadInput(
            f"'power' is {power:g}, but must lie from 0.5 to 0.999: the chance that the study shows what is there."
        )
    room = CEILING - assumed.base_accuracy
    if effect is not None and not 0 < effect <= room:
        raise BadInput(
            f"'effect' is {effect:g}, but must lie between 0 and {room:.3g}, what is left to the ceiling: an accuracy."
        )
    if seeds is not None and not 1 <= seeds <= 1000:
        raise BadInput(f"'seeds' is {seeds}, but must lie from 1 to 1000: training runs.")
    spread = assumed.between_gain > 0 or assumed.between_survival > 0
    if seeds == 1 and spread:
        raise BadInput(
            "One training run cannot tell how much runs differ, so --between-seed-sd needs --seeds of 2 or more: leave out one of the two."
        )
    away = assumed.expected_margin - assumed.drop
    verdict = None if abs(away) < 1e-9 else "survives" if away > 0 else "lost"
    plan = Plan(assumed, power, n, effect, verdict, ())
    counts = (seeds,) if seeds else SEEDS if spread else (1,)
    return replace(plan, rows=tuple(_row(plan, count) for count in counts))


def _row(plan: Plan, seeds: int) -> Row:
    assumed, power = plan.assumed, plan.power
    if plan.n is not None:
        shown, decided = plan.chances(plan.n, seeds)
        return Row(
            seeds,
            plan.n,
            power_gain=shown,
            power_verdict=decided,
            half_gain=half_width(assumed, plan.n, seeds, 0),
            half_survival=half_width(assumed, plan.n, seeds, 1),
            least_gain=_edge(
                lambda gain: chance_shown(_with_gain(assumed, gain), plan.n, seeds) >= power,
                CEILING - assumed.base_accuracy,
            ),
            least_change=_edge(lambda change: chance_seen(assumed, plan.n, seeds, change) >= power, 1.0),
            largest_drop=_largest_drop(assumed, plan.n, seeds, power),
        )
    if plan.effect is not None:
        of_effect = _with_gain(assumed, plan.effect)
        return Row(
            seeds,
            n_effect_gain=_questions(partial(chance_shown, of_effect, seeds=seeds), power),
            n_effect_survival=_questions(lambda n: chance_seen(assumed, n, seeds, plan.effect), power),
        )
    return Row(
        seeds,
        n_gain=_questions(partial(chance_shown, assumed, seeds=seeds), power),
        n_verdict=_questions(partial(chance_decided, assumed, seeds=seeds, verdict=plan.verdict), power)
        if plan.verdict
        else None,
    )


def _questions(chance: Callable[[int], float], power: float) -> int | None:
    return least(lambda n: chance(n) >= power, 10, MOST_QUESTIONS)


def _with_gain(assumed: Assumptions, gain: float) -> Assumptions:
    """The same study with another gain, none of it lost; correlations that it cannot have become the largest it can."""
    base, trained = assumed.base_accuracy, assumed.base_accuracy + gain
    return replace(
        assumed, gain=gain, drop=0.0, correlation=min(assumed.correlation, 0.999 * largest_correlation(base, trained))
    )


def _largest_drop(assumed: Assumptions, n: int, seeds: int, power: float) -> float | None:
    """The largest loss of gain under which `survives` still has this power; None where not even no loss has it."""

    def with_drop(drop: float) -> Assumptions:
        trained = assumed.base_accuracy + assumed.gain
        most = 0.999 * largest_correlation(trained, trained - drop) if drop else 1.0
        return replace(assumed, drop=drop, scheme_correlation=min(assumed.scheme_correlation, most))

    top = min(assumed.expected_margin, assumed.base_accuracy + assumed.gain - FLOOR)
    left = _edge(lambda less: chance_decided(with_drop(top - less), n, seeds) >= power, top)
    return None if left is None else top - left


def _edge(holds: Callable[[float], bool], top: float, digits: float = 1e-4) -> float | None:
    """The smallest number up to `top` at which something that stays true becomes true, to four decimals."""
    found = least(lambda step: holds(min(top, step * digits)), 1, round(top / digits))
    return None if found is None else min(top, found * digits)
