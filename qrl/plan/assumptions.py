"""The assumptions of a plan: four cells' accuracies, and how a question's outcomes in them are correlated."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from qrl.errors import BadInput
from qrl.plan.patterns import ALL, Moment, correlation, nearest
from qrl.stats.simulate import BASE, BASE_Q, TRAINED, TRAINED_Q, Patterns
from qrl.stats.verdict import default_margin

# Defaults. Accuracy and gain are study 000's (68 of 100, and about its gain); the correlations are conservative
# compared with those of qrl-tiny's seed 0, 0.23 and 0.92.
BASE_ACCURACY = 0.68
GAIN = 0.05
DROP = 0.0
CORRELATION = 0.2
SCHEME_CORRELATION = 0.7
CELLS = {BASE: "base", TRAINED: "trained", BASE_Q: "base and quantized", TRAINED_Q: "trained and quantized"}
Pairs = tuple[tuple[int, int], tuple[int, int]]
BY_TRAINING: Pairs = ((BASE, TRAINED), (BASE_Q, TRAINED_Q))
BY_SCHEME: Pairs = ((TRAINED, TRAINED_Q), (BASE, BASE_Q))
BY_BOTH: Pairs = ((BASE, TRAINED_Q), (BASE_Q, TRAINED))
# If no questions have all accuracies and correlations, accuracies stay, and correlations between cells that differ in
# both give way first.
SLACK_RATE = 1e-12
SLACK_CORRELATION = 1e-9
SLACK_BOTH = 1e-6
TOLERANCE = 0.005  # of a correlation that the user set
POSSIBLE = 1e-4  # tolerance of an accuracy


@dataclass(frozen=True)
class Assumptions:
    """The study as it is expected to be.

    Attributes:
        base_accuracy: of the base; at full precision and quantized alike, unless a pilot says otherwise.
        gain: accuracy that training adds at full precision.
        drop: the part of the gain that quantization costs; expected gain survival is −drop.
        correlation: (Pearson's, φ) of a question's outcomes before and after training, under the same scheme.
        scheme_correlation: of a question's outcomes at full precision and quantized, for the same variant. Two cells
            that differ in both have the product of the two.
        margin: as `compare.margin`; None for a tenth of the gain, at least 0.01, as the study itself will estimate it.
        between_gain, between_survival: standard deviation over training runs of the true gain and gain survival,
            accuracy.
        own_questions: whether each training run has its own questions. Otherwise all share them, and the error from
            questions is assumed not to shrink with more runs, which is conservative.
        pilot: how often the four cells of an earlier study had each combination of outcomes. Other numbers change these
            frequencies as little as possible.
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
    pilot: Patterns | None = field(default=None, compare=False, repr=False)

    def checked(self) -> Assumptions:
        """Return these assumptions with correlations filled in, if such a study is possible.

        Raises:
            BadInput: a number is out of range, or no questions have these accuracies and correlations.
        """
        check_range("base-accuracy", self.base_accuracy, 0, 1, "a share of right answers")
        check_range("gain", self.gain, 0, 1, "plan for the gain that you expect", closed=False)
        check_range("drop", self.drop, -1, 1, "the part of the gain that quantization costs")
        for cell, rate in enumerate(self.rates()):
            if not -1e-9 <= rate <= 1 + 1e-9:
                raise BadInput(
                    f"The {CELLS[cell]} cell would have the accuracy {rate:.3f}, outside 0 to 1: "
                    "change base-accuracy, gain or drop."
                )
        if self.margin is not None:
            check_range("margin", self.margin, 0, 1, "the loss of gain that still counts as survival", closed=False)
        for name, value in (("between-seed-sd", self.between_survival), ("between-seed-sd-gain", self.between_gain)):
            check_range(name, value, 0, 0.5, "the standard deviation of accuracies over training runs")
        set_training, set_scheme = self._set_correlations()
        self._check_correlation("correlation", set_training, BY_TRAINING)
        self._check_correlation("scheme-correlation", set_scheme, BY_SCHEME)
        if not self.is_possible():
            raise BadInput(
                "The pilot has too few kinds of answers for this base-accuracy, gain or drop: no weighting of its "
                "questions has them. Plan without a pilot, or with numbers that are nearer to its own."
            )

        # The nearest possible questions may miss a correlation that the user set: then no study has these numbers.
        patterns = self.patterns()
        training_correlation = _first_correlation(patterns, BY_TRAINING)
        scheme_correlation = _first_correlation(patterns, BY_SCHEME)
        _check_reached("correlation", set_training, training_correlation)
        _check_reached("scheme-correlation", set_scheme, scheme_correlation)
        return replace(
            self,
            correlation=_filled(set_training, training_correlation),
            scheme_correlation=_filled(set_scheme, scheme_correlation),
        )

    @property
    def expected_margin(self) -> float:
        """The margin at the assumed gain."""
        return default_margin(self.gain) if self.margin is None else self.margin

    @property
    def expected_verdict(self) -> Literal["survives", "reduced", "lost"]:
        """The verdict that a large enough study gives."""
        rounding = 1e-9  # a loss that equals one of the limits, up to rounding, is `reduced`
        if self.drop - rounding > self.gain / 2:
            return "lost"
        if self.drop + rounding < self.expected_margin:
            return "survives"
        return "reduced"

    @property
    def boundary(self) -> str | None:
        """The limit between two verdicts that the expected loss equals; None if it equals none."""
        if abs(self.drop - self.gain / 2) < 1e-9:
            return "half of the gain"
        if abs(self.drop - self.expected_margin) < 1e-9:
            return "the margin"
        return None

    def rates(self) -> np.ndarray:
        """Return the accuracies of base and trained at full precision, then of both under the scheme."""
        base = self.base_accuracy
        trained = base + self.gain
        base_q = base
        if self.pilot is not None:
            pilot_rates = _rates(self.pilot)
            base_q += pilot_rates[BASE_Q] - pilot_rates[BASE]
        trained_q = base_q + self.gain - self.drop
        return np.array([base, trained, base_q, trained_q])

    def patterns(self) -> Patterns:
        """Return how often a question has each combination of outcomes, as near to these assumptions as can be."""
        rates = np.clip(self.rates(), 0, 1)
        moments = [Moment((cell,), rate, SLACK_RATE) for cell, rate in enumerate(rates)]
        by_training, by_scheme, by_both = self._correlations()
        for pairs, value, slack in (
            (BY_TRAINING, by_training, SLACK_CORRELATION),
            (BY_SCHEME, by_scheme, SLACK_CORRELATION),
            (BY_BOTH, by_both, SLACK_BOTH),
        ):
            if value is not None:
                moments += [_correlated(pair, value, rates, slack) for pair in pairs]
        return nearest(ALL if self.pilot is None else self.pilot, moments)

    def _correlations(self) -> tuple[float | None, float | None, float | None]:
        """Return the correlations by training, by scheme and by both; None for those that a pilot's patterns have."""
        by_training, by_scheme = self._set_correlations()
        if self.pilot is not None:
            return by_training, by_scheme, None
        by_training = CORRELATION if by_training is None else by_training
        by_scheme = SCHEME_CORRELATION if by_scheme is None else by_scheme
        return by_training, by_scheme, by_training * by_scheme

    def _set_correlations(self) -> tuple[float | None, float | None]:
        """Return the correlations by training and by scheme; None for one that is not set, or is the pilot's own."""
        if self.pilot is None:
            return self.correlation, self.scheme_correlation
        return (
            _unless_equal(self.correlation, _first_correlation(self.pilot, BY_TRAINING)),
            _unless_equal(self.scheme_correlation, _first_correlation(self.pilot, BY_SCHEME)),
        )

    def is_possible(self) -> bool:
        """Return whether questions can have these accuracies; a pilot of few kinds of answers cannot have all."""
        return bool(np.abs(_rates(self.patterns()) - self.rates()).max() < POSSIBLE)

    def _check_correlation(self, name: str, value: float | None, pairs: Pairs) -> None:
        """Raise BadInput if a correlation that the user set is out of range, or larger than accuracies allow."""
        if value is None:
            return
        rates = self.rates()
        largest = max(largest_correlation(rates[a], rates[b]) for a, b in pairs)
        reason = f"outcomes with these accuracies cannot be correlated by more than {largest:.3f}"
        check_range(name, value, 0, min(1, largest), reason)


def _rates(patterns: Patterns) -> np.ndarray:
    return patterns.outcomes @ patterns.probabilities


def _first_correlation(patterns: Patterns, pairs: Pairs) -> float | None:
    """Return the correlation of the first pair of cells; of the second if the first has a cell that never varies."""
    correlations = [correlation(patterns, *pair) for pair in pairs]
    return next((value for value in correlations if value is not None), None)


def _correlated(cells: tuple[int, int], value: float, rates: np.ndarray, slack: float) -> Moment:
    """Return how often both cells are right at this correlation, or at the largest one that they can have."""
    rate_a, rate_b = rates[list(cells)]
    deviations = math.sqrt(max(0.0, rate_a * (1 - rate_a) * rate_b * (1 - rate_b)))
    both_right = rate_a * rate_b + value * deviations
    return Moment(cells, min(both_right, rate_a, rate_b), slack)


def _unless_equal(value: float | None, of_pilot: float | None) -> float | None:
    """Return a correlation that the user set; None if it is the pilot's own, which its patterns have already."""
    if value is None or of_pilot is None or abs(value - of_pilot) < 1e-9:
        return None
    return value


def _check_reached(name: str, required: float | None, nearest_possible: float | None) -> None:
    """Raise BadInput if no questions have the correlation that the user set."""
    if required is None or nearest_possible is None:
        return
    if abs(required - nearest_possible) > TOLERANCE:
        raise BadInput(
            f"'{name}' is {required:g}, but no questions have these accuracies and correlations: "
            f"{nearest_possible:.3f} is the nearest. Use that, or change the other correlation."
        )


def _filled(required: float | None, of_patterns: float | None) -> float:
    """Return the correlation that the user set, or else that of the patterns; 0 if a cell never varies."""
    if required is not None:
        return required
    return of_patterns or 0.0


def largest_correlation(a: float, b: float) -> float:
    """Return the largest correlation of two 0/1 outcomes with rates a and b: the rarer success implies the other.

    Outcomes that never vary have no correlation; the result is then 1, which rules none out.

    Source: Fréchet's bound on a joint distribution, P(both) <= min(a, b).
    """
    if not (0 < a < 1 and 0 < b < 1):
        return 1.0
    return (min(a, b) - a * b) / math.sqrt(a * (1 - a) * b * (1 - b))


def of_pilot(base_fp: ArrayLike, trained_fp: ArrayLike, base_q: ArrayLike, trained_q: ArrayLike) -> dict[str, Any]:
    """Return the assumptions that a study's own outcomes suggest, with how often they occur in each combination.

    Args:
        base_fp, trained_fp, base_q, trained_q: (n,) 0 or 1, or shares of a question's samples; the same questions in
            order.
    """
    cells = [np.asarray(cell, dtype=float) for cell in (base_fp, trained_fp, base_q, trained_q)]
    pilot = Patterns.of(np.stack(cells))
    rates = _rates(pilot)
    gain = float(rates[TRAINED] - rates[BASE])
    return {
        "base_accuracy": float(rates[BASE]),
        "gain": gain,
        "drop": gain - float(rates[TRAINED_Q] - rates[BASE_Q]),
        "correlation": _first_correlation(pilot, BY_TRAINING) or 0.0,
        "scheme_correlation": _first_correlation(pilot, BY_SCHEME) or 0.0,
        "pilot": pilot,
    }


def check_range(name: str, value: float, low: float, high: float, reason: str, *, closed: bool = True) -> None:
    """Raise BadInput if a number is out of range; `closed` includes both ends."""
    if closed:
        is_inside = low <= value <= high
        limits = f"from {low:g} to {high:.3g}"
    else:
        is_inside = low < value < high
        limits = f"between {low:g} and {high:.3g}"
    if not (math.isfinite(value) and is_inside):
        raise BadInput(f"'{name}' is {value:g}, but must be {limits}: {reason}.")
