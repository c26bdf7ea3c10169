"""Methods side by side: each one's accuracy, and its difference from base and from full precision.

A *method* is a cell: GRPO quantized after training (PTQ), QLoRA, training with quantized weights (QAT), distillation
into them (QAD). Methods need not share their schemes. All differences are paired by question, and training runs are a
random effect. If grpo and base were evaluated under a method's own scheme too, the method is also compared with them:
is QAT better than PTQ, and did the training learn anything?
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Any

import pandas as pd

from qrl import names
from qrl.compare import answers, damage, health, missing
from qrl.compare.convergence import Convergence
from qrl.compare.evidence import Cell
from qrl.compare.outcomes import Answered
from qrl.compare.record import numbers, of_answers, with_ends
from qrl.compare.table import answers_table
from qrl.compare.validate import cells_of, check_columns, full_with_dtype, unusual_groups
from qrl.errors import BadInput
from qrl.files.tables import TEXTS
from qrl.stats import LEVEL, Estimate, holm_by_key
from qrl.stats.text import interval, table

# Gains are measured from the first, errors from the second.
PLAIN, FULL = (names.BASE, names.FULL), (names.GRPO, names.FULL)
OTHERS = (names.BASE, names.SFT)  # controls of GRPO, which compete with no method
METHODS_MD, METHODS_JSON = "methods.md", "methods.json"


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
        return self.variant not in OTHERS and self.cell != FULL and not is_control(self.cell)


@dataclass(frozen=True)
class Methods:
    """All cells, best first.

    Attributes:
        rows: one per cell.
        n: questions.
        runs: training runs.
        behind: quantized method → p-value of "the best one is no better", Holm-corrected over all pairs of quantized
            methods: the best was selected by its score, so any pair could have been the one reported.
        trained: method → p-value of "training with quantized weights makes no difference to PTQ of grpo in the same
            scheme", Holm-corrected over all methods with that comparison.
        damages: what quantization costs each variant whose schemes grpo has too; empty if none has.
        full: how tables show the scheme `full`, with its dtype if known.
        answered: the table of answers that they were read from.
        groups: scheme → how many inputs share a scale, where that is not the usual number.
    """

    rows: tuple[Method, ...]
    n: int
    runs: int
    behind: dict[Cell, float]
    trained: dict[Cell, float]
    damages: tuple[damage.Damage, ...] = ()
    full: str = names.FULL
    answered: Answered | None = field(default=None, repr=False, compare=False)
    groups: Mapping[str, int] = field(default_factory=dict)

    @property
    def best(self) -> Method | None:
        """The quantized method with the highest accuracy."""
        return next((row for row in self.rows if row.quantized), None)

    def shown(self, cell: Cell) -> str:
        """Return a cell's name as tables and figures show it."""
        scheme = names.with_groups(cell[1], self.groups.get(cell[1]))
        return names.cell_name(cell[0], self.full if cell[1] == names.FULL else scheme)

    @property
    def references(self) -> answers.References:
        """Cell → the one that its answers are compared with: the same variant at full precision, or grpo."""
        cells = [row.cell for row in self.rows]
        return {cell: _reference(cell, cells) for cell in cells}

    @cached_property
    def answers(self) -> dict[Cell, answers.Answers]:
        """Cell → what its answers are like beside right or wrong."""
        return answers.measured(self.answered, self.changed, self.references) if self.answered else {}

    @cached_property
    def unhealthy(self) -> dict[Cell, str]:
        """Cell → what quantization did to its answers, where they broke a limit of health; see `health.notes`."""
        return health.notes(self.answered.frame) if self.answered else {}

    @cached_property
    def changed(self) -> pd.DataFrame:
        """A row per answer whose verdict differs from its reference's; see `answers.changed`."""
        return answers.changed(self.answered, self.references) if self.answered else pd.DataFrame()

    def changed_shown(self) -> pd.DataFrame:
        """Return a few of them as texts for people, with columns method and reference; see `answers.shown`."""
        table = answers.shown(self.changed, self.answered.frame.attrs.get(TEXTS) if self.answered else None)
        if len(table):
            cells = zip(table["variant"], table["scheme"], strict=True)
            table.insert(2, "reference", [names.cell_name(*(self.references[cell] or cell)) for cell in cells])
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
    for needed in (PLAIN, FULL):
        if needed not in cells:
            raise BadInput(f"Cell {names.cell_name(*needed)} is missing: methods are measured from it.")
    answered = Answered(frame.drop(columns=names.SETTINGS, errors="ignore"), grid=False)
    evidence = answered.outcomes

    def minus(cell: Cell, other: Cell | None) -> Estimate | None:
        if other is None or other == cell or other not in cells:
            return None
        return evidence.contrast({cell: 1, other: -1})

    rows = []
    for cell in cells:
        accuracy = evidence.accuracy(cell)
        own_scheme = cell[0] not in (*OTHERS, names.GRPO) and names.stored(cell[1]) != names.FULL
        over_grpo, over_base = (
            minus(cell, (variant, cell[1])) if own_scheme else None for variant in (names.GRPO, names.BASE)
        )
        control = control_of(cell, cells)
        differences = minus(cell, PLAIN), minus(cell, FULL), over_grpo, over_base, minus(cell, control)
        rows.append(Method(*cell, accuracy, *differences, control))
    rows.sort(key=lambda row: -row.accuracy.estimate)
    small = [row.cell for row in rows if row.quantized]
    between = {pair: minus(*pair) for pair in combinations(small, 2)}
    pairs = holm_by_key({pair: difference.p_two_sided for pair, difference in between.items() if difference})
    trained = holm_by_key({row.cell: row.over_grpo.p_two_sided for row in rows if row.over_grpo})
    behind = {cell: pairs[small[0], cell] for cell in small[1:]}
    damages, runs = damage.measure(evidence), len(evidence.runs)
    full, sizes = full_with_dtype(frame), unusual_groups(frame)
    return Methods(tuple(rows), evidence.n, runs, behind, trained, damages, full, answered, sizes)


def _reference(cell: Cell, cells: Iterable[Cell]) -> Cell | None:
    """Return the same variant at full precision if it was evaluated, else grpo; None for base, sft and grpo there."""
    own = cell[0], names.FULL
    if cell != own and own in cells:
        return own
    return None if cell[0] in (*OTHERS, names.GRPO) else FULL


def is_control(cell: Cell) -> bool:
    """Whether a cell is the control of distilled methods: the same further steps without quantization."""
    variant, scheme = cell
    return scheme == names.FULL and (variant == names.DISTILLED or variant.startswith(f"{names.DISTILLED}-"))


def control_of(cell: Cell, cells: Iterable[Cell]) -> Cell | None:
    """Return a distilled method's control: `distilled-…` that names it, or else `distilled`; None if there is none."""
    variant, _ = cell
    if not variant.startswith(names.QAD_PREFIX):
        return None
    named = {f"+{each[0].removeprefix(names.DISTILLED)[1:]}+": each for each in cells if is_control(each)}
    return next((each for arms, each in named.items() if f"+{variant}+" in arms), named.get("++"))


def markdown(methods: Methods, converged: Sequence[Convergence] = (), failed: Sequence[str] = ()) -> str:
    """Return one row per method, best first; the findings; which trainings converged; what failed."""
    body = []
    for row in methods.rows:
        gain, error = (interval(value) if value else "reference" for value in (row.gain, row.error))
        accuracy = f"{row.accuracy.estimate:.3f} ± {row.accuracy.stderr:.3f}"
        accuracy += f" {health.MARK}" if row.cell in methods.unhealthy else ""
        scheme = methods.full if row.scheme == names.FULL else row.scheme
        body.append((row.variant, scheme, accuracy, gain, error, interval(row.over_grpo) if row.over_grpo else ""))
    error, over = f"error: method − {methods.shown(FULL)}", "method − grpo in the same scheme"
    runs = "one training run each, so no interval includes the variation between seeds"
    runs = f"{methods.runs} training runs" if methods.runs > 1 else runs
    note = f"n = {methods.n} held-out questions, {runs}; ± is one standard error, brackets are paired 95 % CIs."
    lines = ["## Methods", "", *table(("method", "scheme", "accuracy", "gain over base", error, over), body)]
    lines += ["", note, *(missing.notes(methods.answered.filled, methods.n) if methods.answered else []), ""]
    lines += [*(f"- {finding}" for finding in findings(methods)), ""]
    lines += health.section({methods.shown(cell): told for cell, told in methods.unhealthy.items()})
    lines += damage.markdown(methods.damages)
    against = f"the reference (the same method at full precision if evaluated, else {methods.shown(FULL)})"
    lines += answers_table(methods.answers, methods.shown, against, methods.references)
    if converged:
        over = "seeds" if methods.runs > 1 else "the steps of the one seed"
        objective = "objective: first quarter → last quarter, difference"
        head = ("method", "its cell − base in the same scheme", objective, "converged")
        lines += ["## Converged", "", *table(head, [training.row() for training in converged]), ""]
        note = f"The interval of the difference is over {over}; the rule uses the two means alone, as fixed in advance."
        lines += [note, ""]
    if failed:
        lines += ["## Did not count", "", *(f"- {sentence}" for sentence in failed), ""]
    return "\n".join(lines)


def findings(methods: Methods) -> list[str]:
    """Return sentences: the best method, what it is significantly better than, and QAT against PTQ."""
    if methods.best is None:
        return []
    best = methods.best
    scores = f"{methods.shown(best.cell)} scores highest, {best.accuracy.estimate:.3f}"
    parts = [f"Of {len(methods.behind) + 1} quantized methods {scores}"]
    for relation, significant in (("significantly", True), ("not significantly", False)):
        others = [methods.shown(cell) for cell, p in methods.behind.items() if (p < 1 - LEVEL) is significant]
        parts += [f"{relation} better than {', '.join(others)}"] if others else []
    sentences = [f"{'; '.join(parts)} (95 %, Holm-corrected over all pairs)."]
    for row in methods.rows:
        if row.over_grpo is not None:
            p, size = methods.trained[row.cell], interval(row.over_grpo)
            relation = f"is significantly {'better' if row.over_grpo.estimate > 0 else 'worse'} than"
            relation = relation if p < 1 - LEVEL else "does not differ significantly from"
            other = f"grpo quantized to {row.scheme} after training"
            sentences.append(f"{row.variant} {relation} {other}: {size}, Holm-corrected p = {p:.2g}.")
        if row.over_control is not None and row.control:
            control = f"its control, {methods.shown(row.control)}: the same further steps without quantization"
            sentences.append(f"{methods.shown(row.cell)} − {control}: {interval(row.over_control)}.")
    return sentences


def as_json(methods: Methods, converged: Sequence[Convergence] = (), failed: Sequence[str] = ()) -> dict[str, Any]:
    """Return the table as a document."""

    def document(values: dict[str, Any]) -> dict[str, Any]:
        return {key: numbers(value) if isinstance(value, Estimate) else value for key, value in values.items()}

    rows, trainings = [], []
    for row in methods.rows:
        p_values = {"p_behind_best": methods.behind.get(row.cell), "p_over_grpo": methods.trained.get(row.cell)}
        of_cell = answers.as_json(methods.answers, row.cell, numbers)
        rows.append(document(vars(row)) | p_values | {"reference": methods.references[row.cell], "answers": of_cell})
    keys = ("variant", "scheme", "converged", "reason", "measure", "first", "last", "change")
    for training in converged:
        trainings.append(document({key: getattr(training, key) for key in keys}))
    tables = {"findings": findings(methods), "methods": rows, "converged": trainings, "failed": list(failed)}
    tables["damages"] = damage.as_json(methods.damages)
    return {"n": methods.n, "runs": methods.runs} | tables


def metrics(methods: Methods) -> dict[str, float]:
    """Return `methods/accuracy_<variant>_<scheme>` of every cell, `methods/error_…` with its bounds, and `damage/…`.

    Of the answers: `methods/<measure>_change_…` with its bounds, `methods/right_to_wrong_…`, `…/wrong_to_right_…`.
    """
    scores = {}
    for row in methods.rows:
        name = names.in_metric(*row.cell)
        scores[f"methods/accuracy_{name}"] = row.accuracy.estimate
        if row.error is not None:
            scores |= with_ends(f"methods/error_{name}", row.error)
    of_cells = of_answers("methods", methods.answers, lambda cell: names.in_metric(*cell))
    return scores | of_cells | damage.metrics(methods.damages)
