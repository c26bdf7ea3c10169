"""Answers that are missing, counted as wrong where that is wanted.

Dropping the questions that a cell did not answer would select: what a model could not answer in time is rarely easy. So
a cell that lacks answers is refused, unless each of them may count as wrong.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from qrl import names
from qrl.compare.evidence import Cell
from qrl.compare.outcomes import MISSING_ANSWERS
from qrl.compare.validate import COLUMNS, cells_of, labels, seed_labels
from qrl.errors import BadInput
from qrl.files.tables import ROW

WRONG = "wrong"
NO_ROW = -1  # in the column `tables.ROW`: this answer is in no file
NO_SEED = -1  # instead of a seed's number: the base is one model, so its answers serve all training runs
_OF_QUESTION = ("cluster", "subject", "level", names.QUESTION_TEXT, "answer")
_OF_CELL = (names.ENGINE, names.DTYPE, names.SETTINGS)


@dataclass(frozen=True)
class _Missing:
    """Missing answers: for each its cell, seed and question as numbers, and the position of a row of the same cell."""

    cell: np.ndarray
    seed: np.ndarray
    question: np.ndarray
    template: np.ndarray


def check_missing(missing: str | None) -> None:
    """Raise BadInput if missing answers shall count as anything but wrong."""
    if missing not in (None, WRONG):
        raise BadInput(f"missing is {missing!r:.40}, but must be '{WRONG}', which counts missing answers as wrong.")


def fill(frame: pd.DataFrame, missing: str | None) -> pd.DataFrame:
    """Return the table with a row, `correct` 0, for each answer that a cell lacks and another cell has.

    Args:
        frame: a row per cell and question, as `from_questions` takes it; a row without a value of `correct` is a
            missing answer too.
        missing: "wrong"; None returns the table as it is.

    Returns:
        The table; its attribute `MISSING_ANSWERS` maps cells to the number of answers that were missing.

    Raises:
        BadInput: `missing` is something else.
    """
    check_missing(missing)
    needed = [column for column in COLUMNS if column != "correct"]
    is_unreadable = frame.empty or not set(COLUMNS) <= set(frame.columns) or bool(frame[needed].isna().to_numpy().any())
    if missing is None or is_unreadable:  # what is wrong with such a table, the comparison says
        return frame

    attributes = dict(frame.attrs)
    frame = frame.reset_index(drop=True)
    seeds = seed_labels(pd.Series(frame["seed"])) if "seed" in frame else pd.Series("", index=frame.index)
    without_outcome = frame["correct"].isna().to_numpy()
    correct = frame["correct"].astype(object).where(~without_outcome, 0)
    frame = frame.assign(**{column: labels(pd.Series(frame[column])) for column in needed}, correct=correct)

    cell_of_row, cells = cells_of(frame)
    seed_codes, seed_names = pd.factorize(seeds)
    lacking = _lacking(frame, cells, cell_of_row, seed_codes)
    counts = np.bincount(cell_of_row[without_outcome], minlength=len(cells))
    counts = counts + np.bincount(lacking.cell, minlength=len(cells))
    if len(lacking.cell):
        frame = _with_rows(frame, seeds, list(seed_names), lacking)
    by_cell = {cells[index]: int(count) for index, count in enumerate(counts) if count}
    frame.attrs = attributes | {MISSING_ANSWERS: by_cell}
    return frame


def notes(missing_answers: Mapping[Cell, int], n: int) -> list[str]:
    """Return a sentence on each cell with answers that were missing.

    Args:
        missing_answers: cell → answers that were missing, over all training runs and samples.
        n: questions.
    """
    return [
        f"{names.cell_name(*cell)} lacked {count:,} answer(s) to the {n:,} questions; they count as wrong "
        f"(`--missing {WRONG}`)."
        for cell, count in missing_answers.items()
    ]


def _lacking(frame: pd.DataFrame, cells: list[Cell], cell_of_row: np.ndarray, seeds: np.ndarray) -> _Missing:
    """Return the answers that cells lack to questions which other cells answered in the same training run."""
    question = frame["question"].cat.codes.to_numpy()
    count_questions = len(frame["question"].cat.categories)
    is_trained = np.array([variant != names.BASE for variant, _ in cells])
    trained_seeds = np.unique(seeds[is_trained[cell_of_row]])
    questions_of_run = {seed: np.unique(question[seeds == seed]) for seed in trained_seeds}

    parts = []
    for index in range(len(cells)):
        of_cell = np.flatnonzero(cell_of_row == index)
        samples = _samples(question[of_cell], seeds[of_cell])
        runs_of_cell = [seed for seed in questions_of_run if seed in seeds[of_cell]]
        counts = np.zeros(count_questions, dtype=int)  # answers under any seed, or added
        np.add.at(counts, question[of_cell], 1)

        for seed in runs_of_cell:
            of_run = of_cell[seeds[of_cell] == seed]
            answered = np.bincount(question[of_run], minlength=count_questions)
            questions = questions_of_run[seed]
            lacking = np.repeat(questions, samples - answered[questions])
            counts[lacking] += 1
            parts.append((index, seed, lacking, of_run[0]))

        # Base answers under any seed serve all runs. A trained cell that was not evaluated under a seed is another
        # matter, which the comparison refuses.
        if not is_trained[index]:
            for seed in questions_of_run.keys() - set(runs_of_cell):
                questions = questions_of_run[seed]
                lacking = np.repeat(questions[counts[questions] == 0], samples)
                counts[lacking] += 1
                parts.append((index, NO_SEED, lacking, of_cell[0]))

    sizes = np.array([len(lacking) for _, _, lacking, _ in parts], dtype=int)
    return _Missing(
        cell=np.repeat([index for index, _, _, _ in parts], sizes).astype(int),
        seed=np.repeat([seed for _, seed, _, _ in parts], sizes).astype(int),
        question=np.concatenate([np.zeros(0, dtype=int), *(lacking for _, _, lacking, _ in parts)]),
        template=np.repeat([row for _, _, _, row in parts], sizes).astype(int),
    )


def _samples(question: np.ndarray, seeds: np.ndarray) -> int:
    """Return how many answers a cell has to a question under a seed, at most."""
    _, counts = np.unique(np.stack([question, seeds]), axis=1, return_counts=True)
    return counts.max()


def _with_rows(frame: pd.DataFrame, seeds: pd.Series, seed_names: list[str], missing: _Missing) -> pd.DataFrame:
    """Return the table with a row per missing answer, its labels from other answers to the question or of the cell."""
    codes = frame["question"].cat.codes.to_numpy()
    first_of_question = np.zeros(len(frame["question"].cat.categories), dtype=int)
    first_of_question[codes[::-1]] = np.arange(len(codes))[
        ::-1
    ]  # in reverse, so that the first row is the last one set
    same_question = first_of_question[missing.question]

    columns = {}
    for name in _OF_QUESTION:
        if name in frame:
            columns[name] = frame[name].take(same_question).reset_index(drop=True)
    for name in ("variant", "scheme", *_OF_CELL):
        if name in frame:
            columns[name] = frame[name].take(missing.template).reset_index(drop=True)
    columns["question"] = frame["question"].take(same_question).reset_index(drop=True)
    rows = pd.DataFrame(columns)
    rows["correct"] = 0
    if "seed" in frame:
        frame = frame.assign(seed=seeds)
        rows["seed"] = ["" if code == NO_SEED else seed_names[code] for code in missing.seed]
    if "sample" in frame:  # numbers of their own, so that none is given twice
        rows["sample"] = [f"missing {number}" for number in range(len(rows))]
        frame = frame.assign(sample=frame["sample"].astype(object))
    if ROW in frame:
        rows[ROW] = NO_ROW
    return pd.concat([frame, rows], ignore_index=True)
