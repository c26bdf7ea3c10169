"""The assumptions of a plan: four cells' accuracies, and how a question's outcomes in them are correlated."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from qrl.errors import BadInput
from qrl.stats.verdict import CEILING, FLOOR, default_margin

# Defaults. Accuracy and gain are study 000's (68 of 100, and about its gain); the correlations are conservative
# compared with those of qrl-tiny's seed 0, 0.23 and 0.92.
BASE_ACCURACY, GAIN, DROP, CORRELATION, SCHEME_CORRELATION = 0.68, 0.05, 0.01, 0.2, 0.7


@dataclass(frozen=True)
class Assumptions:
    """The study as it is expected to be.

    Attributes:
        base_accuracy: of the base, at full precision and quantized alike.
        gain: accuracy that training adds at full precision.
        drop: the part of the gain that quantization costs; expected gain survival is −drop.
        correlation: (Pearson's, φ) of a question's outcomes before and after training, under the same scheme.
        scheme_correlation: of a question's outcomes at full precision and quantized, for the same variant. Two cells
            that differ in both have the product of the two.
        margin: as `compare.margin`; None for half the gain, at least 0.02, as the study itself will estimate it.
        between_gain, between_survival: standard deviation over training runs of the true gain and gain survival,
            accuracy.
        own_questions: whether each training run has its own questions. Otherwise all share them, and the error from
            questions is assumed not to shrink with more runs, which is conservative.
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
        """Return these assumptions with correlations filled in, if such a study is possible.

        Raises:
            BadInput: a number is out of range, a cell is at floor or ceiling, or no such cells can have a correlation.
        """
        base, trained = self.base_accuracy, self.base_accuracy + self.gain
        quantized = trained - self.drop
        inconclusive = "beyond that a cell is at floor or ceiling and every verdict is inconclusive"
        check_range("base-accuracy", base, FLOOR, CEILING, inconclusive)
        check_range("gain", self.gain, 0, 1, "plan for the gain that you expect", closed=False)
        for cell, rate in (("base", base), ("trained", trained), ("trained and quantized", quantized)):
            if not FLOOR <= rate <= CEILING:
                raise BadInput(
                    f"The {cell} cell would have the accuracy {rate:.3f}, outside {FLOOR} to {CEILING}, "
                    "where every verdict is inconclusive: change base-accuracy, gain or drop."
                )
        if self.margin is not None:
            check_range("margin", self.margin, 0, 1, "the loss of gain that still counts as survival", closed=False)
        for name, value in (("between-seed-sd", self.between_survival), ("between-seed-sd-gain", self.between_gain)):
            check_range(name, value, 0, 0.5, "the standard deviation of accuracies over training runs")
        over_training = _correlation("correlation", self.correlation, CORRELATION, base, trained)
        of_scheme = self.scheme_correlation
        over_schemes = _correlation("scheme-correlation", of_scheme, SCHEME_CORRELATION, trained, quantized)
        return replace(self, correlation=over_training, scheme_correlation=over_schemes)

    @property
    def expected_margin(self) -> float:
        """The margin at the assumed gain."""
        return default_margin(self.gain) if self.margin is None else self.margin

    def covariance(self) -> np.ndarray:
        """Return the (4, 4) covariance of a question's outcomes in base·full, trained·full, base·q, trained·q."""
        base, trained = self.base_accuracy, self.base_accuracy + self.gain
        rates = np.array([base, trained, base, trained - self.drop])
        variances = np.maximum(0, rates * (1 - rates))  # rounding makes it negative in a pilot with a cell all right
        sd = np.sqrt(variances)
        of_training = np.array([[1, self.correlation], [self.correlation, 1]])
        of_scheme = np.array([[1, self.scheme_correlation], [self.scheme_correlation, 1]])
        return np.kron(of_scheme, of_training) * np.outer(sd, sd)

    def moments(self) -> np.ndarray:
        """Return the (3, 3) covariance, per question, of gain, gain survival and gain kept (survival + gain / 2)."""
        weights = np.array([[-1, 1, 0, 0], [1, -1, -1, 1], [0.5, -0.5, -1, 1]])
        return weights @ self.covariance() @ weights.T


def _correlation(name: str, value: float | None, default: float, a: float, b: float) -> float:
    """Return the correlation, or its default, checked against the largest that rates a and b allow."""
    largest = largest_correlation(a, b)
    value = min(default, 0.99 * largest) if value is None else value
    why = f"outcomes with these accuracies cannot be correlated by more than {largest:.3f}"
    check_range(name, value, 0, min(1, largest), why, closed=largest < 1)
    return value


def largest_correlation(a: float, b: float) -> float:
    """Return the largest correlation of two 0/1 outcomes with rates a and b: the rarer success implies the other.

    Outcomes that never vary have no correlation; the result is then 1, which rules none out.

    Source: Fréchet's bound on a joint distribution, P(both) <= min(a, b).
    """
    if not (0 < a < 1 and 0 < b < 1):
        return 1.0
    return (min(a, b) - a * b) / math.sqrt(a * (1 - a) * b * (1 - b))


def of_pilot(base_fp: ArrayLike, trained_fp: ArrayLike, base_q: ArrayLike, trained_q: ArrayLike) -> dict[str, float]:
    """Return the assumptions that a study's own outcomes suggest.

    The correlation over schemes is chosen so that gain survival has the same variance as in these outcomes.

    Args:
        base_fp, trained_fp, base_q, trained_q: (n,) 0 or 1, or shares of a question's samples; the same questions in
            order.
    """
    cells = np.array([base_fp, trained_fp, base_q, trained_q], dtype=float)
    rates = cells.mean(axis=1)
    base, gain = float(rates[0]), float(rates[1] - rates[0])
    drop = gain - float(rates[3] - rates[2])
    spread, correlation = cells[:2].std(axis=1), 0.0
    if spread.all():
        correlation = float(np.cov(cells[0], cells[1], ddof=0)[0, 1] / spread.prod())
        correlation = min(max(correlation, 0.0), 0.999 * largest_correlation(*rates[:2]))
    like = Assumptions(base, gain, drop, correlation, 0.0)
    free = like.moments()[1, 1]
    full = replace(like, scheme_correlation=1.0).moments()[1, 1]
    wanted = float(np.var((cells[3] - cells[2]) - (cells[1] - cells[0])))
    scheme = (free - wanted) / (free - full) if free > full else 0.0
    most = largest_correlation(base + gain, base + gain - drop)
    correlations = {"correlation": correlation, "scheme_correlation": float(np.clip(scheme, 0, 0.999 * most))}
    return {"base_accuracy": base, "gain": gain, "drop": drop} | correlations


def check_range(name: str, value: float, low: float, high: float, why: str, *, closed: bool = True) -> None:
    """Raise BadInput if a number is out of range; `closed` includes both ends."""
    inside = low <= value <= high if closed else low < value < high
    if not (math.isfinite(value) and inside):
        span = f"from {low:g} to {high:.3g}" if closed else f"between {low:g} and {high:.3g}"
        raise BadInput(f"'{name}' is {value:g}, but must be {span}: {why}.")
