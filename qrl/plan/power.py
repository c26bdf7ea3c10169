"""The probability that a study of a given size reaches its verdict, by the rule of `verdict.judge`.

Estimated gain and gain survival are treated as jointly normal, which holds from a few hundred questions on. The rule
has two conditions, a gain significantly above 0 and a bound on the right side of −margin, and the margin may be half of
the same estimated gain. So the probability is an integral over the estimated gain and, with several training runs, over
the estimated spread between runs. The corrections of `stats.tails` for few changes are left out: they are small in
studies that are large enough for a verdict.
"""

import math

import numpy as np
from scipy.special import chdtri, ndtr

from qrl.plan.assumptions import Assumptions
from qrl.stats import LEVEL, quantile
from qrl.stats.estimate import TAIL
from qrl.stats.verdict import KINK, MIN_MARGIN

GAIN, SURVIVAL, KEPT = range(3)  # contrasts, in the order of `Assumptions.moments`
NODES = 48  # of the integral over the estimated spread between runs
GRID = 2001  # of the integral over the estimated gain


def chance_shown(assumed: Assumptions, n: int, seeds: int = 1) -> float:
    """Return the probability that the 95 % interval of the full-precision gain is above 0."""
    return chance_above(assumed, n, seeds, GAIN, assumed.gain)


def chance_above(assumed: Assumptions, n: int, seeds: int, which: int, truth: float) -> float:
    """Return the probability that a contrast's 95 % interval is above 0, if `truth` is its true value."""
    stderr, reach, weights = _reaches(assumed, n, seeds, which, TAIL)
    return float(weights @ ndtr((truth - reach) / stderr))


def chance_decided(assumed: Assumptions, n: int, seeds: int = 1, *, verdict: str = "survives") -> float:
    """Return the probability of the verdict `survives`, or `lost`.

    Args:
        assumed, verdict: the study and the verdict that are expected.
        n: questions of every training run.
        seeds: training runs; 1 is about that run alone, without the spread between runs.
    """
    sign = 1.0 if verdict == "survives" else -1.0
    moments = assumed.moments() / n
    between = np.diag([assumed.between_gain**2, assumed.between_survival**2]) * (seeds > 1)
    shared = moments[:2, :2] / (seeds if assumed.own_questions else 1) + between / seeds
    stderr_gain = math.sqrt(shared[0, 0])
    slope = shared[0, 1] / shared[0, 0]
    stderr_rest = math.sqrt(max(shared[1, 1] - slope * shared[0, 1], 1e-18))
    _, gain_reach, weights = _reaches(assumed, n, seeds, GAIN, TAIL)
    z = np.linspace(-6, 6, GRID)
    density = np.exp(-(z**2) / 2)
    density /= density.sum()
    gain = (assumed.gain + stderr_gain * z)[:, None]  # (GRID, 1); with the nodes of a spread (GRID, NODES)
    margin = np.maximum(MIN_MARGIN, gain / 2) if assumed.margin is None else np.full_like(gain, assumed.margin)
    shown = gain > gain_reach
    if verdict == "survives":
        shown &= gain > margin  # survival of a smaller gain means nothing
    below, above = gain + gain_reach <= KINK, gain - gain_reach >= KINK
    regimes = {"fixed": below, "half": above, "either": ~(below | above)}
    if assumed.margin is not None:
        regimes = {"fixed": np.ones_like(shown)}
    expected = -assumed.drop + slope * stderr_gain * z[:, None]
    chance = 0.0
    for regime, where in regimes.items():
        bound = _bound(assumed, n, seeds, gain, margin, regime, sign)
        decided = ndtr((sign * expected - bound) / stderr_rest) @ weights
        chance += float(density @ (((where & shown) @ weights) * decided))
    return chance


def _bound(
    assumed: Assumptions, n: int, seeds: int, gain: np.ndarray, margin: np.ndarray, regime: str, sign: float
) -> np.ndarray:
    """Return (GRID, NODES) the estimated gain survival that gives the verdict: the inverse of `verdict._against`.

    Args:
        gain, margin: (GRID, 1) as estimated.
        regime: by the gain's interval the margin is `fixed`, `half` the gain, or `either`.
        sign: 1 for `survives`; −1 for `lost`, where the result is for the negative of gain survival.
    """
    tail = TAIL if (regime, sign) == ("either", 1.0) else 1 - LEVEL
    _, of_survival, _ = _reaches(assumed, n, seeds, SURVIVAL, tail)
    fixed = of_survival - sign * margin
    if regime == "fixed":
        return fixed
    _, of_kept, _ = _reaches(assumed, n, seeds, KEPT, tail)
    both = np.maximum(fixed, of_kept - sign * gain / 2)
    return np.minimum(both, of_survival - MIN_MARGIN) if (regime, sign) == ("either", 1.0) else both


def _reaches(assumed: Assumptions, n: int, seeds: int, which: int, tail: float) -> tuple[float, np.ndarray, np.ndarray]:
    """Return a contrast's standard error; (NODES,) distances to its bound with error `tail`; (NODES,) their weights.

    The nodes are values of the estimated spread between runs, the distances those of `stats.Runs.reach`. One run has
    one node.

    Source: the spread's degrees of freedom times its ratio to the truth follow χ² with S − 1 degrees of freedom.
    """
    question = assumed.moments()[which, which] / n
    of_questions = quantile(1 - tail, n - 1)
    if seeds == 1:
        return math.sqrt(question), np.array([of_questions * math.sqrt(question)]), np.ones(1)
    of_gain, of_survival = assumed.between_gain**2, assumed.between_survival**2
    between = (of_gain, of_survival, of_survival + of_gain / 4)[which]
    own, shared = (question, 0.0) if assumed.own_questions else (0.0, question)
    spread = (between + own) * chdtri(seeds - 1, 1 - (np.arange(NODES) + 0.5) / NODES) / (seeds - 1)
    both = quantile(1 - tail, seeds - 1) ** 2 * spread / seeds + of_questions**2 * shared
    reach = np.sqrt(np.maximum(both, of_questions**2 * (own / seeds + shared)))
    return math.sqrt((between + own) / seeds + shared), reach, np.full(NODES, 1 / NODES)


def half_width(assumed: Assumptions, n: int, seeds: int, which: int) -> float:
    """Return the typical half-width of a contrast's 95 % interval: the median over estimated spreads."""
    _, reach, _ = _reaches(assumed, n, seeds, which, TAIL)
    return float(np.median(reach))
