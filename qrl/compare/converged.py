"""Whether a training with quantized weights converged, by a rule that was fixed before any was run.

Converged: over its training seeds, the 95 % interval of the method's own cell minus base under the same scheme lies above 0,
and what the training optimizes did not get worse: the mean reward of the last quarter of its steps is not below that of the
first quarter; for a distillation, the mean loss is not above.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qrl.compare.text import interval
from qrl.stats import Estimate


@dataclass(frozen=True)
class Convergence:
    """One method's training."""

    variant: str
    scheme: str
    gain: Estimate  # its own cell minus base under the same scheme, accuracy
    measure: str  # "reward", or "loss" of a distillation
    first: float  # its mean over the first quarter of steps, and over seeds
    last: float  # over the last quarter

    @property
    def improved(self) -> bool:
        """Whether what is optimized is no worse at the end."""
        return self.last >= self.first if self.measure == "reward" else self.last <= self.first

    @property
    def converged(self) -> bool:
        """The rule's word."""
        return self.gain.low > 0 and self.improved

    @property
    def reason(self) -> str:
        """Why not, or an empty text."""
        parts = [] if self.gain.low > 0 else ["no gain over base in its scheme is shown"]
        parts += [] if self.improved else [f"the {self.measure} got worse"]
        return " and ".join(parts)

    def row(self) -> tuple[str, str, str, str]:
        """Of a table."""
        said = "yes" if self.converged else f"no: {self.reason}"
        return f"{self.variant} · {self.scheme}", interval(self.gain), f"{self.measure} {self.first:.3g} → {self.last:.3g}", said


def judge(variant: str, scheme: str, gain: Estimate, histories: Sequence[Sequence[float]], measure: str) -> Convergence:
    """Applies the rule.

    Args:
        gain: the method's own cell minus base under the same scheme.
        histories: a seed's values of what is optimized, a number a step.
        measure: "reward" or "loss".
    """
    ends = [quarters(each) for each in histories]
    first, last = (sum(each) / len(ends) for each in zip(*ends, strict=True))
    return Convergence(variant, scheme, gain, measure, first, last)


def quarters(values: Sequence[float]) -> tuple[float, float]:
    """Means over the first and the last quarter of steps, at least one step each."""
    count = max(1, len(values) // 4)
    return sum(values[:count]) / count, sum(values[-count:]) / count
