"""Whether a training with quantized weights converged, by a rule that was fixed before the first of them ran.

Converged: over the training seeds, the 95 % interval of the method's own cell − base under the same scheme is above 0,
and the training objective did not get worse. For a reward, the mean over the last quarter of steps is not below that
over the first quarter; for a distillation loss, it is not above. The rule uses these means alone; the interval of their
difference, over seeds or over the steps of a single seed, is reported with the verdict.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from qrl.stats import Estimate
from qrl.stats.estimate import bounded_estimate
from qrl.stats.text import interval


@dataclass(frozen=True)
class Convergence:
    """One method's training."""

    variant: str
    scheme: str
    gain: Estimate  # its own cell − base under the same scheme, accuracy
    measure: str  # "reward", or "loss" for a distillation
    first: float  # mean over the first quarter of steps, and over seeds
    last: float  # mean over the last quarter
    change: Estimate | None  # last − first; None for one seed with one step per quarter

    @property
    def reason(self) -> str:
        """The conditions of the rule that are not met; empty if the training converged."""
        # A training that diverged has NaN here, which meets no condition.
        has_gain = self.gain.low > 0
        if self.measure == "reward":
            objective_held = self.last >= self.first
        else:
            objective_held = self.last <= self.first

        unmet = []
        if not has_gain:
            unmet.append("no significant gain over base in the same scheme")
        if not objective_held:
            unmet.append(f"the {self.measure} got worse")
        return " and ".join(unmet)

    @property
    def converged(self) -> bool:
        return not self.reason

    def row(self) -> tuple[str, str, str, str]:
        """Return the cells of a table row."""
        result = "yes" if self.converged else f"no: {self.reason}"
        objective = f"{self.measure} {self.first:.3g} → {self.last:.3g}"
        if self.change:  # two significant digits, since losses are small
            low, high = self.change.low, self.change.high
            objective += f", {self.change.estimate:+.2g} [{low:+.2g}, {high:+.2g}]".replace("-", "−")
        return f"{self.variant} · {self.scheme}", interval(self.gain), objective, result


def judge(variant: str, scheme: str, gain: Estimate, histories: Sequence[Sequence[float]], measure: str) -> Convergence:
    """Apply the rule.

    Args:
        variant, scheme: the method's own cell.
        gain: that cell − base under the same scheme.
        histories: per seed, the objective at every step.
        measure: "reward" or "loss".
    """
    first_means = []
    last_means = []
    for history in histories:
        first, last = quarters(history)
        first_means.append(fmean(first))
        last_means.append(fmean(last))
    return Convergence(variant, scheme, gain, measure, fmean(first_means), fmean(last_means), change(histories))


def change(histories: Sequence[Sequence[float]]) -> Estimate | None:
    """Return the last quarter's mean − the first quarter's; None for one seed with one step per quarter.

    With several seeds the interval is over seeds, each counting once. With one it is over steps, which used different
    prompts; a second training of the same recipe may differ by more.

    Source: t with S − 1 degrees of freedom; Welch, Biometrika 34 (1947) 28, for two quarters of one seed.
    """
    differences = []
    for history in histories:
        first, last = quarters(history)
        differences.append(fmean(last) - fmean(first))
    seeds = len(differences)
    if seeds > 1:
        stderr = math.sqrt(variance(differences) / seeds)
        return bounded_estimate(fmean(differences), stderr, seeds, df=seeds - 1)

    first, last = quarters(histories[0])
    steps = len(first)  # as many as `last` has
    if steps < 2:
        return None
    first_error = variance(first) / steps
    last_error = variance(last) / steps
    total_error = first_error + last_error
    df = 1.0  # of a constant objective, for which the formula is 0/0
    if total_error != 0:
        df = total_error**2 / (first_error**2 / (steps - 1) + last_error**2 / (steps - 1))
    return bounded_estimate(differences[0], math.sqrt(total_error), 2 * steps, df=df)


def quarters(values: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """Return the first and the last quarter of steps, at least one step each."""
    count = max(1, len(values) // 4)
    return values[:count], values[-count:]
