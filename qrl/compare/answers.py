"""Answers beyond right and wrong: their length, how they end, how likely the reference solutions are, what changed.

A cell is compared with a reference, such as the same variant at full precision, paired by question, by the intervals of
`contrast`: it takes values in 0..1, so token counts and log-likelihoods are scaled to that range and back.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd

from qrl import names
from qrl.compare.evidence import Cell
from qrl.compare.outcomes import Answered
from qrl.errors import BadInput
from qrl.files.tables import ROW, Texts
from qrl.stats import Estimate

References = Mapping[Cell, Cell | None]  # cell → the one that it is compared with; None: it is a reference itself
SHOWN = 20  # changed answers of a cell and direction in the table for people
LONGEST = 2000  # characters of a text in it, of which its end gets three quarters

_FINISHED = {"stop": 0.0, "length": 1.0}  # finish_reason → whether the answer was cut
_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
_TEXTS = (names.QUESTION_TEXT, "answer", "parsed_full", "parsed", "completion_full", "completion")


def _number(column: pd.Series) -> pd.Series:
    values = pd.Series(pd.to_numeric(column, errors="coerce"), dtype=float)
    if wrong := list(column[values.isna() & column.notna()]):
        raise BadInput(f"The column '{column.name}' holds {str(wrong[0])[:40]!r}, but must hold numbers.")
    return values.where(values.abs() < math.inf)


# measure → the column of the rows that it is read from, and how
MEASURES: dict[str, tuple[str, Callable[[pd.Series], pd.Series]]] = {
    "tokens": ("n_tokens", _number),
    "unfinished": ("finish_reason", lambda column: column.map(_FINISHED).astype(float)),
    "reached": ("reached", _number),
    "reference_logprob": (names.REFERENCE_LOGPROB, _number),
}
SHARES = ("unfinished", "reached")  # the others are no shares of answers


@dataclass(frozen=True)
class Answers:
    """A cell's answers, beside those of its reference.

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


def measured(rows: Answered, changed: pd.DataFrame, references: References) -> dict[Cell, Answers]:
    """Return what is known of each cell's answers.

    Args:
        rows: the table of answers.
        changed: from `changed`.
        references: of all cells, in order.

    Raises:
        BadInput: a column that should hold numbers holds something else.
    """
    found, evidence = {cell: Answers() for cell in references}, rows.outcomes
    for name, (column, read) in MEASURES.items():
        if column not in rows.frame:
            continue
        known, values = rows.known(read(pd.Series(rows.frame[column])))
        if len(np.unique(known.question)) < 2:
            continue
        ends = (0.0, 1.0) if name in SHARES else (values.min(), values.max())
        least, scale = float(ends[0]), float(ends[1] - ends[0]) or 1.0
        try:
            scaled = known.read((values - least) / scale)
        except BadInput:  # known of too few questions or clusters for an interval
            continue
        for cell, answers in found.items():
            mean = scaled.accuracy(cell) if name in SHARES else scaled.contrast({cell: 1})
            answers.means[name] = mean.scaled(scale, least)
            if reference := references[cell]:
                answers.changes[name] = scaled.contrast({cell: 1, reference: -1}).scaled(scale)
    for cell, reference in references.items():
        if reference and max(evidence.samples[cell], evidence.samples[reference]) == 1:
            own = changed.loc[(changed["variant"] == cell[0]) & (changed["scheme"] == cell[1])]
            more = own["correct"] > own["correct_full"]
            counts = {"right_to_wrong": int((~more).sum()), "wrong_to_right": int(more.sum())}
            counts["compared"] = evidence.n if cell[0] == names.BASE else sum(map(len, evidence.groups))
            mcnemar = evidence.mcnemar(cell, reference)
            found[cell] = replace(found[cell], **counts, partial=rows.partial, mcnemar=mcnemar)
    return found


def changed(rows: Answered, references: References) -> pd.DataFrame:
    """Return the answers whose verdict differs from their reference's, in the order of the rows.

    Args:
        rows: the table of answers; cells with several samples per question are left out.
        references: of the cells.

    Returns:
        The rows of cells that have a reference: variant, scheme, seed, question, correct (0..1), and of the reference
        `correct_full`; and what the rows hold of question_text, answer, parsed, parsed_full, completion,
        completion_full, and of `tables.ROW`.
    """
    table, frame = rows.table, rows.frame
    places = {cell: place for place, cell in enumerate(rows.cells)}
    of_cells = [references[cell] for cell in rows.cells]
    against = np.array([places.get(cell, -1) if cell else -1 for cell in of_cells])
    base, seeds = np.array([variant == names.BASE for variant, _ in rows.cells]), table["seed"].cat

    def key(cell: np.ndarray) -> np.ndarray:
        seed = np.where(base[cell], 0, seeds.codes + 1)  # the base is one model under every seed
        return (cell * np.int64(len(seeds.categories) + 1) + seed) * len(rows.questions) + rows.question

    single = ~np.isin(rows.cell, rows.sampled)
    full = np.flatnonzero(np.isin(rows.cell, against) & single)
    whole, of_whole = np.unique(key(rows.cell)[full], return_index=True)
    own = np.flatnonzero((against[rows.cell] >= 0) & single)
    wanted = key(against[rows.cell])
    if len(seeds.categories) > 1:
        cells = pd.DataFrame({"cell": rows.cell[own], "key": wanted[own]})
        own = own[~cells.duplicated().to_numpy()]
    if not len(whole):
        own = own[:0]
    at = np.minimum(np.searchsorted(whole, wanted[own]), len(whole) - 1)
    own, other = (side[whole[at] == wanted[own]] for side in (own, full[of_whole[at]]))
    correct = table["correct"].to_numpy()
    own, other = (side[correct[own] != correct[other]] for side in (own, other))
    columns = ["variant", "scheme", "seed", "question"]
    pairs = table.iloc[own][columns].astype(str).assign(correct=correct[own])
    pairs.loc[pairs["variant"] == names.BASE, "seed"] = ""
    texts = [name for name in (*_TEXTS, ROW) if name in frame and name not in ("parsed_full", "completion_full")]
    pairs = pairs.assign(**{name: frame[name].iloc[own] for name in texts}).reset_index(drop=True)
    both = [name for name in ("parsed", "completion", ROW) if name in frame]
    twins = {f"{name}_full": frame[name].iloc[other].reset_index(drop=True) for name in both}
    return pairs.assign(correct_full=correct[other], **twins)


def shown(changed: pd.DataFrame, texts: Texts | None = None) -> pd.DataFrame:
    """Return at most `SHOWN` changed answers of each cell and direction, as texts that a page can show.

    Args:
        changed: from `changed`.
        texts: where its rows were read from, if only the columns that are computed with were read.

    Returns:
        Columns variant, scheme, seed, change, question, and those of question_text, answer, parsed_full, parsed,
        completion_full and completion that are known. Long texts lack their middle, and control characters are
        replaced; the texts are a model's, so whoever shows them must escape them.
    """
    if changed.empty:
        return pd.DataFrame()
    more = changed["correct"] > changed["correct_full"]
    change = np.where(more, "wrong → right", "right → wrong")
    partial = ~(changed["correct"].isin((0, 1)) & changed["correct_full"].isin((0, 1)))
    change[partial] = np.where(more, "more credit", "less credit")[partial]
    table = changed.assign(change=change).sort_values(["variant", "scheme", "change"], kind="stable")
    table = table.groupby(["variant", "scheme", "change"]).head(SHOWN)
    if texts and ROW in table:  # an answer that was missing is in no file
        own = texts.take(pd.Series(table[ROW]), [name for name in _TEXTS if not name.endswith("_full")])
        full = texts.take(pd.Series(table[f"{ROW}_full"]), ["parsed", "completion"]).add_suffix("_full")
        table = table.assign(**own, **full)
    columns = ["variant", "scheme", "seed", "change", "question", *(name for name in _TEXTS if name in table)]
    return pd.DataFrame(table[columns]).map(_clean).reset_index(drop=True)


def _clean(value: Any) -> str:
    missing = pd.api.types.is_scalar(value) and pd.isna(value)
    text = _UNSEEN.sub("\ufffd", "" if missing else str(value))
    if len(text) <= LONGEST:
        return text
    start, end = LONGEST // 4, LONGEST - LONGEST // 4
    return f"{text[:start]}\n[… {len(text) - LONGEST:,} characters left out …]\n{text[-end:]}"


def as_json(by_cell: Mapping[Cell, Answers], cell: Cell, numbers: Callable[[Estimate], dict]) -> dict | None:
    """Return a cell's entry in table.json: measure → {"n", "mean", "change"}, then counts; None without any."""
    if (answers := by_cell.get(cell)) is None:
        return None
    entry: dict = {}
    for name, mean in answers.means.items():
        change = answers.changes.get(name)
        entry[name] = {"n": mean.n, "mean": numbers(mean), "change": numbers(change) if change else None}
    entry["reference_perplexity"] = answers.perplexity
    return entry | {key: getattr(answers, key) for key in ("right_to_wrong", "wrong_to_right", "compared", "mcnemar")}
