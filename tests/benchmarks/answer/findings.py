"""What README.md's questions found: every contrast of the page, the tables and the figures, computed once."""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import pandas as pd
from contrasts import (
    BASE,
    CLIFF,
    CONTROLS,
    GRPO,
    PLANNED,
    PRIMARY,
    SFT,
    Answers,
    Excess,
    Weights,
    against,
    excess,
    loss,
)
from correlations import OF_GAIN, Correlation, correlations, points

from qrl.compare.sizes import slope
from qrl.stats import Estimate, holm_by_key

CONTROL_TESTS = tuple(itertools.product(CONTROLS, PLANNED))
CLIFF_LOSS = 0.05
OF_GRPO = (PRIMARY, "rtn-int4")  # its cells in question 5
TRAINED = ("qlora:full", "qat-int4:rtn-int4", "qad-int4:rtn-int4")  # trained with a base or weights in four bits
METHODS = (*TRAINED, *(f"grpo-fp8:{scheme}" for scheme in OF_GRPO))  # FP8 rollouts are quantized afterwards
NEAR = 0.02  # a loss near full precision


class Tested(NamedTuple):
    """A member of a family of tests."""

    value: Estimate
    p: float  # corrected by Holm's procedure, in which tests that were not made count too


class Cliff(NamedTuple):
    """The losses of one size's variant by width, in the order of CLIFF."""

    losses: list[Estimate]
    first: str  # scheme whose loss is shown to be above CLIFF_LOSS; "" if none is


class Compared(NamedTuple):
    """A method beside a cell of grpo's."""

    method: str
    other: str
    size: str
    value: Estimate  # accuracy of the method minus the other's


def family(planned: Iterable, found: Mapping) -> dict:
    """Return the estimates that were planned, with p-values corrected over all that were."""
    held = {key: found[key] for key in planned if key in found}
    holm = holm_by_key(dict.fromkeys(planned, 1.0) | {key: value.p_two_sided for key, value in held.items()})
    return {key: Tested(value, holm[key]) for key, value in held.items()}


@dataclass(frozen=True)
class Findings:
    """The answers to all questions.

    Attributes:
        answers: the sweep's.
        compared: answers for question 5, the sweep's or those of runs of their own.
        weights: measures of the weights, from `tables.measures`; None if there are none.
    """

    answers: Answers
    compared: Answers
    weights: pd.DataFrame | None = None

    @cached_property
    def excesses(self) -> dict[str, dict[str, Excess]]:
        """Question 1, and what question 2 tests, by the other weights and by scheme."""
        return {other: against(self.answers, other) for other in (BASE, *CONTROLS)}

    @cached_property
    def controls(self) -> dict[tuple[str, str], Tested]:
        """Question 2, by control and scheme."""
        return family(CONTROL_TESTS, {key: each.value for key, each in self._of_controls.items()})

    @cached_property
    def controls_apart(self) -> dict[tuple[str, str], Tested]:
        """The same with the trainings of each size counted apart."""
        return family(CONTROL_TESTS, {key: each.apart for key, each in self._of_controls.items()})

    @property
    def _of_controls(self) -> dict[tuple[str, str], Excess]:
        return {(c, scheme): each for c in CONTROLS for scheme, each in self.excesses[c].items()}

    @cached_property
    def cliffs(self) -> dict[tuple[str, str], Cliff]:
        """Question 3, by size and variant."""
        found = {}
        for size, variant in itertools.product(self.answers.sizes, (BASE, SFT, GRPO)):
            losses = [self.answers.contrast(loss(size, variant, scheme)) for scheme in CLIFF]
            if all(losses):
                over = (scheme for scheme, value in zip(CLIFF, losses, strict=True) if value.low > CLIFF_LOSS)
                found[size, variant] = Cliff(losses, next(over, ""))
        return found

    @cached_property
    def widths(self) -> dict[tuple[str, str], Tested]:
        """The excess of grpo's loss over the base's by size and width; a size's widths are one family."""
        found = {}
        for size in self.answers.sizes:
            values = {scheme: self.answers.contrast(excess([size], scheme, BASE)) for scheme in CLIFF}
            tests = family(CLIFF, {scheme: value for scheme, value in values.items() if value})
            found |= {(size, scheme): each for scheme, each in tests.items()}
        return found

    @cached_property
    def widths_together(self) -> dict[tuple[str, str], Tested]:
        """The same with all sizes and widths as one family."""
        planned = tuple(itertools.product(self.answers.sizes, CLIFF))
        return family(planned, {key: each.value for key, each in self.widths.items()})

    @cached_property
    def growth(self) -> dict[str, Tested]:
        """Question 4: the slope of grpo's loss per decade of parameters, by scheme."""
        return family(PLANNED, self.slopes(GRPO))

    def slopes(self, variant: str, first: int = 0) -> dict[str, Estimate]:
        """Return the slope of a variant's loss per decade of parameters, by scheme; none of fewer than two sizes.

        `first`: of the sizes that are used.
        """
        found, sizes = {}, self.answers.sizes[first:]
        by_size = slope([self.answers.parameters[size] for size in sizes]) if len(sizes) > 1 else {}
        for scheme in self.answers.schemes():
            weights: Weights = {}
            for place, weight in by_size.items():
                weights |= loss(sizes[place], variant, scheme, weight)
            if value := self.answers.contrast(weights):
                found[scheme] = value
        return found

    @cached_property
    def methods(self) -> list[Compared]:
        """Question 5, at each size: methods change order between sizes, which a mean would hide."""
        found = []
        for method, size, scheme in itertools.product(METHODS, self.compared.sizes, OF_GRPO):
            variant, _, own = method.partition(":")
            if value := self.compared.contrast({(size, variant, own): 1.0, (size, GRPO, scheme): -1.0}):
                found.append(Compared(method, f"{GRPO}:{scheme}", size, value))
        return found

    @cached_property
    def beside_gptq(self) -> dict[tuple[str, str], Tested]:
        """What trains in four bits beside GPTQ of grpo, by method and size, with p-values corrected over all."""
        other = f"{GRPO}:{PRIMARY}"
        found = {(e.method, e.size): e.value for e in self.methods if e.method in TRAINED and e.other == other}
        return family(found, found)

    @cached_property
    def correlations(self) -> list[Correlation]:
        """Question 6."""
        return [] if self._points is None else correlations(self._points)

    @cached_property
    def near(self) -> list[Correlation]:
        """The same over cells that lose less than NEAR."""
        return [] if self._points is None else correlations(self._points, NEAR)

    @cached_property
    def of_gain(self) -> list[Correlation]:
        """The same over all cells, with what the gain loses."""
        return [] if self._points is None else correlations(self._points, outcome=OF_GAIN)

    @cached_property
    def _points(self) -> pd.DataFrame | None:
        return None if self.weights is None else points(self.answers.frame, self.weights)
