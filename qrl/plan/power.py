"""How likely a study of a given size is to reach its verdict, by the rule of `verdict.judge` itself.

Estimated gain and gain survival are taken as jointly normal, which they are from a few hundred questions on. The rule asks
for two things at once, a gain shown to be above 0 and a bound on the right side of −margin, where the margin may be half
of that same estimated gain; so the chance is an integral over the estimated gain, and, where several training runs are
planned, over how large the spread between runs happens to be estimated. What `stats.tails` adds where few answers change is
left out: it is small in studies that are large enough for a verdict.
"""

from __future__ import annotations

import math

import numpy as np

from qrl.plan.assumptions import Assumptions
from qrl.stats import LEVEL, quantile
from qrl.stats.verdict import KINK, MIN_MARGIN, TAIL

NODES = 48  # of the integral over the estimated spread between runs
GRID = 2001  # of the integral over the estimated gain


def chance_shown(assumed: Assumptions, n: int, seeds: int = 1) -> float:
    """Chance that the full-precision gain's 95 % interval lies above 0."""
    from scipy.special import ndtr

    stderr, reach, weights = _reaches(assumed, n, seeds, 0, TAIL)
    return float(weights @ ndtr((assumed.gain - reach) / stderr))


def chance_decided(assumed: Assumptions, n: int, seeds: int = 1, *, verdict: str = "survives") -> float:
    """Chance of the verdict `survives`, or `lost`.

    Args:
        assumed: the study as it is expected to be.
        n: questions of every training run.
        seeds: training runs; 1 speaks of this one run, and leaves out what runs differ by.
    """
    from scipy.special import ndtr

    sign = 1.0 if verdict == "survives" else -1.0
    moments, between = (
        assumed.moments() / n,
        np.diag([assumed.between_gain**2, assumed.between_survival**2]) if seeds > 1 else np.zeros((2, 2)),
    )
    shared = moments[:2, :2] / (seeds if assumed.own_questions else 1) + between / seeds
    stderr_gain = math.sqrt(shared[0, 0])
    slope = shared[0, 1] / shared[0, 0]
    stderr_rest = math.sqrt(max(shared[1, 1] - slope * shared[0, 1], 1e-18))
    _, gain_reach, gain_weights = _reaches(assumed, n, seeds, 0, TAIL)
    _, _, weights = _reaches(assumed, n, seeds, 1, TAIL)
    z = np.linspace(-6, 6, GRID)
    density = np.exp(-(z**2) / 2)
    density /= density.sum()
    gain = (assumed.gain + stderr_gain * z)[:, None]  # (GRID, 1), beside the nodes of a spread: (GRID, NODES)
    margin = np.maximum(MIN_MARGIN, gain / 2) if assumed.margin is None else np.full_like(gain, assumed.margin)
    shown = gain > gain_reach
    if verdict == "survives":
        shown &= gain > margin  # a smaller gain's survival says nothing
    below, above = gain + gain_reach <= KINK, gain - gain_reach >= KINK
    regimes = (
        {"fixed": below, "half": above, "either": ~(below | above)}
        if assumed.margin is None
        else {"fixed": np.ones_like(shown)}
    )
    expected = -assumed.drop + slope * stderr_gain * z[:, None]
    chance = 0.0
    for regime, where in regimes.items():
        bound = _bound(assumed, n, seeds, gain, margin, regime, sign)
        decided = ndtr((sign * expected - bound) / stderr_rest) @ weights
        chance += float(density @ (((where & shown) @ gain_weights) * decided))
    return chance


def _bound(
    assumed: Assumptions, n: int, seeds: int, gain: np.ndarray, margin: np.ndarray, regime: str, sign: float
) -> np.ndarray:
    """How large estimated gain survival, or for `lost` its negative, must be for the verdict: `verdict._against` the other way round.

    Args:
        gain, margin: (GRID, 1) as estimated.
        regime: whether the gain's interval leaves the margin `fixed` at its least, makes it `half` the gain, or holds both.
        sign: 1 for `survives`, −1 for `lost`.

    Returns:
        (GRID, NODES).
    """
    tail = TAIL if (regime, sign) == ("either", 1.0) else 1 - LEVEL
    _, of_survival, _ = _reaches(assumed, n, seeds, 1, tail)
    fixed = of_survival - sign * margin
    if regime == "fixed":
        return fixed
    _, of_kept, _ = _reaches(assumed, n, seeds, 2, tail)
    both = np.maximum(fixed, of_kept - sign * gain / 2)
    return np.minimum(both, of_survival - MIN_MARGIN) if (regime, sign) == ("either", 1.0) else both


def _reaches(assumed: Assumptions, n: int, seeds: int, which: int, tail: float) -> tuple[float, np.ndarray, np.ndarray]:
    """Standard error of a contrast, and how far its bound will lie from it, at nodes of the spread between runs.

    Args:
        which: 0 the gain, 1 gain survival, 2 the gain kept.
        tail: error of the bound.

    Returns:
        The standard error; (NODES,) distances, as `stats.Runs.reach` has them; (NODES,) their weights. One run has one.

    Source: the spread's degrees of freedom times its ratio to the truth follow χ² with S − 1 degrees of freedom.
    """
    from scipy.special import chdtri

    question = assumed.moments()[which, which] / n
    of_questions = quantile(1 - tail, n - 1)
    if seeds == 1:
        return math.sqrt(question), np.array([of_questions * math.sqrt(question)]), np.ones(1)
    between = (
        assumed.between_gain**2,
        assumed.between_survival**2,
        assumed.between_survival**2 + assumed.between_gain**2 / 4,
    )[which]
    own, shared = (question, 0.0) if assumed.own_questions else (0.0, question)
    spread = (between + own) * chdtri(seeds - 1, 1 - (np.arange(NODES) + 0.5) / NODES) / (seeds - 1)
    both = quantile(1 - tail, seeds - 1) ** 2 * spread / seeds + of_questions**2 * shared
    reach = np.sqrt(np.maximum(both, of_questions**2 * (own / seeds + shared)))
    return math.sqrt((between + own) / seeds + shared), reach, np.full(NODES, 1 / NODES)


def chance_seen(assumed: Assumptions, n: int, seeds: int, effect: float) -> float:
    """Chance that a change of the gain of this size shows: that the 95 % interval of gain survival leaves out 0."""
    from scipy.special import ndtr

    stderr, reach, weights = _reaches(assumed, n, seeds, 1, TAIL)
    return float(weights @ ndtr((abs(effect) - reach) / stderr))


def half_width(assumed: Assumptions, n: int, seeds: int, which: int) -> float:
    """Half of the 95 % interval that the gain (0) or gain survival (1) will typically have: the median over estimated spreads."""
    _, reach, _ = _reaches(assumed, n, seeds, which, TAIL)
    return float(np.median(reach))
