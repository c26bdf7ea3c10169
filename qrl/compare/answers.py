"""Answers beyond right and wrong: their length, how they end, how likely the reference solutions are, what changed.

Each cell has a reference, usually the same variant at full precision, and is compared with it question by question. The
intervals are those of `contrast`, which takes values in 0..1; so token counts and log-likelihoods are scaled to that
range first, and the results are scaled back.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd

from qrl import names
from qrl.compare.estimates import numbers, numbers_or_null, with_ends
from qrl.compare.evidence import Cell, Questions
from qrl.compare.outcomes import Answered
from qrl.errors import BadInput
from qrl.files.tables import ROW, Texts
from qrl.stats import Estimate
from qrl.stats.text import interval, p_text, table

References = Mapping[Cell, Cell | None]  # cell → the one that it is compared with; None: it is a reference itself
SHOWN = 20  # changed answers of a cell and direction in the table for people
LONGEST = 2000  # characters of a text in it; three quarters of them show its end

_FINISHED = {"stop": 0.0, "length": 1.0}  # finish_reason → whether the answer was cut
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
_TEXTS = (names.QUESTION_TEXT, "answer", "parsed_full", "parsed", "completion_full", "completion")


def _number(column: pd.Series) -> pd.Series:
    values = pd.Series(pd.to_numeric(column, errors="coerce"), dtype=float)
    invalid = list(column[values.isna() & column.notna()])
    if invalid:
        raise BadInput(f"The column '{column.name}' holds {str(invalid[0])[:40]!r}, but must hold numbers.")
    return values.where(values.abs() < math.inf)


# measure → the column of the rows that it is read from, and how
MEASURES: dict[str, tuple[str, Callable[[pd.Series], pd.Series]]] = {
    "tokens": ("n_tokens", _number),
    "unfinished": ("finish_reason", lambda column: column.map(_FINISHED).astype(float)),
    "reached": ("reached", _number),
    "reference_logprob": (names.REFERENCE_LOGPROB, _number),
}
SHARES = ("unfinished", "reached")  # the other measures are no shares of answers
_COLUMNS = {  # measure → its column in the table for people, and decimals of a mean
    "tokens": ("tokens an answer", 1),
    "unfinished": ("unfinished", 3),
    "reached": ("reached, then wrong", 3),
    "reference_logprob": ("perplexity of references", 3),
}


@dataclass(frozen=True)
class Answers:
    """A cell's answers, compared with those of its reference.

    Attributes:
        means: measure → its mean: `tokens` an answer, the shares `unfinished` and `reached` (the right value, before
            the answer went on to be wrong or cut), `reference_logprob` (nats a token of the reference solutions). What
            the rows do not hold is left out.
        changes: measure → cell − reference; empty without one.
        right_to_wrong, wrong_to_right: answers that changed; None without a reference, and for several samples. With
            partial credit, answers with less and with more of it.
        mcnemar: exact p of "as many changed either way"; None too for several training runs.
    """

    means: dict[str, Estimate] = field(default_factory=dict)
    changes: dict[str, Estimate] = field(default_factory=dict)
    right_to_wrong: int | None = None
    wrong_to_right: int | None = None
    mcnemar: float | None = None
    partial: bool = False  # whether answers have partial credit
    compared: int | None = None  # answers, over all training runs; None where those that changed are not counted

    @property
    def perplexity(self) -> float | None:
        """exp(−mean log-likelihood a token) of the reference solutions, if that is known."""
        mean = self.means.get("reference_logprob")
        return None if mean is None else math.exp(min(700.0, -mean.estimate))


def measure(rows: Answered, changed: pd.DataFrame, references: References) -> dict[Cell, Answers]:
    """Return what is known of each cell's answers.

    Args:
        rows: the table of answers.
        changed: from `find_changed`.
        references: of all cells, in order.

    Raises:
        BadInput: a column that should hold numbers holds something else.
    """
    by_cell = {cell: Answers() for cell in references}
    for name, (column, parse) in MEASURES.items():
        if column in rows.frame:
            _add_measure(by_cell, rows, name, parse(pd.Series(rows.frame[column])), references)

    evidence = rows.outcomes
    for cell, reference in references.items():
        # With several samples a question has no single verdict that could change.
        if reference and max(evidence.samples[cell], evidence.samples[reference]) == 1:
            by_cell[cell] = _with_changes(by_cell[cell], cell, reference, evidence, changed)
    return by_cell


def _add_measure(
    by_cell: Mapping[Cell, Answers], rows: Answered, name: str, values: pd.Series, references: References
) -> None:
    """Add a measure's mean, and its difference to the reference, to each cell; nothing if too little is known."""
    known_rows, known_values = rows.known(values)
    if len(np.unique(known_rows.question)) < 2:
        return
    if name in SHARES:
        minimum, maximum = 0.0, 1.0
    else:
        minimum, maximum = float(known_values.min()), float(known_values.max())
    scale = maximum - minimum or 1.0
    try:
        scaled = known_rows.read((known_values - minimum) / scale)
    except BadInput:  # known of too few questions or clusters for an interval
        return

    for cell, answers in by_cell.items():
        mean = scaled.accuracy(cell) if name in SHARES else scaled.contrast({cell: 1})
        answers.means[name] = mean.scaled(scale, minimum)
        reference = references[cell]
        if reference:
            answers.changes[name] = scaled.contrast({cell: 1, reference: -1}).scaled(scale)


def _with_changes(answers: Answers, cell: Cell, reference: Cell, evidence: Questions, changed: pd.DataFrame) -> Answers:
    """Return a cell's answers with the number of those that changed in each direction."""
    variant, scheme = cell
    of_cell = changed.loc[(changed["variant"] == variant) & (changed["scheme"] == scheme)]
    improved = of_cell["correct"] > of_cell["correct_full"]
    # The base is one model, so its answers are compared once, not once for each training run.
    compared = evidence.n if variant == names.BASE else sum(map(len, evidence.groups))
    return replace(
        answers,
        right_to_wrong=int((~improved).sum()),
        wrong_to_right=int(improved.sum()),
        compared=compared,
        partial=evidence.partial,
        mcnemar=evidence.mcnemar(cell, reference),
    )


def find_changed(rows: Answered, references: References) -> pd.DataFrame:
    """Return the answers that were graded differently from their reference's, in the order of the rows.

    Args:
        rows: the table of answers; cells with several samples per question are left out.
        references: of the cells.

    Returns:
        The rows of cells that have a reference: variant, scheme, seed, question, correct (0..1), and of the reference
        `correct_full`; and what the rows hold of question_text, answer, parsed, parsed_full, completion,
        completion_full, and of `tables.ROW`.
    """
    positions, reference_positions = _pairs(rows, references)
    correct = rows.table["correct"].to_numpy()
    differs = correct[positions] != correct[reference_positions]
    positions = positions[differs]
    reference_positions = reference_positions[differs]

    pairs = rows.table.iloc[positions][["variant", "scheme", "seed", "question"]].astype(str)
    pairs = pairs.assign(correct=correct[positions])
    pairs.loc[pairs["variant"] == names.BASE, "seed"] = ""

    frame = rows.frame
    for name in (*_TEXTS, ROW):
        if name in frame and name not in ("parsed_full", "completion_full"):
            pairs[name] = frame[name].iloc[positions]
    pairs = pairs.reset_index(drop=True).assign(correct_full=correct[reference_positions])
    for name in ("parsed", "completion", ROW):
        if name in frame:
            pairs[f"{name}_full"] = frame[name].iloc[reference_positions].reset_index(drop=True)
    return pairs


def _pairs(rows: Answered, references: References) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of rows that have a reference, and for each the position of the reference's row.

    Rows are paired through one number for each combination of cell, training run and question, since joining a table of
    millions of rows by three columns of texts takes far longer.
    """
    index_of_cell = {cell: index for index, cell in enumerate(rows.cells)}
    reference_index = np.full(len(rows.cells), -1)
    for index, cell in enumerate(rows.cells):
        reference = references[cell]
        if reference:
            reference_index[index] = index_of_cell.get(reference, -1)
    is_base = np.array([variant == names.BASE for variant, _ in rows.cells])
    seeds = rows.table["seed"].cat
    count_seeds = len(seeds.categories)

    def key(cell: np.ndarray) -> np.ndarray:
        seed = np.where(is_base[cell], 0, seeds.codes + 1)  # the base is one model under every seed
        return (cell * np.int64(count_seeds + 1) + seed) * len(rows.questions) + rows.question

    has_one_sample = ~np.isin(rows.cell, rows.sampled)
    of_references = np.flatnonzero(np.isin(rows.cell, reference_index) & has_one_sample)
    reference_keys, first = np.unique(key(rows.cell)[of_references], return_index=True)
    positions = np.flatnonzero((reference_index[rows.cell] >= 0) & has_one_sample)
    wanted_keys = key(reference_index[rows.cell])

    # Under several seeds, the base may have been evaluated several times; its first answer counts.
    if count_seeds > 1:
        answers = pd.DataFrame({"cell": rows.cell[positions], "key": wanted_keys[positions]})
        positions = positions[~answers.duplicated().to_numpy()]
    if not len(reference_keys):
        return positions[:0], positions[:0]
    matches = np.minimum(np.searchsorted(reference_keys, wanted_keys[positions]), len(reference_keys) - 1)
    is_paired = reference_keys[matches] == wanted_keys[positions]
    return positions[is_paired], of_references[first[matches]][is_paired]


def sample_texts(changed: pd.DataFrame, texts: Texts | None = None) -> pd.DataFrame:
    """Return at most `SHOWN` changed answers of each cell and direction, as texts that a page can show.

    Args:
        changed: from `find_changed`.
        texts: where its rows were read from, if only the columns that are computed with were read.

    Returns:
        Columns variant, scheme, seed, change, question, and those of question_text, answer, parsed_full, parsed,
        completion_full and completion that are known. Long texts lack their middle, and control characters are
        replaced; the texts are a model's, so whoever shows them must escape them.
    """
    if changed.empty:
        return pd.DataFrame()
    improved = changed["correct"] > changed["correct_full"]
    change = np.where(improved, "wrong → right", "right → wrong")
    partial = ~(changed["correct"].isin((0, 1)) & changed["correct_full"].isin((0, 1)))
    change[partial] = np.where(improved, "more credit", "less credit")[partial]
    sample = changed.assign(change=change).sort_values(["variant", "scheme", "change"], kind="stable")
    sample = sample.groupby(["variant", "scheme", "change"]).head(SHOWN)

    if texts and ROW in sample:  # an answer that was missing is in no file
        of_cell = texts.take(pd.Series(sample[ROW]), [name for name in _TEXTS if not name.endswith("_full")])
        of_reference = texts.take(pd.Series(sample[f"{ROW}_full"]), ["parsed", "completion"]).add_suffix("_full")
        sample = sample.assign(**of_cell, **of_reference)
    columns = ["variant", "scheme", "seed", "change", "question", *(name for name in _TEXTS if name in sample)]
    return pd.DataFrame(sample[columns]).map(_clean).reset_index(drop=True)


def _clean(value: Any) -> str:
    """Return a value as text without control characters, its middle cut out if it is long."""
    is_missing = pd.api.types.is_scalar(value) and pd.isna(value)
    text = "" if is_missing else str(value)
    text = _CONTROL.sub("\ufffd", text)
    if len(text) <= LONGEST:
        return text
    start = LONGEST // 4
    end = LONGEST - start
    return f"{text[:start]}\n[… {len(text) - LONGEST:,} characters left out …]\n{text[-end:]}"


def markdown(
    by_cell: Mapping[Cell, Answers],
    cell_label: Callable[[Cell], str],
    reference_label: str,
    references: References | None = None,
) -> list[str]:
    """Return a table of the answers, if more is known of them than right or wrong, or if some of them changed.

    Args:
        by_cell: in the order of rows.
        cell_label: returns a cell's name.
        reference_label: what the reference is, in words.
        references: of the cells, for a column; None if `reference_label` says which they are.
    """
    if not any(answers.means or answers.right_to_wrong is not None for answers in by_cell.values()):
        return []
    counts: dict[str, int] = {}  # measure → answers for which it is known
    for answers in by_cell.values():
        counts |= {name: mean.n for name, mean in answers.means.items()}

    head = ["cell"]
    if references:
        head.append("reference")
    head += [f"{_COLUMNS[name][0]} (n = {n})" for name, n in counts.items()]
    if any(answers.partial for answers in by_cell.values()):
        head += ["less credit", "more credit"]
    else:
        head += ["right → wrong", "wrong → right"]
    head.append("McNemar's p")

    body = []
    for cell, answers in by_cell.items():
        line = [cell_label(cell)]
        if references:
            reference = references[cell]
            line.append(cell_label(reference) if reference else "")
        line += [_measure_text(answers, name) for name in counts]
        for count in (answers.right_to_wrong, answers.wrong_to_right):
            line.append("" if count is None else f"{count} of {answers.compared}")
        line.append("" if answers.mcnemar is None else p_text(answers.mcnemar))
        body.append(line)

    note = f"Brackets: the difference to {reference_label}, and its interval. Where few answers differ it is widened: "
    note += "a rare, large change may not have been drawn."
    if "reached" in counts:
        note += " *reached, then wrong*: the right value appears before a wrong or missing answer."
    if "reference_logprob" in counts:
        note += " *references*: worked solutions; the difference is that of their log-likelihood, in nats a token."
    return ["## Answers", "", *table(head, body), "", note, ""]


def _measure_text(answers: Answers, name: str) -> str:
    if name not in answers.means:
        return ""
    _, decimals = _COLUMNS[name]
    mean = answers.perplexity if name == "reference_logprob" else answers.means[name].estimate
    text = f"{mean:.{decimals}f}"
    if name in answers.changes:
        text += f", {interval(answers.changes[name])}"
    return text


def as_json(answers: Answers) -> dict[str, Any]:
    """Return a cell's entry in table.json: measure → {"n", "mean", "change"}, then counts."""
    entry: dict[str, Any] = {}
    for name, mean in answers.means.items():
        entry[name] = {"n": mean.n, "mean": numbers(mean), "change": numbers_or_null(answers.changes.get(name))}
    entry["reference_perplexity"] = answers.perplexity
    for name in ("right_to_wrong", "wrong_to_right", "compared", "mcnemar"):
        entry[name] = getattr(answers, name)
    return entry


def metrics(folder: str, by_cell: Mapping[Cell, Answers], suffix: Callable[[Cell], str]) -> dict[str, float]:
    """Return `<folder>/<measure>_change_<suffix>` of answers, with its ends, and how many of them changed."""
    scores = {}
    for cell, answers in by_cell.items():
        for name, change in answers.changes.items():
            scores |= with_ends(f"{folder}/{name}_change_{suffix(cell)}", change, "stderr")
        for name in ("right_to_wrong", "wrong_to_right"):
            count = getattr(answers, name)
            if count is not None:
                scores[f"{folder}/{name}_{suffix(cell)}"] = float(count)
    return scores
