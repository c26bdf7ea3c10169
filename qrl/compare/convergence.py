"""Whether a training with quantized weights converged, by a rule that was fixed before any was run.

Converged: over its training seeds, the 95 % interval of the method's own cell minus base under the same scheme lies above 0,
and what the training optimizes did not get worse: the mean reward of the last quarter of its steps is not below that of the
first quarter; for a distillation, the mean loss is not above. The rule looks at these means alone; how sure their difference
is stands beside the verdict, as an interval over seeds, or, where there is one, over its steps.
"""

from __future__ import annotations

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
    gain: Estimate  # its own cell minus base under the same scheme, accuracy
    measure: str  # "reward", or "loss" of a distillation
    first: float  # its mean over the first quarter of steps, and over seeds
    last: float  # over the last quarter
    change: Estimate | None  # last − first; None where one seed has one step a quarter

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
        ends = f"{self.measure} {self.first:.3g} → {self.last:.3g}" + (f", {_said(self.change)}" if self.change else "")
        return f"{self.variant} · {self.scheme}", interval(self.gain), ends, said


def judge(variant: str, scheme: str, gain: Estimate, histories: Sequence[Sequence[float]], measure: str) -> Convergence:
    """Applies the rule.

    Args:
        gain: the method's own cell minus base under the same scheme.
        histories: a seed's values of what is optimized, a number a step.
        measure: "reward" or "loss".
    """
    ends = [(fmean(begin), fmean(end)) for begin, end in map(quarters, histories)]
    first, last = map(fmean, zip(*ends, strict=True))
    return Convergence(variant, scheme, gain, measure, first, last, change(histories))


def change(histories: Sequence[Sequence[float]]) -> Estimate | None:
    """The last quarter's mean minus the first's, with its 95 % interval.

    Of several seeds it is over seeds, each counting once. Of one it is over steps, which had other prompts each: a second
    training of the same recipe may differ by more.

    Args:
        histories: a seed's values, a number a step.

    Returns:
        None where one seed has one step a quarter.

    Source: t with S − 1 degrees of freedom; Welch, Biometrika 34 (1947) 28, for two quarters of one seed.
    """
    differences = [fmean(end) - fmean(begin) for begin, end in map(quarters, histories)]
    if len(differences) > 1:
        return Estimate(
            fmean(differences),
            math.sqrt(variance(differences) / len(differences)),
            0,
            0,
            len(differences),
            df=len(differences) - 1,
        ).bounded()
    ends = quarters(histories[0])
    if len(ends[0]) < 2:
        return None
    errors = [variance(each) / len(each) for each in ends]
    freedom = (
        sum(errors) ** 2 / sum(error**2 / (len(each) - 1) for error, each in zip(errors, ends, strict=True))
        if any(errors)
        else 1
    )
    return Estimate(differences[0], math.sqrt(sum(errors)), 0, 0, sum(map(len, ends)), df=freedom).bounded()


def quarters(values: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """The first and the last quarter of steps, at least one step each."""
    count = max(1, len(values) // 4)
    return values[:count], values[-count:]


def _said(value: Estimate) -> str:
    """With three digits, since losses are small."""
    return f"{value.estimate:+.2g} [{value.low:+.2g}, {value.high:+.2g}]".replace("-", "−")
