"""What a plan takes for granted: four cells' accuracies, and how a question's outcomes in them are correlated."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from qrl.errors import BadInput
from qrl.stats.verdict import CEILING, FLOOR, default_margin

# What plan takes where nothing is said. Accuracy and gain are the seed study's (68 of 100, and about what it gained); the
# correlations lie on the careful side of those in qrl-tiny's seed 0, 0.23 and 0.92.
BASE_ACCURACY, GAIN, DROP, CORRELATION, SCHEME_CORRELATION = 0.68, 0.05, 0.01, 0.2, 0.7


@dataclass(frozen=True)
class Assumptions:
    """The study as it is expected to be.

    Attributes:
        base_accuracy: of the base, at full precision and quantized alike.
        gain: accuracy that training adds at full precision.
        drop: what of the gain the scheme takes; gain survival is expected to be −drop.
        correlation: (Pearson's, φ) of a question's outcomes before and after training, under the same scheme.
        scheme_correlation: of a question's outcomes at full precision and quantized, of the same variant. Two cells that
            differ in both have the product of the two.
        margin: as `compare.margin`; None is half the gain, at least 0.02, as the study itself will estimate it.
        between_gain, between_survival: standard deviation over training runs of the true gain and gain survival, accuracy.
        own_questions: whether each training run is asked questions of its own; else all are asked the same ones, and what
            those do to the error is taken not to shrink with more runs, which errs on the careful side.
    """

    base_accuracy: float = BASE_ACCURACY
    gain: float = GAIN
    drop: float = DROP
    correlation: float | None = None
    scheme_correlation: float | None = None
    margin: float | None = None
    between_gain: float = 0.0
    between_survival: float = 0.0
    own_questions: bool = False

    def checked(self) -> Assumptions:
        """These assumptions, correlations filled in, if a study can be like that.

        Raises:
            BadInput: a number out of its range, a cell at floor or ceiling, or a correlation that no such cells can have.
        """
        rates = {
            "base": self.base_accuracy,
            "trained": self.base_accuracy + self.gain,
            "trained and quantized": self.base_accuracy + self.gain - self.drop,
        }
        _between(
            "base-accuracy",
            self.base_accuracy,
            FLOOR,
            CEILING,
            "beyond these a cell is at floor or ceiling and every verdict is inconclusive",
        )
        _between("gain", self.gain, 0, 1, "plan for the gain that you hope for", closed=False)
        for cell, rate in rates.items():
            if not FLOOR <= rate <= CEILING:
                raise BadInput(
                    f"The {cell} cell would have the accuracy {rate:.3f}, outside {FLOOR} to {CEILING}, where every verdict is inconclusive: change base-accuracy, gain or drop."
                )
        if self.margin is not None:
            _between("margin", self.margin, 0, 1, "the loss of gain that still counts as survival", closed=False)
        for name, value in (("between-seed-sd", self.between_survival), ("between-seed-sd-gain", self.between_gain)):
            _between(name, value, 0, 0.5, "the standard deviation of accuracies over training runs")
        bounds = {
            "correlation": (self.correlation, CORRELATION, largest_correlation(rates["base"], rates["trained"])),
            "scheme-correlation": (
                self.scheme_correlation,
                SCHEME_CORRELATION,
                largest_correlation(rates["trained"], rates["trained and quantized"]),
            ),
        }
        found = {}
        for name, (given, default, largest) in bounds.items():
            least_of_both = min(default, 0.99 * largest)
            value = least_of_both if given is None else given
            _between(
                name,
                value,
                0,
                min(1, largest),
                f"outcomes with these accuracies cannot be correlated by more than {largest:.3f}",
                closed=largest < 1,
            )
            found[name.replace("-", "_")] = value
        return replace(self, **found)

    @property
    def expected_margin(self) -> float:
        """The margin, at the gain that is assumed."""
        return default_margin(self.gain) if self.margin is None else self.margin

    def covariance(self) -> np.ndarray:
        """(4, 4) covariance of a question's outcomes in the cells base·full, trained·full, base·q, trained·q."""
        base, trained = self.base_accuracy, self.base_accuracy + self.gain
        rates = np.array([base, trained, base, trained - self.drop])
        sd = np.sqrt(
            np.maximum(0, rates * (1 - rates))
        )  # of a pilot whose cells are all right, rounding can leave less
        of_training = np.array([[1, self.correlation], [self.correlation, 1]])
        of_scheme = np.array([[1, self.scheme_correlation], [self.scheme_correlation, 1]])
        return np.kron(of_scheme, of_training) * np.outer(sd, sd)

    def moments(self) -> np.ndarray:
        """(3, 3) covariance, per question, of the gain, gain survival, and the gain kept (survival plus half the gain)."""
        weights = np.array([[-1, 1, 0, 0], [1, -1, -1, 1], [0.5, -0.5, -1, 1]])
        return weights @ self.covariance() @ weights.T


def largest_correlation(a: float, b: float) -> float:
    """Of two 0/1 outcomes with these rates: reached where the rarer success happens only together with the other.

    Outcomes that never vary have no correlation; 1 then rules none out.

    Source: Fréchet's bound on a joint distribution, P(both) <= min(a, b).
    """
    if not (0 < a < 1 and 0 < b < 1):
        return 1.0
    return (min(a, b) - a * b) / math.sqrt(a * (1 - a) * b * (1 - b))


def of_pilot(base_fp: ArrayLike, trained_fp: ArrayLike, base_q: ArrayLike, trained_q: ArrayLike) -> dict[str, float]:
    """Assumptions as a study's own outcomes suggest them.

    Args:
        base_fp, trained_fp, base_q, trained_q: (n,) 0 or 1, or shares of a question's samples; the same questions in order.

    Returns:
        base_accuracy, gain, drop, correlation, scheme_correlation. The last is the one that gives gain survival the
        variance which it has in these outcomes.
    """
    cells = np.array([base_fp, trained_fp, base_q, trained_q], dtype=float)
    rates = cells.mean(axis=1)
    base, gain = float(rates[0]), float(rates[1] - rates[0])
    drop = gain - float(rates[3] - rates[2])
    spread = cells[:2].std(axis=1)
    correlation = float(np.cov(cells[0], cells[1], ddof=0)[0, 1] / spread.prod()) if spread.all() else 0.0
    correlation = min(max(correlation, 0.0), 0.999 * largest_correlation(*rates[:2])) if spread.all() else 0.0
    like = Assumptions(base, gain, drop, correlation, 0.0)
    free = like.moments()[1, 1]
    full = replace(like, scheme_correlation=1.0).moments()[1, 1]
    wanted = float(np.var((cells[3] - cells[2]) - (cells[1] - cells[0])))
    scheme = (free - wanted) / (free - full) if free > full else 0.0
    most = largest_correlation(base + gain, base + gain - drop)
    return {
        "base_accuracy": base,
        "gain": gain,
        "drop": drop,
        "correlation": correlation,
        "scheme_correlation": float(np.clip(scheme, 0, 0.999 * most)),
    }


def _between(name: str, value: float, low: float, high: float, why: str, *, closed: bool = True) -> None:
    inside = low <= value <= high if closed else low < value < high
    if not (math.isfinite(value) and inside):
        raise BadInput(
            f"'{name}' is {value:g}, but must lie {'from' if closed else 'between'} {low:g} {'to' if closed else 'and'} {high:.3g}: {why}."
        )
