"""Outcomes of all cells, aligned by question and training run."""

from collections import Counter

import numpy as np
import pandas as pd

from qrl.compare.evidence import Cell, Questions
from qrl.compare.validate import ENOUGH, LABEL, LABEL_RULE, check_grid, checked, quoted
from qrl.errors import BadInput
from qrl.names import BASE, cell_name

CELL = ["variant", "scheme"]


def outcomes(frame: pd.DataFrame) -> Questions:
    """Return cells' outcomes from a table of answers.

    The base is one model under every seed. If it was not evaluated under a run's seed, its answers to the same
    questions are taken from its rows without a seed, or else from the first other seed.

    Args:
        frame: columns variant, scheme, question, correct, and optionally seed (training run), sample (of several
            answers to one question) and cluster (group of questions).

    Raises:
        BadInput: the cells are not comparable.
    """
    return aligned(checked(frame))


def aligned(table: pd.DataFrame) -> Questions:
    """Return cells' values, aligned; `table` is from `checked`, its column `correct` any values in 0..1.

    Raises:
        BadInput: the cells are not comparable.
    """
    check_grid(dict.fromkeys(zip(table["variant"], table["scheme"], strict=True)), len(set(table["question"])))
    counted = table.groupby([*CELL, "seed", "question"], sort=True)["correct"].agg(["mean", "size"]).reset_index()
    samples, runs = _samples(counted), _runs(counted)
    wide = [_wide(counted, run) for run in runs]
    groups, clusters = _groups(table, [run.index for run in wide])
    for run, group in zip(runs, groups, strict=True):
        if len(np.unique(group)) < 2:
            raise BadInput(f"Seed {run} has questions of one group only, which give no error bar: {ENOUGH}.")
    cells = {cell: tuple(run[cell].to_numpy(dtype=float) for run in wide) for cell in samples}
    n = len(set().union(*(run.index for run in wide)))
    return Questions(runs, cells, groups, samples, n, clusters, _differing(counted))


def _samples(counted: pd.DataFrame) -> dict[Cell, int]:
    """Return each cell's answers per question, the same for all its questions."""
    most = counted.groupby(CELL)["size"].transform("max")
    short = pd.DataFrame(counted[counted["size"] < most])
    if len(short):
        row = short.iloc[0]
        raise BadInput(
            f"Cell {cell_name(row.variant, row.scheme)} answers question '{row.question}' {row['size']} time(s), "
            f"others {most[short.index[0]]} times: expected the same number of samples for every question of a cell."
        )
    return counted.groupby(CELL)["size"].first().to_dict()


def _runs(counted: pd.DataFrame) -> tuple[str, ...]:
    """Return the seeds of the trained variants, the same in each of their cells; one empty label if there are none."""
    by_cell = counted[counted["variant"] != BASE].groupby(CELL)["seed"].agg(set).to_dict()
    every = set().union(*by_cell.values())
    for cell, seeds in by_cell.items():
        if "" in seeds and len(every) > 1:
            mixed = f"Cell {cell_name(*cell)} has answers without a seed beside others with one"
            raise BadInput(f"{mixed}: name the training run of every answer.")
        if seeds != every:
            lacks = f"lacks seed {quoted(sorted(every - seeds))} of {quoted(sorted(every))}"
            raise BadInput(f"Cell {cell_name(*cell)} {lacks}: every trained cell is needed for every training run.")
    for label in every:
        if label and not LABEL.fullmatch(label):
            raise BadInput(f"'{label}' is no label for a seed: {LABEL_RULE}.")
    numbers = sorted(filter(str.isdecimal, every), key=lambda label: (int(label), label))
    return *numbers, *sorted(every.difference(numbers))


def _differing(counted: pd.DataFrame) -> dict[Cell, int]:
    of_base = counted[counted["variant"] == BASE]
    ends = of_base.groupby([*CELL, "question"])["mean"].agg(["min", "max"])
    return dict(Counter((variant, scheme) for variant, scheme, _ in ends.query("min != max").index))


def _wide(counted: pd.DataFrame, run: str) -> pd.DataFrame:
    """Return one run's outcomes: a row per question, a column per cell, all cells on the same questions."""
    own = counted[counted["seed"] == run]
    has_own = counted["scheme"].isin(own.loc[own["variant"] == BASE, "scheme"])
    lent = (counted["variant"] == BASE) & ~has_own & counted["question"].isin(list(own["question"]))
    lent = pd.DataFrame(counted[lent]).drop_duplicates([*CELL, "question"])  # sorted: rows without a seed come first
    wide = pd.concat([own, lent]).pivot(index="question", columns=CELL, values="mean")
    cells = pd.MultiIndex.from_frame(pd.DataFrame(counted[CELL]).drop_duplicates())
    wide = wide.reindex(columns=cells).sort_index()
    gaps = wide.isna().to_numpy()  # (questions, cells)
    if gaps.any():
        worst = int(gaps.sum(axis=0).argmax())
        cell, question = cells[worst], wide.index[int(gaps[:, worst].argmax())]
        raise BadInput(
            f"Cell {cell_name(*cell)} lacks {gaps[:, worst].sum()} of {len(wide)} questions"
            f"{f' under seed {run}' if run else ''}, '{question}' first: cells are compared on the same questions only."
        )
    return wide


def _groups(table: pd.DataFrame, questions: list[pd.Index]) -> tuple[tuple[np.ndarray, ...], int | None]:
    """Return a number for each question of each run, or for its cluster; and how many clusters there are."""
    every = pd.Index(sorted(set().union(*questions)))
    if "cluster" not in table or bool(table["cluster"].isna().all()):
        return tuple(every.get_indexer(run) for run in questions), None
    labels = pd.DataFrame(table.groupby("question")["cluster"].agg(["nunique", "first", "size", "count"]))
    broken = pd.DataFrame(labels[(labels["nunique"] != 1) | (labels["size"] != labels["count"])])
    if len(broken):
        expected = "each question belongs to one group, the same in every cell"
        raise BadInput(f"Question '{broken.index[0]}' has no single cluster: {expected}.")
    if len(set(labels["first"])) < 2:
        advice = "drop the column, or name the real groups"
        raise BadInput(f"All questions are in one cluster, which gives no error bar: {advice}.")
    codes, distinct = pd.factorize(labels["first"].astype(str), sort=True)
    of_question = pd.Series(codes, index=labels.index)
    return tuple(of_question.loc[run].to_numpy() for run in questions), len(distinct)
