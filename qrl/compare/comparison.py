"""A comparison: every cell's accuracy, and the gains, losses and verdicts that follow from them.

This file computes. Tables and sentences for people are written by `table`, documents and metrics by `record`, as
functions of a `Comparison`. What `qrl.compare` returns has short methods for them too (`printable`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Real
from typing import TypeVar

import pandas as pd

from qrl import names, stats
from qrl.compare import answers, health, subgroups
from qrl.compare.answers import Answers, References
from qrl.compare.evidence import Cell, Counts, Questions
from qrl.compare.outcomes import Answered
from qrl.compare.scales import Scales, measure_scales
from qrl.compare.subgroups import Group
from qrl.errors import BadInput
from qrl.files.tables import TEXTS
from qrl.names import BASE, FULL
from qrl.stats import Estimate, Share
from qrl.stats.verdict import Gains, Verdict, judge

T = TypeVar("T")


def gain_survival(contrast: Callable[[dict[Cell, float]], T], variant: str, scheme: str, share: float = 1.0) -> T:
    """Return gain survival: (trained − base) under q, minus (trained − base) under full. 0: no gain is lost.

    Args:
        contrast: computes a weighted sum of cells' accuracies, such as `Questions.contrast`.
        variant, scheme: the trained variant, and the quantized scheme q.
        share: of the full-precision gain to subtract: with ½ the result is above 0 if more than half of the gain is
            kept.

    Source: a difference in differences; over paired questions its stderr is that of Miller, arXiv 2411.00640, section
        4.
    """
    return contrast({(variant, scheme): 1, (BASE, scheme): -1, (variant, FULL): -share, (BASE, FULL): share})


def share_of_gain(evidence: Questions | Counts, variant: str, scheme: str) -> Share:
    """Return the gain of a variant under a scheme as a part of its gain at full precision."""
    contrast = evidence.contrast
    return Share(
        part=contrast({(variant, scheme): 1, (BASE, scheme): -1}),
        whole=contrast({(variant, FULL): 1, (BASE, FULL): -1}),
        difference=gain_survival(contrast, variant, scheme),
        excess_over=lambda share: gain_survival(contrast, variant, scheme, share),
    )


@dataclass(frozen=True)
class Row:
    """One trained variant under one scheme, compared with base.

    `delta` is trained − base. `scales` compares what the scheme costs both variants. `kept_by_seed` maps the seed of
    each of several runs to its own share of the gain. `losses` maps base and the variant to their difference under this
    scheme − full. For `full` there are no losses, and neither gain survival nor a verdict is defined. `mcnemar` tests
    `delta`; it is None unless outcomes are paired, from one run and one answer per question. `bootstrap` repeats
    `delta` and gain survival by resampling. `p_holm` is the verdict's p-value, corrected for all verdicts of the study.
    """

    variant: str
    scheme: str
    delta: Estimate
    mcnemar: float | None = None
    gain_survival: Estimate | None = None
    verdict: Verdict | None = None
    p_holm: float | None = None
    scales: Scales | None = None
    kept_by_seed: dict[str, Estimate | None] = field(default_factory=dict)
    losses: dict[str, Estimate] = field(default_factory=dict)
    bootstrap: dict[str, Estimate] = field(default_factory=dict)

    @property
    def differences(self) -> dict[str, Estimate]:
        """`delta`, and `gain_survival` if it is defined."""
        if self.gain_survival is None:
            return {"delta": self.delta}
        return {"delta": self.delta, "gain_survival": self.gain_survival}

    @property
    def gain_kept(self) -> Estimate | None:
        """Share of the gain that is kept; None under full, and where no gain is shown at full precision."""
        return self.verdict.kept if self.verdict else None

    @property
    def holds_after_holm(self) -> bool | None:
        """Whether the verdict remains significant after Holm's correction; None if it is inconclusive."""
        if self.verdict is None or self.verdict.verdict == "inconclusive" or self.p_holm is None:
            return None
        return self.p_holm < 1 - stats.LEVEL


@dataclass(frozen=True)
class Comparison:
    """All cells and what follows from them.

    Attributes:
        evidence: outcomes or counts, from which contrasts are computed.
        margin: loss of gain that counts as survival; None for a tenth of the full-precision gain, at least 0.01.
        engine: the engine and version that answered every cell; empty if unknown.
        full: how tables show the scheme `full`, with the dtype it was computed in if that is known: `full (bf16)`.
        answered: the table of answers that the outcomes were read from; None if only counts are known.
        groups: scheme → how many inputs share a scale, where that is not the usual number.
        layers: scheme → which linears it stores in few bits, where not all.
    """

    evidence: Questions | Counts = field(repr=False)
    margin: float | None = None
    engine: str = ""
    full: str = FULL
    answered: Answered | None = field(default=None, repr=False, compare=False)
    groups: Mapping[str, int] = field(default_factory=dict)
    layers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.margin is None:
            return
        is_number = isinstance(self.margin, Real) and not isinstance(self.margin, bool)
        if not is_number or not 0 < self.margin < 1:
            expected = "must be between 0 and 1: the loss of accuracy that still counts as survival"
            raise BadInput(f"The margin is {self.margin!r}, but {expected}.")

    @cached_property
    def cells(self) -> dict[Cell, Estimate]:
        """(variant, scheme) → accuracy with binomial (or clustered) stderr and Wilson interval.

        `base` and `full` come first, known schemes before the user's own.
        """
        users_schemes = {scheme for _, scheme in self.evidence.cells}.difference(names.SCHEMES)
        schemes = [*names.SCHEMES, *sorted(users_schemes)]

        def order(cell: Cell) -> tuple:
            variant, scheme = cell
            return variant != BASE, variant != names.GRPO, variant, schemes.index(scheme)

        return {cell: self.evidence.accuracy(cell) for cell in sorted(self.evidence.cells, key=order)}

    @property
    def n(self) -> int:
        """Distinct questions that every cell answered."""
        return self.evidence.n

    @property
    def paired(self) -> bool:
        """Whether outcomes are known per question, or only counts."""
        return self.evidence.paired

    @property
    def runs(self) -> tuple[str, ...]:
        """Seeds of the training runs; none if only counts are known."""
        return self.evidence.runs

    @cached_property
    def pass_at(self) -> dict[Cell, dict[int, Estimate]]:
        """Cell → k → pass@k, for cells with several samples per question."""
        by_cell = {cell: self.evidence.pass_at(cell) for cell in self.cells}
        return {cell: by_k for cell, by_k in by_cell.items() if by_k}

    @property
    def missing_answers(self) -> Mapping[Cell, int]:
        """Cell → answers that were missing and count as wrong; only cells with such answers."""
        return self.answered.missing_answers if self.answered else {}

    @property
    def references(self) -> References:
        """Cell → the same variant at full precision; None for that cell itself."""
        references: dict[Cell, Cell | None] = {}
        for variant, scheme in self.cells:
            references[variant, scheme] = None if scheme == FULL else (variant, FULL)
        return references

    @cached_property
    def answers(self) -> dict[Cell, Answers]:
        """Cell → what its answers are like besides right or wrong; empty if only counts are known."""
        return answers.measure(self.answered, self.changed, self.references) if self.answered else {}

    @cached_property
    def unhealthy(self) -> dict[Cell, str]:
        """Cell → what quantization did to its answers, where they broke a limit of health; see `health.notes`."""
        return health.notes(self.answered.frame) if self.answered else {}

    @cached_property
    def changed(self) -> pd.DataFrame:
        """A row per answer that is right under one of a quantized scheme and full precision, and wrong under the other.

        See `answers.find_changed`; empty if only counts are known.
        """
        return answers.find_changed(self.answered, self.references) if self.answered else pd.DataFrame()

    @cached_property
    def subgroups(self) -> dict[str, list[Group]]:
        """Subject and level → their groups of questions; empty where the rows name none."""
        return subgroups.groups(self.answered, list(self.cells)) if self.answered else {}

    def changed_sample(self) -> pd.DataFrame:
        """Return a few of the changed answers as texts for people; see `answers.sample_texts`."""
        texts = self.answered.frame.attrs.get(TEXTS) if self.answered else None
        return answers.sample_texts(self.changed, texts)

    @property
    def variants(self) -> tuple[str, ...]:
        """`base` first, then the trained ones."""
        return tuple(dict.fromkeys(variant for variant, _ in self.cells))

    @property
    def schemes(self) -> tuple[str, ...]:
        """`full` first, then the quantized ones."""
        return tuple(dict.fromkeys(scheme for _, scheme in self.cells))

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """Every trained variant under every scheme, with Holm's correction over all verdicts."""
        rows = []
        for variant in self.variants[1:]:
            rows += [self._row(variant, scheme) for scheme in self.schemes]

        # An inconclusive verdict makes no claim, but its scheme was tested too, and counts in the correction.
        p_values = {}
        for index, row in enumerate(rows):
            if row.verdict:
                p_values[index] = 1.0 if row.verdict.p_value is None else row.verdict.p_value
        for index, p_holm in stats.holm_by_key(p_values).items():
            verdict = rows[index].verdict
            if verdict and verdict.p_value is not None:
                rows[index] = replace(rows[index], p_holm=p_holm)
        return tuple(rows)

    def row(self, scheme: str, variant: str | None = None) -> Row:
        """Return the row of a scheme; of the first trained variant by default."""
        variant = variant or self.variants[1]
        return next(row for row in self.rows if (row.variant, row.scheme) == (variant, scheme))

    def judged(self) -> list[tuple[Row, Verdict, Estimate]]:
        """Return each quantized scheme's row with its verdict and gain survival."""
        return [(row, row.verdict, row.gain_survival) for row in self.rows if row.verdict and row.gain_survival]

    def difference(self, a: Cell, b: Cell) -> Estimate:
        """Return accuracy(a) − accuracy(b) with its 95 % interval, paired if outcomes are.

        Raises:
            BadInput: a cell was not evaluated.
        """
        for cell in (a, b):
            if cell not in self.cells:
                evaluated = ", ".join(names.cell_name(*evaluated_cell) for evaluated_cell in self.cells)
                raise BadInput(f"There is no cell {names.cell_name(*cell)}: expected one of {evaluated}.")
        return self.evidence.contrast({a: 1, b: -1})

    def scheme_label(self, scheme: str) -> str:
        """Return the scheme as tables and figures show it: `full (bf16)`, `awq (groups of 64)`."""
        if scheme == FULL:
            return self.full
        return names.detailed(scheme, self.groups.get(scheme), self.layers.get(scheme))

    def _row(self, variant: str, scheme: str) -> Row:
        base = (BASE, scheme)
        trained = (variant, scheme)
        row = Row(variant, scheme, self.difference(trained, base), self.evidence.mcnemar(trained, base))
        resampled = {"delta": self.evidence.bootstrap({trained: 1, base: -1})}
        if scheme != FULL:
            row = self._with_verdict(row)
            resampled["gain_survival"] = gain_survival(self.evidence.bootstrap, variant, scheme)
        return replace(row, bootstrap={name: value for name, value in resampled.items() if value})

    def _with_verdict(self, row: Row) -> Row:
        """Return the row of a quantized scheme with what follows from its four cells."""
        variant = row.variant
        base = (BASE, row.scheme)
        trained = (variant, row.scheme)
        base_full = (BASE, FULL)
        trained_full = (variant, FULL)
        four_cells = (base_full, trained_full, base, trained)

        share = share_of_gain(self.evidence, variant, row.scheme)
        accuracies = {names.cell_name(*cell): self.cells[cell].estimate for cell in four_cells}
        verdict = judge(Gains(share, self.margin), accuracies, self.evidence.patterns(four_cells))
        kept_by_seed = {}
        for run in self.evidence.each_run():
            kept_by_seed[run.runs[0]] = share_of_gain(run, variant, row.scheme).kept
        return replace(
            row,
            gain_survival=share.difference,
            verdict=verdict,
            scales=measure_scales(self.evidence, variant, row.scheme, share.difference),
            kept_by_seed=kept_by_seed,
            losses={BASE: self.difference(base, base_full), variant: self.difference(trained, trained_full)},
        )
