"""Answers that are missing, counted as wrong where that is wanted.

To drop the questions that a cell did not answer selects: what a model could not answer in time is rarely easy. So a
cell that lacks answers is refused, unless each of them may count as wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from qrl import names
from qrl.compare.validate import COLUMNS, cells_of, labels, seed_labels
from qrl.errors import BadInput
from qrl.files.tables import ROW

if TYPE_CHECKING:
    from collections.abc import Mapping

    from qrl.compare.evidence import Cell

WRONG = "wrong"
FILLED = "qrl_filled"  # attribute of a frame: cell → how many of its answers were missing
NO_ROW = -1  # in the column `tables.ROW`: this answer is in no file
_OF_QUESTION = ("cluster", "subject", "level", names.QUESTION_TEXT, "answer")
_OF_CELL = (names.ENGINE, names.DTYPE, names.SETTINGS)


def check(missing: str | None) -> None:
    """Raise BadInput if missing answers shall count as anything but wrong."""
    if missing not in (None, WRONG):
        raise BadInput(f"missing is {missing!r:.40}, but must be '{WRONG}', which counts missing answers as wrong.")


def filled(frame: pd.DataFrame, missing: str | None) -> pd.DataFrame:
    """Return the table with a row, `correct` 0, for each answer that a cell lacks and another cell has.

    Args:
        frame: a row per cell and question, as `from_questions` takes it; a row without a value of `correct` is a
            missing answer too.
        missing: "wrong"; None returns the table as it is.

    Returns:
        The table; its attribute `FILLED` maps cells to the number of answers that were missing.

    Raises:
        BadInput: `missing` is something else.
    """
    check(missing)
    needed = [column for column in COLUMNS if column != "correct"]
    unreadable = frame.empty or not set(COLUMNS) <= set(frame.columns) or bool(frame[needed].isna().to_numpy().any())
    if missing is None or unreadable:  # what is wrong with such a table, the comparison says
        return frame
    attributes = dict(frame.attrs)
    frame = frame.reset_index(drop=True)
    seeds = seed_labels(pd.Series(frame["seed"])) if "seed" in frame else pd.Series("", index=frame.index)
    own_names = {column: labels(pd.Series(frame[column])) for column in needed}
    without = frame["correct"].isna().to_numpy()
    frame = frame.assign(**own_names, correct=frame["correct"].astype(object).where(~without, 0))
    of_row, cells = cells_of(frame)
    counts = np.bincount(of_row[without], minlength=len(cells))
    seed_codes, seed_names = pd.factorize(seeds)
    cell, seed, question, like = _lacking(frame, cells, of_row, seed_codes)
    counts = counts + np.bincount(cell, minlength=len(cells))
    if len(cell):
        frame = _with_rows(frame, seeds, list(seed_names), seed, question, like)
    frame.attrs = attributes | {FILLED: {cells[place]: int(count) for place, count in enumerate(counts) if count}}
    return frame


def notes(filled: Mapping[Cell, int], n: int) -> list[str]:
    """Return a sentence on each cell with answers that were missing.

    Args:
        filled: cell → answers that were missing, over all training runs and samples.
        n: questions.
    """
    return [
        f"{names.cell_name(*cell)} lacked {count:,} answer(s) to the {n:,} questions; they count as wrong "
        f"(`--missing {WRONG}`)."
        for cell, count in filled.items()
    ]


def _lacking(frame: pd.DataFrame, cells: list[Cell], of_row: np.ndarray, seeds: np.ndarray) -> np.ndarray:
    """Return (4, m) for each missing answer its cell, seed and question as numbers, and a row of the same cell.

    A seed of −1 stands for none: the base is one model, whose answers serve all training runs.
    """
    question = frame["question"].cat.codes.to_numpy()
    trained = np.array([variant != names.BASE for variant, _ in cells])
    asked = {run: np.unique(question[seeds == run]) for run in np.unique(seeds[trained[of_row]])}
    parts = [np.zeros((4, 0), dtype=int)]
    for place in range(len(cells)):
        of_cell = np.flatnonzero(of_row == place)
        samples = _samples(question[of_cell], seeds[of_cell])
        with_own = [run for run in asked if run in seeds[of_cell]]
        counts = np.zeros(len(frame["question"].cat.categories), dtype=int)  # answers under any seed, or added
        np.add.at(counts, question[of_cell], 1)
        for run in with_own:
            own = of_cell[seeds[of_cell] == run]
            under_run = np.bincount(question[own], minlength=len(counts))
            lacking = np.repeat(asked[run], samples - under_run[asked[run]])
            counts[lacking] += 1
            parts.append(_numbered(place, run, lacking, own[0]))
        if trained[place]:
            continue  # the comparison refuses a trained cell that was not evaluated under a seed
        for run in asked.keys() - set(with_own):
            lacking = np.repeat(asked[run][counts[asked[run]] == 0], samples)
            counts[lacking] += 1
            parts.append(_numbered(place, -1, lacking, of_cell[0]))
    return np.concatenate(parts, axis=1)


def _numbered(cell: int, seed: int, question: np.ndarray, like: int) -> np.ndarray:
    return np.stack(
        [np.full(len(question), cell), np.full(len(question), seed), question, np.full(len(question), like)]
    )


def _samples(question: np.ndarray, seeds: np.ndarray) -> int:
    """Return how many answers a cell has to a question under a seed, at most."""
    return np.unique(np.stack([question, seeds]), axis=1, return_counts=True)[1].max()


def _with_rows(
    frame: pd.DataFrame,
    seeds: pd.Series,
    seed_names: list[str],
    seed: np.ndarray,
    question: np.ndarray,
    like: np.ndarray,
) -> pd.DataFrame:
    """Return the table with a row per missing answer: of a question, like another answer of the same cell."""
    codes = frame["question"].cat.codes.to_numpy()
    first_of_question = np.zeros(len(frame["question"].cat.categories), dtype=int)
    first_of_question[codes[::-1]] = np.arange(len(codes))[::-1]
    same_question = first_of_question[question]
    sources = dict.fromkeys(_OF_QUESTION, same_question) | dict.fromkeys(("variant", "scheme", *_OF_CELL), like)
    columns = {name: frame[name].take(rows).reset_index(drop=True) for name, rows in sources.items() if name in frame}
    rows = pd.DataFrame(columns | {"question": frame["question"].take(same_question).reset_index(drop=True)})
    rows["correct"] = 0
    if "seed" in frame:
        frame = frame.assign(seed=seeds)
        rows["seed"] = [seed_names[code] if code >= 0 else "" for code in seed]
    if "sample" in frame:  # numbers of their own, so that none is given twice
        rows["sample"] = [f"missing {number}" for number in range(len(rows))]
        frame = frame.assign(sample=frame["sample"].astype(object))
    if ROW in frame:
        rows[ROW] = NO_ROW
    return pd.concat([frame, rows], ignore_index=True)
