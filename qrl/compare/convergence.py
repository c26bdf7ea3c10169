"""Whether a training with quantized weights converged, by a rule that was fixed before the first of them ran.

Converged: over the training seeds, the 95 % interval of the method's own cell − base under the same scheme is above 0,
and the training objective did not get worse. For a reward, the mean over the last quarter of steps is not below that
over the first quarter; for a distillation loss, it is not above. The rule uses these means alone; the interval of their
difference, over seeds or over the steps of a single seed, is reported beside the verdict.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from qrl.stats import Estimate
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
        improved = self.last >= self.first if self.measure == "reward" else self.last <= self.first
        parts = [] if self.gain.low > 0 else ["no significant gain over base in the same scheme"]
        parts += [] if improved else [f"the {self.measure} got worse"]
        return " and ".join(parts)

    @property
    def converged(self) -> bool:
        return not self.reason

    def row(self) -> tuple[str, str, str, str]:
        """Return the cells of a table row."""
        result = "yes" if self.converged else f"no: {self.reason}"
        ends = f"{self.measure} {self.first:.3g} → {self.last:.3g}"
        if self.change:  # two significant digits, since losses are small
            low, high = self.change.low, self.change.high
            ends += f", {self.change.estimate:+.2g} [{low:+.2g}, {high:+.2g}]".replace("-", "−")
        return f"{self.variant} · {self.scheme}", interval(self.gain), ends, result


def judge(variant: str, scheme: str, gain: Estimate, histories: Sequence[Sequence[float]], measure: str) -> Convergence:
    """Apply the rule.

    Args:
        variant, scheme: the method's own cell.
        gain: that cell − base under the same scheme.
        histories: per seed, the objective at every step.
        measure: "reward" or "loss".
    """
    ends = [(fmean(begin), fmean(end)) for begin, end in map(quarters, histories)]
    first, last = map(fmean, zip(*ends, strict=True))
    return Convergence(variant, scheme, gain, measure, first, last, change(histories))


def change(histories: Sequence[Sequence[float]]) -> Estimate | None:
    """Return the last quarter's mean − the first quarter's; None for one seed with one step per quarter.

    With several seeds the interval is over seeds, each counting once. With one it is over steps, which used different
    prompts; a second training of the same recipe may differ by more.

    Source: t with S − 1 degrees of freedom; Welch, Biometrika 34 (1947) 28, for two quarters of one seed.
    """
    differences = [fmean(end) - fmean(begin) for begin, end in map(quarters, histories)]
    if (seeds := len(differences)) > 1:
        stderr = math.sqrt(variance(differences) / seeds)
        return Estimate(fmean(differences), stderr, 0, 0, seeds, df=seeds - 1).bounded()
    ends = quarters(histories[0])
    if len(ends[0]) < 2:
        return None
    errors = [variance(quarter) / len(quarter) for quarter in ends]
    by_quarter = (error**2 / (len(quarter) - 1) for error, quarter in zip(errors, ends, strict=True))
    df = sum(errors) ** 2 / sum(by_quarter) if any(errors) else 1
    return Estimate(differences[0], math.sqrt(sum(errors)), 0, 0, sum(map(len, ends)), df=df).bounded()


def quarters(values: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """Return the first and the last quarter of steps, at least one step each."""
    count = max(1, len(values) // 4)
    return values[:count], values[-count:]
