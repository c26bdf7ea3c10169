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
BASE_ACCURACY, GAIN, DROP, CORRELATION, SCHEME_CORRELATION = 0.68, 0.05, 0.0, 0.2, 0.7
CELLS = {BASE: "base", TRAINED: "trained", BASE_Q: "base and quantized", TRAINED_Q: "trained and quantized"}
Pairs = tuple[tuple[int, int], tuple[int, int]]
BY_TRAINING: Pairs = ((BASE, TRAINED), (BASE_Q, TRAINED_Q))
BY_SCHEME: Pairs = ((TRAINED, TRAINED_Q), (BASE, BASE_Q))
BY_BOTH: Pairs = ((BASE, TRAINED_Q), (BASE_Q, TRAINED))
# If no questions have all accuracies and correlations, accuracies stay, and correlations between cells that differ in
# both give way first.
SLACK_RATE, SLACK_CORRELATION, SLACK_BOTH = 1e-12, 1e-9, 1e-6
TOLERANCE = 0.005  # of a correlation that was asked for
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
        asked_training, asked_scheme = self._asked_correlations()
        self._check_correlation("correlation", asked_training, BY_TRAINING)
        self._check_correlation("scheme-correlation", asked_scheme, BY_SCHEME)
        if not self.is_possible():
            raise BadInput(
                "The pilot has too few kinds of answers for this base-accuracy, gain or drop: no weighting of its "
                "questions has them. Plan without a pilot, or with numbers that are nearer to its own."
            )
        patterns = self.patterns()
        of_training = _first_correlation(patterns, BY_TRAINING)
        of_scheme = _first_correlation(patterns, BY_SCHEME)
        _check_found("correlation", asked_training, of_training)
        _check_found("scheme-correlation", asked_scheme, of_scheme)
        return replace(
            self, correlation=_filled(asked_training, of_training), scheme_correlation=_filled(asked_scheme, of_scheme)
        )

    @property
    def expected_margin(self) -> float:
        """The margin at the assumed gain."""
        return default_margin(self.gain) if self.margin is None else self.margin

    @property
    def expected_verdict(self) -> Literal["survives", "reduced", "lost"]:
        """The verdict that a large enough study gives."""
        loss = self.drop - 1e-9
        if loss > self.gain / 2:
            return "lost"
        return "survives" if loss + 2e-9 < self.expected_margin else "reduced"

    @property
    def boundary(self) -> str | None:
        """The limit between two verdicts that the expected loss equals; None if it equals none."""
        if abs(self.drop - self.gain / 2) < 1e-9:
            return "half of the gain"
        return "the margin" if abs(self.drop - self.expected_margin) < 1e-9 else None

    def rates(self) -> np.ndarray:
        """Return the accuracies of base and trained at full precision, then of both under the scheme."""
        base, trained, base_q = self.base_accuracy, self.base_accuracy + self.gain, self.base_accuracy
        if self.pilot is not None:
            of_pilot = _rates(self.pilot)
            base_q += of_pilot[BASE_Q] - of_pilot[BASE]
        return np.array([base, trained, base_q, base_q + self.gain - self.drop])

    def patterns(self) -> Patterns:
        """Return how often a question has each combination of outcomes, as near to these assumptions as can be."""
        rates = np.clip(self.rates(), 0, 1)
        moments = [Moment((cell,), rate, SLACK_RATE) for cell, rate in enumerate(rates)]
        correlations = self._correlations()
        for pairs, value, slack in (
            (BY_TRAINING, correlations[0], SLACK_CORRELATION),
            (BY_SCHEME, correlations[1], SLACK_CORRELATION),
            (BY_BOTH, correlations[2], SLACK_BOTH),
        ):
            if value is not None:
                moments += [_correlated(pair, value, rates, slack) for pair in pairs]
        return nearest(ALL if self.pilot is None else self.pilot, moments)

    def _correlations(self) -> tuple[float | None, float | None, float | None]:
        """Return the correlations by training, by scheme and by both; None for those that a pilot's patterns have."""
        of_training, of_scheme = self._asked_correlations()
        if self.pilot is not None:
            return of_training, of_scheme, None
        of_training = CORRELATION if of_training is None else of_training
        of_scheme = SCHEME_CORRELATION if of_scheme is None else of_scheme
        return of_training, of_scheme, of_training * of_scheme

    def _asked_correlations(self) -> tuple[float | None, float | None]:
        """Return the correlations by training and by scheme; None for one that nobody asked for, or the pilot's own."""
        if self.pilot is None:
            return self.correlation, self.scheme_correlation
        return (
            _unlike(self.correlation, _first_correlation(self.pilot, BY_TRAINING)),
            _unlike(self.scheme_correlation, _first_correlation(self.pilot, BY_SCHEME)),
        )

    def is_possible(self) -> bool:
        """Return whether questions can have these accuracies; a pilot of few kinds of answers cannot have all."""
        return bool(np.abs(_rates(self.patterns()) - self.rates()).max() < POSSIBLE)

    def _check_correlation(self, name: str, value: float | None, pairs: Pairs) -> None:
        """Raise BadInput if a correlation that was asked for is out of range, or larger than accuracies allow."""
        if value is None:
            return
        rates = self.rates()
        largest = max(largest_correlation(rates[one], rates[other]) for one, other in pairs)
        why = f"outcomes with these accuracies cannot be correlated by more than {largest:.3f}"
        check_range(name, value, 0, min(1, largest), why)


def _rates(patterns: Patterns) -> np.ndarray:
    return patterns.outcomes @ patterns.probabilities


def _first_correlation(patterns: Patterns, pairs: Pairs) -> float | None:
    """Return the correlation of the first pair of cells; of the second if the first has a cell that never varies."""
    correlations = [correlation(patterns, *pair) for pair in pairs]
    return next((value for value in correlations if value is not None), None)


def _correlated(cells: tuple[int, int], value: float, rates: np.ndarray, slack: float) -> Moment:
    """Return how often both cells are right at this correlation, or at the largest one that they can have."""
    one, other = rates[list(cells)]
    spread = math.sqrt(max(0.0, one * (1 - one) * other * (1 - other)))
    both = one * other + value * spread
    return Moment(cells, min(both, one, other), slack)


def _unlike(value: float | None, own: float | None) -> float | None:
    """Return a correlation that was asked for; None if it is the pilot's own."""
    if value is None or own is None or abs(value - own) < 1e-9:
        return None
    return value


def _check_found(name: str, wanted: float | None, found: float | None) -> None:
    """Raise BadInput if no questions have the correlation that was asked for."""
    if wanted is not None and found is not None and abs(wanted - found) > TOLERANCE:
        raise BadInput(
            f"'{name}' is {wanted:g}, but no questions have these accuracies and correlations: {found:.3f} is the "
            f"nearest. Use that, or change the other correlation."
        )


def _filled(wanted: float | None, found: float | None) -> float:
    """Return the correlation that was asked for, or else the one that was found; 0 if a cell never varies."""
    return wanted if wanted is not None else (found or 0.0)


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


def check_range(name: str, value: float, low: float, high: float, why: str, *, closed: bool = True) -> None:
    """Raise BadInput if a number is out of range; `closed` includes both ends."""
    inside = low <= value <= high if closed else low < value < high
    if not (math.isfinite(value) and inside):
        span = f"from {low:g} to {high:.3g}" if closed else f"between {low:g} and {high:.3g}"
        raise BadInput(f"'{name}' is {value:g}, but must be {span}: {why}.")
