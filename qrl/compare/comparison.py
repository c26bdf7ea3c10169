"""A comparison: every cell's accuracy, and the gains, losses and verdicts that follow from them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Real
from typing import TypeVar

import pandas as pd

from qrl import names, stats
from qrl.compare import health, record, table
from qrl.compare.answers import Answers, References, changed, measured, shown
from qrl.compare.evidence import Cell, Counts, Questions
from qrl.compare.outcomes import Answered
from qrl.compare.scales import Scales, measure_scales
from qrl.compare.subgroups import Group, groups
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
        less=lambda share: gain_survival(contrast, variant, scheme, share),
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
        return {"delta": self.delta} | ({"gain_survival": self.gain_survival} if self.gain_survival else {})

    @property
    def gain_kept(self) -> Estimate | None:
        """Share of the gain that is kept; None under full, and where no gain is shown at full precision."""
        return self.verdict.kept if self.verdict else None

    @property
    def holds_together(self) -> bool | None:
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
    """

    evidence: Questions | Counts = field(repr=False)
    margin: float | None = None
    engine: str = ""
    full: str = FULL
    answered: Answered | None = field(default=None, repr=False, compare=False)
    groups: Mapping[str, int] = field(default_factory=dict)

    table_json, metrics = record.as_json, record.as_metrics
    markdown, sentence = table.as_markdown, table.as_sentence

    def __str__(self) -> str:
        return self.markdown()

    _repr_markdown_ = __str__

    def __post_init__(self) -> None:
        is_number = isinstance(self.margin, Real) and not isinstance(self.margin, bool)
        if self.margin is not None and not (is_number and 0 < self.margin < 1):
            expected = "must be between 0 and 1: the loss of accuracy that still counts as survival"
            raise BadInput(f"The margin is {self.margin!r}, but {expected}.")

    @cached_property
    def cells(self) -> dict[Cell, Estimate]:
        """(variant, scheme) → accuracy with binomial (or clustered) stderr and Wilson interval.

        `base` and `full` come first, known schemes before the user's own.
        """
        order = [*names.SCHEMES, *sorted({scheme for _, scheme in self.evidence.cells}.difference(names.SCHEMES))]
        ranked = sorted(
            self.evidence.cells,
            key=lambda cell: (cell[0] != BASE, cell[0] != names.GRPO, cell[0], order.index(cell[1])),
        )
        return {cell: self.evidence.accuracy(cell) for cell in ranked}

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
    def references(self) -> References:
        """Cell → the same variant at full precision."""
        return {cell: None if cell[1] == FULL else (cell[0], FULL) for cell in self.cells}

    @cached_property
    def answers(self) -> dict[Cell, Answers]:
        """Cell → what its answers are like beside right or wrong; empty if only counts are known."""
        return measured(self.answered, self.changed, self.references) if self.answered else {}

    @cached_property
    def unhealthy(self) -> dict[Cell, str]:
        """Cell → what quantization did to its answers, where they broke a limit of health; see `health.notes`."""
        return health.notes(self.answered.frame) if self.answered else {}

    @cached_property
    def changed(self) -> pd.DataFrame:
        """A row per answer that is right under one of a quantized scheme and full precision, and wrong under the other.

        See `answers.changed`; empty if only counts are known.
        """
        return changed(self.answered, self.references) if self.answered else pd.DataFrame()

    @cached_property
    def subgroups(self) -> dict[str, list[Group]]:
        """Subject and level → their groups of questions; empty where the rows name none."""
        return groups(self)

    def changed_shown(self) -> pd.DataFrame:
        """Return a few of them as texts for people; see `answers.shown`."""
        return shown(self.changed, self.answered.frame.attrs.get(TEXTS) if self.answered else None)

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
        rows = [self._row(variant, scheme) for variant in self.variants[1:] for scheme in self.schemes]
        # An inconclusive verdict makes no claim, but its scheme was tested too, and counts in the correction.
        tested = {place: row.verdict for place, row in enumerate(rows) if row.verdict}
        p_values = {place: 1.0 if verdict.p_value is None else verdict.p_value for place, verdict in tested.items()}
        for place, corrected in stats.holm_by_key(p_values).items():
            if tested[place].p_value is not None:
                rows[place] = replace(rows[place], p_holm=corrected)
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
                known = ", ".join(names.cell_name(*known) for known in self.cells)
                raise BadInput(f"There is no cell {names.cell_name(*cell)}: expected one of {known}.")
        return self.evidence.contrast({a: 1, b: -1})

    def shown(self, scheme: str) -> str:
        """Return the scheme as tables and figures show it: `full (bf16)`, `awq (groups of 64)`."""
        return self.full if scheme == FULL else names.with_groups(scheme, self.groups.get(scheme))

    def _row(self, variant: str, scheme: str) -> Row:
        base, trained = (BASE, scheme), (variant, scheme)
        bootstrap = self.evidence.bootstrap
        resampled = {"delta": bootstrap({trained: 1, base: -1})}
        row = Row(variant, scheme, self.difference(trained, base), self.evidence.mcnemar(trained, base))
        if scheme != FULL:
            resampled["gain_survival"] = gain_survival(bootstrap, variant, scheme)
            row = self._with_verdict(row)
        return replace(row, bootstrap={name: value for name, value in resampled.items() if value})

    def _with_verdict(self, row: Row) -> Row:
        """Return the row of a quantized scheme with what follows from its four cells."""
        variant, scheme = row.variant, row.scheme
        base, trained, base_full, trained_full = (BASE, scheme), (variant, scheme), (BASE, FULL), (variant, FULL)
        share = share_of_gain(self.evidence, variant, scheme)
        four_cells = (base_full, trained_full, base, trained)
        accuracies = {names.cell_name(*cell): self.cells[cell].estimate for cell in four_cells}
        verdict = judge(Gains(share, self.margin), accuracies, self.evidence.patterns(four_cells))
        losses = {BASE: self.difference(base, base_full), variant: self.difference(trained, trained_full)}
        return replace(
            row,
            gain_survival=share.difference,
            verdict=verdict,
            scales=measure_scales(self.evidence, variant, scheme, share.difference),
            kept_by_seed={run.runs[0]: share_of_gain(run, variant, scheme).kept for run in self.evidence.each_run()},
            losses=losses,
        )
