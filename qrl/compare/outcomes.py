"""Outcomes of all cells, aligned by question and training run."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from qrl.compare.validate import LABEL, LABEL_RULE, check_grid, checked, quoted
from qrl.errors import BadInput
from qrl.names import BASE, cell_name

CELL = ["variant", "scheme"]


@dataclass(frozen=True)
class Outcomes:
    """Cells' outcomes per training run, aligned by question.

    Attributes:
        runs: seeds of the training runs; one empty label if they are not named.
        cells: (variant, scheme) → per run (n_s,) the share of each question's samples that are right; 0 or 1 for one
            sample.
        groups: per run (n_s,) a number for each question, or for its group of questions.
        samples: (variant, scheme) → answers to each question.
        n: distinct questions over all runs.
        clusters: number of groups of questions, or None if questions are independent.
        differing: cell of the base → questions on which its answers differ between seeds, though the base is one model;
            only cells with such questions.
    """

    runs: tuple[str, ...]
    cells: dict[tuple[str, str], tuple[np.ndarray, ...]]
    groups: tuple[np.ndarray, ...]
    samples: dict[tuple[str, str], int]
    n: int
    clusters: int | None
    differing: dict[tuple[str, str], int] = field(default_factory=dict)


def outcomes(frame: pd.DataFrame) -> Outcomes:
    """Return cells' outcomes from a table of answers.

    The base is one model under every seed. If it was not evaluated under a run's seed, its answers to the same
    questions are taken from its rows without a seed, or else from the first other seed.

    Args:
        frame: columns variant, scheme, question, correct, and optionally seed (training run), sample (of several
            answers to one question) and cluster (group of questions).

    Raises:
        BadInput: the cells are not comparable.
    """
    table = checked(frame)
    check_grid(dict.fromkeys(zip(table["variant"], table["scheme"], strict=True)), table["question"].nunique())
    counted = table.groupby([*CELL, "seed", "question"], sort=True)["correct"].agg(["mean", "size"]).reset_index()
    samples = _samples(counted)
    runs = _runs(counted)
    wide = [_wide(counted, run) for run in runs]
    groups, clusters = _groups(table, [run.index for run in wide])
    for run, group in zip(runs, groups, strict=True):
        if len(np.unique(group)) < 2:
            raise BadInput(
                f"Seed {run} has questions of one group only, which give no error bar: "
                "expected at least 2, and hundreds for a verdict."
            )
    cells = {cell: tuple(run[cell].to_numpy(dtype=float) for run in wide) for cell in samples}
    n = len(set().union(*(run.index for run in wide)))
    return Outcomes(runs, cells, groups, samples, n, clusters, _differing(counted))


def _samples(counted: pd.DataFrame) -> dict[tuple[str, str], int]:
    """Return each cell's answers per question, the same for all its questions."""
    samples = {}
    for (variant, scheme), part in counted.groupby(CELL):
        most = int(part["size"].max())
        short = part[part["size"] != most]
        if len(short):
            row = short.iloc[0]
            raise BadInput(
                f"Cell {cell_name(variant, scheme)} answers question '{row.question}' {row['size']} time(s), "
                f"others {most} times: expected the same number of samples for every question of a cell."
            )
        samples[variant, scheme] = most
    return samples


def _runs(counted: pd.DataFrame) -> tuple[str, ...]:
    """Return the seeds of the trained variants, the same in each of their cells; one empty label if there are none."""
    trained = counted[counted["variant"] != BASE]
    by_cell = {cell: set(part["seed"]) for cell, part in trained.groupby(CELL)}
    every = set().union(*by_cell.values())
    for cell, seeds in by_cell.items():
        if "" in seeds and len(every) > 1:
            raise BadInput(
                f"Cell {cell_name(*cell)} has answers without a seed beside others with one: "
                "name the training run of every answer."
            )
        if seeds != every:
            raise BadInput(
                f"Cell {cell_name(*cell)} lacks seed {quoted(sorted(every - seeds))} of {quoted(sorted(every))}: "
                "every trained cell is needed for every training run."
            )
    for label in every:
        if label and not LABEL.fullmatch(label):
            raise BadInput(f"'{label}' is no label for a seed: {LABEL_RULE}.")
    numbers_first = {label: (not label.isdecimal(), int(label) if label.isdecimal() else 0, label) for label in every}
    return tuple(sorted(every, key=numbers_first.__getitem__))


def _differing(counted: pd.DataFrame) -> dict[tuple[str, str], int]:
    of_base = counted[counted["variant"] == BASE]
    differs = of_base.groupby([*CELL, "question"])["mean"].nunique() > 1
    return {cell: int(count) for cell, count in differs.groupby(CELL).sum().items() if count}


def _wide(counted: pd.DataFrame, run: str) -> pd.DataFrame:
    """Return one run's outcomes: a row per question, a column per cell, all cells on the same questions."""
    own = counted[counted["seed"] == run]
    parts = [own]
    for scheme, base in counted[counted["variant"] == BASE].groupby("scheme"):
        if run not in set(base["seed"]):
            others = base[base["question"].isin(own["question"])]
            others = others.drop_duplicates("question")  # sorted: rows without a seed come first
            parts.append(others.assign(variant=BASE, scheme=scheme))
    wide = pd.concat(parts).pivot(index="question", columns=CELL, values="mean")
    wide = wide.reindex(columns=pd.MultiIndex.from_frame(counted[CELL].drop_duplicates())).sort_index()
    gaps = wide.isna().sum()
    if gaps.any():
        cell = gaps.idxmax()
        question = wide.index[wide[cell].isna()][0]
        raise BadInput(
            f"Cell {cell_name(*cell)} lacks {gaps.max()} of {len(wide)} "
            f"questions{f' under seed {run}' if run else ''}, "
            f"'{question}' first: cells are compared on the same questions only."
        )
    return wide


def _groups(table: pd.DataFrame, questions: list[pd.Index]) -> tuple[tuple[np.ndarray, ...], int | None]:
    """Return a number for each question of each run, or for its cluster; and how many clusters there are."""
    every = pd.Index(sorted(set().union(*questions)))
    if "cluster" not in table or table["cluster"].isna().all():
        return tuple(every.get_indexer(run) for run in questions), None
    labels = table.groupby("question")["cluster"].agg(["nunique", "first", "size", "count"])
    broken = labels[(labels["nunique"] != 1) | (labels["size"] != labels["count"])]
    if len(broken):
        raise BadInput(
            f"Question '{broken.index[0]}' has no single cluster: "
            "each question belongs to one group, the same in every cell."
        )
    if labels["first"].nunique() < 2:
        raise BadInput(
            "All questions are in one cluster, which gives no error bar: drop the column, or name the real groups."
        )
    codes, distinct = pd.factorize(labels["first"].astype(str), sort=True)
    of_question = pd.Series(codes, index=labels.index)
    return tuple(of_question.loc[run].to_numpy() for run in questions), len(distinct)
