"""Methods side by side: each one's accuracy, and its difference from base and from full precision.

A *method* is a cell: GRPO quantized after training (PTQ), QLoRA, training with quantized weights (QAT), distillation
into them (QAD). Methods need not share their schemes. All differences are paired by question, and training runs are a
random effect. If grpo and base were evaluated under a method's own scheme too, the method is also compared with them:
is QAT better than PTQ, and did the training learn anything?
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Any

import pandas as pd

from qrl import names
from qrl.compare import answers, damage, health, missing
from qrl.compare.answers import Answers, References
from qrl.compare.convergence import Convergence
from qrl.compare.estimates import numbers, with_ends
from qrl.compare.evidence import Cell
from qrl.compare.outcomes import Answered
from qrl.compare.validate import cells_of, check_columns, full_with_dtype, partial_layers, unusual_groups
from qrl.errors import BadInput
from qrl.files.tables import TEXTS
from qrl.stats import LEVEL, Estimate, holm_by_key
from qrl.stats.text import interval, table

# Gains are measured from the first, errors from the second.
PLAIN = (names.BASE, names.FULL)
FULL = (names.GRPO, names.FULL)
CONTROLS = (names.BASE, names.SFT, names.RAFT)  # of GRPO, which compete with no method
METHODS_MD = "methods.md"
METHODS_JSON = "methods.json"


@dataclass(frozen=True)
class Method:
    """One cell. A difference is None if it would be the cell minus itself, or if the other cell was not evaluated."""

    variant: str
    scheme: str
    accuracy: Estimate
    gain: Estimate | None  # − base at full precision
    error: Estimate | None  # − grpo at full precision
    over_grpo: Estimate | None  # − grpo quantized after training to the same scheme
    over_base: Estimate | None  # − base in the same scheme
    over_control: Estimate | None = None  # of a distilled method, − the same further steps without quantization
    control: Cell | None = None  # those steps

    @property
    def cell(self) -> Cell:
        return self.variant, self.scheme

    @property
    def quantized(self) -> bool:
        """Whether this is a trained model that is quantized, or was trained quantized."""
        return self.variant not in CONTROLS and self.cell != FULL and not is_control(self.cell)


@dataclass(frozen=True)
class Methods:
    """All cells, best first.

    Attributes:
        rows: one per cell.
        n: questions.
        runs: training runs.
        p_behind_best: quantized method → p-value of "the best one is no better", Holm-corrected over all pairs of
            quantized methods: the best was selected by its score, so any pair could have been the one reported.
        p_over_grpo: method → p-value of "training with quantized weights makes no difference to PTQ of grpo in the same
            scheme", Holm-corrected over all methods with that comparison.
        damages: what quantization costs each variant that shares a scheme with grpo; empty if none does.
        full: how tables show the scheme `full`, with its dtype if known.
        answered: the table of answers that they were read from.
        groups: scheme → how many inputs share a scale, where that is not the usual number.
        layers: scheme → which linears it stores in few bits, where not all.
    """

    rows: tuple[Method, ...]
    n: int
    runs: int
    p_behind_best: dict[Cell, float]
    p_over_grpo: dict[Cell, float]
    damages: tuple[damage.Damage, ...] = ()
    full: str = names.FULL
    answered: Answered | None = field(default=None, repr=False, compare=False)
    groups: Mapping[str, int] = field(default_factory=dict)
    layers: Mapping[str, str] = field(default_factory=dict)

    @property
    def best(self) -> Method | None:
        """The quantized method with the highest accuracy."""
        return next((row for row in self.rows if row.quantized), None)

    def cell_label(self, cell: Cell) -> str:
        """Return a cell's name as tables and figures show it."""
        variant, scheme = cell
        if scheme == names.FULL:
            return names.cell_name(variant, self.full)
        return names.cell_name(variant, names.detailed(scheme, self.groups.get(scheme), self.layers.get(scheme)))

    @property
    def missing_answers(self) -> Mapping[Cell, int]:
        """Cell → answers that were missing and count as wrong; only cells with such answers."""
        return self.answered.missing_answers if self.answered else {}

    @property
    def references(self) -> References:
        """Cell → the one that its answers are compared with: the same variant at full precision, or grpo."""
        cells = [row.cell for row in self.rows]
        return {cell: _reference(cell, cells) for cell in cells}

    @cached_property
    def answers(self) -> dict[Cell, Answers]:
        """Cell → what its answers are like besides right or wrong."""
        return answers.measure(self.answered, self.changed, self.references) if self.answered else {}

    @cached_property
    def unhealthy(self) -> dict[Cell, str]:
        """Cell → what quantization did to its answers, where they broke a limit of health; see `health.notes`."""
        return health.notes(self.answered.frame) if self.answered else {}

    @cached_property
    def changed(self) -> pd.DataFrame:
        """A row per answer that was graded differently from its reference's; see `answers.find_changed`."""
        return answers.find_changed(self.answered, self.references) if self.answered else pd.DataFrame()

    def changed_sample(self) -> pd.DataFrame:
        """Return a few of them as texts for people, with columns method and reference; see `answers.sample_texts`."""
        texts = self.answered.frame.attrs.get(TEXTS) if self.answered else None
        table = answers.sample_texts(self.changed, texts)
        if len(table):
            references = []
            for cell in zip(table["variant"], table["scheme"], strict=True):
                references.append(names.cell_name(*(self.references[cell] or cell)))
            table.insert(2, "reference", references)
        return table.rename(columns={"variant": "method"})


def measure(frame: pd.DataFrame) -> Methods:
    """Return every cell's accuracy and its differences.

    Args:
        frame: columns variant, scheme, question, correct (0/1), and optionally seed, sample, cluster, engine, dtype; a
            row per cell and question.

    Raises:
        BadInput: base or grpo at full precision is missing, or the cells are not comparable.
    """
    check_columns(frame)
    _, cells = cells_of(frame)
    for reference in (PLAIN, FULL):
        if reference not in cells:
            raise BadInput(f"Cell {names.cell_name(*reference)} is missing: methods are measured from it.")
    answered = Answered(frame.drop(columns=names.SETTINGS, errors="ignore"), grid=False)
    evidence = answered.outcomes

    def difference(cell: Cell, subtrahend: Cell | None) -> Estimate | None:
        if subtrahend is None or subtrahend == cell or subtrahend not in cells:
            return None
        return evidence.contrast({cell: 1, subtrahend: -1})

    rows = []
    for cell in cells:
        variant, scheme = cell
        over_grpo = None
        over_base = None
        if variant not in (*CONTROLS, names.GRPO) and names.stored(scheme) != names.FULL:
            over_grpo = difference(cell, (names.GRPO, scheme))
            over_base = difference(cell, (names.BASE, scheme))
        control = control_of(cell, cells)
        method = Method(
            variant=variant,
            scheme=scheme,
            accuracy=evidence.accuracy(cell),
            gain=difference(cell, PLAIN),
            error=difference(cell, FULL),
            over_grpo=over_grpo,
            over_base=over_base,
            over_control=difference(cell, control),
            control=control,
        )
        rows.append(method)
    rows.sort(key=lambda row: -row.accuracy.estimate)

    return Methods(
        rows=tuple(rows),
        n=evidence.n,
        runs=len(evidence.runs),
        p_behind_best=_p_behind_best([row.cell for row in rows if row.quantized], difference),
        p_over_grpo=holm_by_key({row.cell: row.over_grpo.p_two_sided for row in rows if row.over_grpo}),
        damages=damage.measure(evidence),
        full=full_with_dtype(frame),
        answered=answered,
        groups=unusual_groups(frame),
        layers=partial_layers(frame),
    )


def _p_behind_best(
    quantized: Sequence[Cell], difference: Callable[[Cell, Cell | None], Estimate | None]
) -> dict[Cell, float]:
    """Return quantized method → Holm-corrected p-value of "the best one is no better".

    The correction is over all pairs, since the best one is known only after looking: any pair could have been tested.

    Args:
        quantized: the methods, best first.
        difference: returns the first cell − the second.
    """
    p_values = {}
    for pair in combinations(quantized, 2):
        pair_difference = difference(*pair)
        if pair_difference:
            p_values[pair] = pair_difference.p_two_sided
    corrected = holm_by_key(p_values)
    return {cell: corrected[quantized[0], cell] for cell in quantized[1:]}


def _reference(cell: Cell, cells: Iterable[Cell]) -> Cell | None:
    """Return the same variant at full precision if it was evaluated, else grpo; None for controls and grpo there."""
    variant, _ = cell
    at_full = (variant, names.FULL)
    if cell != at_full and at_full in cells:
        return at_full
    return None if variant in (*CONTROLS, names.GRPO) else FULL


def is_control(cell: Cell) -> bool:
    """Whether a cell is the control of distilled methods: the same further steps without quantization."""
    variant, scheme = cell
    return scheme == names.FULL and (variant == names.DISTILLED or variant.startswith(f"{names.DISTILLED}-"))


def control_of(cell: Cell, cells: Iterable[Cell]) -> Cell | None:
    """Return a distilled method's control: `distilled-…` that names it, or else `distilled`; None if there is none."""
    variant, _ = cell
    if not variant.startswith(names.QAD_PREFIX):
        return None
    general = None
    for control in cells:
        if not is_control(control):
            continue
        label, _ = control
        if label == names.DISTILLED:
            general = control
            continue
        # A control's name lists the methods that it serves: `distilled-qad-nf4+qad-awq`. One of them may have a + too.
        methods = label.removeprefix(f"{names.DISTILLED}-")
        if f"+{variant}+" in f"+{methods}+":
            return control
    return general


def markdown(methods: Methods, converged: Sequence[Convergence] = (), failed: Sequence[str] = ()) -> str:
    """Return one row per method, best first; the findings; which trainings converged; what failed."""
    reference = f"the reference (the same method at full precision if evaluated, else {methods.cell_label(FULL)})"
    unhealthy = {methods.cell_label(cell): note for cell, note in methods.unhealthy.items()}
    lines = [
        *_methods_table(methods),
        *(f"- {finding}" for finding in findings(methods)),
        "",
        *health.section(unhealthy),
        *damage.markdown(methods.damages),
        *answers.markdown(methods.answers, methods.cell_label, reference, methods.references),
    ]
    if converged:
        lines += _convergence_table(methods, converged)
    if failed:
        lines += ["## Did not count", "", *(f"- {sentence}" for sentence in failed), ""]
    return "\n".join(lines)


def _methods_table(methods: Methods) -> list[str]:
    error = f"error: method − {methods.cell_label(FULL)}"
    head = ("method", "scheme", "accuracy", "gain over base", error, "method − grpo in the same scheme")
    body = []
    for row in methods.rows:
        scheme = methods.full if row.scheme == names.FULL else row.scheme
        accuracy = f"{row.accuracy.estimate:.3f} ± {row.accuracy.stderr:.3f}"
        if row.cell in methods.unhealthy:
            accuracy += f" {health.MARK}"
        line = [row.variant, scheme, accuracy]
        line.append(interval(row.gain) if row.gain else "reference")
        line.append(interval(row.error) if row.error else "reference")
        line.append(interval(row.over_grpo) if row.over_grpo else "")
        body.append(line)

    runs = "one training run each, so no interval includes the variation between seeds"
    if methods.runs > 1:
        runs = f"{methods.runs} training runs"
    note = f"n = {methods.n} held-out questions, {runs}; ± is one standard error, brackets are paired 95 % CIs."
    missing_notes = missing.notes(methods.missing_answers, methods.n)
    return ["## Methods", "", *table(head, body), "", note, *missing_notes, ""]


def _convergence_table(methods: Methods, converged: Sequence[Convergence]) -> list[str]:
    objective = "objective: first quarter → last quarter, difference"
    head = ("method", "its cell − base in the same scheme", objective, "converged")
    body = [training.row() for training in converged]
    unit = "seeds" if methods.runs > 1 else "the steps of the one seed"
    note = f"The interval of the difference is over {unit}; the rule uses the two means alone, as fixed in advance."
    return ["## Converged", "", *table(head, body), "", note, ""]


def findings(methods: Methods) -> list[str]:
    """Return sentences: the best method, what it is significantly better than, and QAT against PTQ."""
    if methods.best is None:
        return []
    sentences = [_best_sentence(methods, methods.best)]
    for row in methods.rows:
        if row.over_grpo is not None:
            p_value = methods.p_over_grpo[row.cell]
            relation = "does not differ significantly from"
            if p_value < 1 - LEVEL:
                direction = "better" if row.over_grpo.estimate > 0 else "worse"
                relation = f"is significantly {direction} than"
            ptq = f"grpo quantized to {row.scheme} after training"
            size = f"{interval(row.over_grpo)}, Holm-corrected p = {p_value:.2g}"
            sentences.append(f"{row.variant} {relation} {ptq}: {size}.")
        if row.over_control is not None and row.control:
            control = f"its control, {methods.cell_label(row.control)}: the same further steps without quantization"
            sentences.append(f"{methods.cell_label(row.cell)} − {control}: {interval(row.over_control)}.")
    return sentences


def _best_sentence(methods: Methods, best: Method) -> str:
    significant = []
    not_significant = []
    for cell, p_value in methods.p_behind_best.items():
        if p_value < 1 - LEVEL:
            significant.append(methods.cell_label(cell))
        else:
            not_significant.append(methods.cell_label(cell))

    count = len(methods.p_behind_best) + 1
    parts = [
        f"Of {count} quantized methods {methods.cell_label(best.cell)} scores highest, {best.accuracy.estimate:.3f}"
    ]
    if significant:
        parts.append(f"significantly better than {', '.join(significant)}")
    if not_significant:
        parts.append(f"not significantly better than {', '.join(not_significant)}")
    return f"{'; '.join(parts)} (95 %, Holm-corrected over all pairs)."


def as_json(methods: Methods, converged: Sequence[Convergence] = (), failed: Sequence[str] = ()) -> dict[str, Any]:
    """Return the table as a document."""
    rows = []
    for row in methods.rows:
        entry = _document(vars(row))
        entry["p_behind_best"] = methods.p_behind_best.get(row.cell)
        entry["p_over_grpo"] = methods.p_over_grpo.get(row.cell)
        entry["reference"] = methods.references[row.cell]
        cell_answers = methods.answers.get(row.cell)
        entry["answers"] = answers.as_json(cell_answers) if cell_answers else None
        rows.append(entry)

    fields = ("variant", "scheme", "converged", "reason", "measure", "first", "last", "change")
    trainings = [_document({name: getattr(training, name) for name in fields}) for training in converged]
    return {
        "n": methods.n,
        "runs": methods.runs,
        "findings": findings(methods),
        "methods": rows,
        "converged": trainings,
        "failed": list(failed),
        "damages": damage.as_json(methods.damages),
    }


def _document(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with estimates as JSON."""
    return {key: numbers(value) if isinstance(value, Estimate) else value for key, value in values.items()}


def metrics(methods: Methods) -> dict[str, float]:
    """Return `methods/accuracy_<variant>_<scheme>` of every cell, `methods/error_…` with its bounds, and `damage/…`.

    Of the answers: `methods/<measure>_change_…` with its bounds, `methods/right_to_wrong_…`, `…/wrong_to_right_…`.
    """
    scores = {}
    for row in methods.rows:
        suffix = names.in_metric(*row.cell)
        scores[f"methods/accuracy_{suffix}"] = row.accuracy.estimate
        if row.error is not None:
            scores |= with_ends(f"methods/error_{suffix}", row.error)
    answer_scores = answers.metrics("methods", methods.answers, lambda cell: names.in_metric(*cell))
    return scores | answer_scores | damage.metrics(methods.damages)
