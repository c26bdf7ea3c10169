"""Planning before any GPU time: the questions and training runs that a verdict needs, or what a given number can show.

With `n`: what n questions can show. With `effect`: how many questions show an effect of that size. With neither: how
many questions show the gain, and give the verdict, that the assumptions expect.
"""

from dataclasses import dataclass, replace

from qrl.errors import BadInput
from qrl.plan import power as by_simulation
from qrl.plan.assumptions import Assumptions, check_range, of_pilot
from qrl.plan.power import LEAST_QUESTIONS, MOST_QUESTIONS, Chances
from qrl.stats.simulate import TRAINED_Q, first_of, two_digits
from qrl.stats.verdict import POWER, Word

__all__ = ["Assumptions", "Plan", "Row", "make", "of_pilot"]

SEEDS = (2, 3, 5, 10, 20)  # tried if a spread between runs is expected and no number of runs is given
SMALLEST = 1e-4  # change of accuracy that is looked for


@dataclass(frozen=True)
class Row:
    """The plan for one number of training runs; a number is None if nothing up to the limit reaches the power.

    Attributes:
        seeds: training runs.
        n: questions of each run; None if that is what is computed.
        n_gain, n_verdict: questions that show the gain, and that give the expected verdict, with the wanted power;
            two significant digits.
        n_effect_gain, n_effect_survival: questions that show a gain, and a change of the gain, of the given effect.
        power_gain, power_verdict: probability of each at n.
        words: verdict → its probability at n.
        half_gain, half_survival: typical half-width of their 95 % intervals at n, accuracy.
        least_gain, least_change, largest_drop: smallest gain and smallest change of the gain that n shows, and the
            largest loss of gain with the verdict `survives`, with the wanted power, accuracy; two significant digits.
    """

    seeds: int
    n: int | None = None
    n_gain: int | None = None
    n_verdict: int | None = None
    n_effect_gain: int | None = None
    n_effect_survival: int | None = None
    power_gain: float | None = None
    power_verdict: float | None = None
    words: dict[Word, float] | None = None
    half_gain: float | None = None
    half_survival: float | None = None
    least_gain: float | None = None
    least_change: float | None = None
    largest_drop: float | None = None


@dataclass(frozen=True)
class Plan:
    """The assumptions, the given n or effect, and a row per number of training runs.

    `verdict` is the one that a large enough study gives. `boundary` is the limit between two verdicts that the expected
    loss equals, if any: no n decides on which side of it the truth is.
    """

    assumed: Assumptions
    power: float
    n: int | None
    effect: float | None
    verdict: Word
    boundary: str | None
    rows: tuple[Row, ...]

    def chances(self, n: int, seeds: int, *, studies: int) -> Chances:
        """Return the probability that the gain shows, and that of each verdict."""
        return by_simulation.chances(self.assumed, n, seeds, studies=studies)


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
    if n is not None and not LEAST_QUESTIONS <= n <= MOST_QUESTIONS:
        limits = f"from {LEAST_QUESTIONS} to {MOST_QUESTIONS:,}"
        raise BadInput(f"'n' is {n}, but must be {limits}: questions of each training run.")
    check_range("power", power, 0.5, 0.999, "the probability that the study shows a true effect")
    largest_gain = 1 - assumed.base_accuracy
    if effect is not None and not 0 < effect <= largest_gain:
        limit = f"at most {largest_gain:.3g}, what the base leaves to gain"
        raise BadInput(f"'effect' is {effect:g}, but must be above 0 and {limit}.")
    if seeds is not None and not 1 <= seeds <= 1000:
        raise BadInput(f"'seeds' is {seeds}, but must be from 1 to 1000: training runs.")
    do_runs_differ = assumed.between_gain > 0 or assumed.between_survival > 0
    if seeds == 1 and do_runs_differ:
        problem = "One training run cannot measure the spread between runs"
        raise BadInput(f"{problem}, so --between-seed-sd needs --seeds of 2 or more: omit one of the two.")

    seed_counts: tuple[int, ...] = (1,)
    if seeds:
        seed_counts = (seeds,)
    elif do_runs_differ:
        seed_counts = SEEDS
    plan = Plan(assumed, power, n, effect, assumed.expected_verdict, assumed.boundary, ())
    return replace(plan, rows=tuple(_row(plan, count) for count in seed_counts))


def _row(plan: Plan, seeds: int) -> Row:
    """Return the row of a number of training runs, for whichever of n and effect is given."""
    if plan.n is not None:
        return _row_of_n(plan, seeds, plan.n)
    if plan.effect is not None:
        return _row_of_effect(plan, seeds, plan.effect)
    assumed = plan.assumed
    gives_verdict = by_simulation.gives(plan.verdict, assumed.margin)
    return Row(
        seeds,
        n_gain=by_simulation.questions(assumed, seeds, by_simulation.shows_gain, plan.power),
        n_verdict=by_simulation.questions(assumed, seeds, gives_verdict, plan.power),
    )


def _row_of_n(plan: Plan, seeds: int, n: int) -> Row:
    """Return what n questions show."""
    assumed = plan.assumed
    power = plan.power
    chances = by_simulation.chances(assumed, n, seeds)
    half_gain, half_survival = by_simulation.half_widths(assumed, n, seeds)

    def shows_gain(gain: float) -> bool:
        return by_simulation.is_shown_often(_with_gain(assumed, gain), n, seeds, by_simulation.shows_gain, power)

    def shows_loss(loss: float) -> bool:
        return by_simulation.is_shown_often(replace(assumed, drop=loss), n, seeds, by_simulation.shows_loss, power)

    # Quantization can cost the trained model at most all of its accuracy.
    largest_loss = float(assumed.rates()[TRAINED_Q]) + assumed.drop
    return Row(
        seeds,
        n,
        power_gain=chances.shown,
        power_verdict=chances.words[plan.verdict],
        words=chances.words,
        half_gain=half_gain,
        half_survival=half_survival,
        least_gain=first_of(_possible_gains(assumed), shows_gain),
        least_change=first_of(_possible_losses(assumed, largest_loss), shows_loss),
        largest_drop=_largest_drop(assumed, n, seeds, power),
    )


def _row_of_effect(plan: Plan, seeds: int, effect: float) -> Row:
    """Return how many questions show an effect."""
    with_gain = _with_gain(plan.assumed, effect)
    n_gain = None
    if with_gain.is_possible():
        n_gain = by_simulation.questions(with_gain, seeds, by_simulation.shows_gain, plan.power)

    with_loss = replace(plan.assumed, drop=effect)
    n_survival = None
    if with_loss.is_possible():
        n_survival = by_simulation.questions(with_loss, seeds, by_simulation.shows_loss, plan.power)
    return Row(seeds, n_effect_gain=n_gain, n_effect_survival=n_survival)


def _with_gain(assumed: Assumptions, gain: float) -> Assumptions:
    """Return the same study with another gain, none of it lost."""
    return replace(assumed, gain=gain, drop=0.0)


def _largest_drop(assumed: Assumptions, n: int, seeds: int, power: float) -> float | None:
    """Return the largest loss of gain with which `survives` still has this power; None if no loss has it."""
    survives = by_simulation.gives("survives", assumed.margin)

    def is_too_large(drop: float) -> bool:
        return not by_simulation.is_shown_often(replace(assumed, drop=drop), n, seeds, survives, power)

    drops = [0.0, *_possible_losses(assumed, assumed.expected_margin)]
    too_large = first_of(drops, is_too_large)
    if too_large is None:
        return drops[-1]
    return max((drop for drop in drops if drop < too_large), default=None)


def _possible_gains(assumed: Assumptions) -> list[float]:
    """Return the gains that are tried: those that questions can have."""
    gains = two_digits(SMALLEST, 1 - assumed.base_accuracy)
    return [gain for gain in gains if assumed.pilot is None or _with_gain(assumed, gain).is_possible()]


def _possible_losses(assumed: Assumptions, largest: float) -> list[float]:
    """Return the losses up to `largest` that are tried: those that questions can have."""
    losses = two_digits(SMALLEST, largest)
    return [loss for loss in losses if assumed.pilot is None or replace(assumed, drop=loss).is_possible()]
