"""Outcomes, and what a table of them must hold before a statistic may touch it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from qrl.compare import compatibility
from qrl.errors import BadInput
from qrl.names import BASE, FULL

COLUMNS = ("variant", "scheme", "question", "correct")
LABEL = re.compile(r"[\w.+-]+( [\w.+-]+)*")  # goes into metric names and tables


@dataclass(frozen=True)
class Outcomes:
    """Cells' outcomes, aligned by question, training run by training run.

    Attributes:
        runs: labels of the training runs, their seeds; one empty label where they are not named.
        cells: (variant, scheme) → per run (n_s,) the share of each question's samples that are right, 0 or 1 where there is one.
        groups: per run (n_s,) a number for each question, or for the group of questions it belongs to.
        samples: (variant, scheme) → answers to each question.
        n: different questions in all.
        clusters: groups of questions, or None where questions are independent.
        unlike: cell of the base → questions that it answered otherwise under another seed, though it is one model; none here where there are none.
    """

    runs: tuple[str, ...]
    cells: dict[tuple[str, str], tuple[np.ndarray, ...]]
    groups: tuple[np.ndarray, ...]
    samples: dict[tuple[str, str], int]
    n: int
    clusters: int | None
    unlike: dict[tuple[str, str], int] = field(default_factory=dict)


def outcomes(frame: pd.DataFrame) -> Outcomes:
    """Cells' outcomes from a table of answers.

    The base is one model whatever the seed: where it was not asked under a run's seed, its answers to the same questions
    under no seed, or under the first other one, stand in.

    Args:
        frame: columns variant, scheme, question, correct, and optionally seed (training run), sample (of several answers to
            one question) and cluster (group of questions).

    Raises:
        BadInput: a sentence for whatever makes the cells incomparable.
    """
    table = _checked(frame)
    check_grid(dict.fromkeys(zip(table["variant"], table["scheme"], strict=True)), table["question"].nunique())
    keys = ["variant", "scheme", "seed", "question"]
    counted = table.groupby(keys, sort=True)["correct"].agg(["mean", "size"]).reset_index()
    samples = _samples(counted)
    runs = _runs(counted)
    wide = [_wide(counted, run) for run in runs]
    groups, clusters = _groups(table, [each.index for each in wide])
    for run, group in zip(runs, groups, strict=True):
        if len(np.unique(group)) < 2:
            raise BadInput(
                f"Seed {run} has questions of one group only, which support no error bar: expected at least 2, and hundreds for a verdict."
            )
    cells = {cell: tuple(each[cell].to_numpy(dtype=float) for each in wide) for cell in samples}
    n = len(set().union(*(each.index for each in wide)))
    return Outcomes(runs, cells, groups, samples, n, clusters, _unlike(counted))


def check_grid(cells: dict[tuple[str, str], Any], n: int) -> None:
    """Refuses cells that no gain can be computed from: each variant must be under each scheme, base and full among them.

    Raises:
        BadInput: one sentence.
    """
    variants, schemes = (list(dict.fromkeys(part)) for part in zip(*cells, strict=True))
    for label in (*variants, *schemes):
        if not LABEL.fullmatch(label):
            raise BadInput(
                f"'{label}' is no label for a variant or scheme: expected letters, digits, spaces and . _ + -."
            )
    if BASE not in variants:
        raise BadInput(
            f"The variants are {_list(variants)}, but a gain is measured from '{BASE}': name the untrained variant so."
        )
    if len(variants) == 1:
        raise BadInput(f"'{BASE}' is the only variant: a comparison needs a trained one beside it.")
    if FULL not in schemes:
        raise BadInput(
            f"The schemes are {_list(schemes)}, but survival is measured from '{FULL}': name the full-precision scheme so."
        )
    gaps = [f"{variant} · {scheme}" for variant in variants for scheme in schemes if (variant, scheme) not in cells]
    if gaps:
        raise BadInput(
            f"Cell {gaps[0]} is missing: every variant ({_list(variants)}) is needed under every scheme ({_list(schemes)})."
        )
    if n < 2:
        raise BadInput(
            f"There is {n} question, which supports no error bar: expected at least 2, and hundreds for a verdict."
        )


def check_columns(frame: pd.DataFrame) -> None:
    """Refuses a table without the columns that every comparison reads, or with empty places in them.

    Raises:
        BadInput: one sentence.
    """
    missing = [column for column in COLUMNS if column not in frame]
    if missing:
        raise BadInput(
            f"The table of outcomes lacks {_list(missing)}: expected the columns {_list(COLUMNS)}, a row per cell and question."
        )
    if frame.empty:
        raise BadInput("The table of outcomes is empty: expected a row per cell and question.")
    for column in [column for column in (*COLUMNS, "seed", "cluster", "sample") if column in frame]:
        nested = [value for value in frame[column] if isinstance(value, list | dict | set | tuple | np.ndarray)]
        if nested:
            raise BadInput(
                f"The column '{column}' holds {str(nested[0])[:40]!r} and the like, but every value must be one label or number: write it as text."
            )
    empty = [column for column in COLUMNS if frame[column].isna().any()]
    if empty:
        raise BadInput(
            f"The column '{empty[0]}' has {int(frame[empty[0]].isna().sum())} empty values: every row needs {_list(COLUMNS)}."
        )


def _checked(frame: pd.DataFrame) -> pd.DataFrame:
    """The columns that count, as text where they are labels; seed is an empty text where there is none."""
    check_columns(frame)
    wrong = frame.loc[~frame["correct"].isin([0, 1]), "correct"]
    if len(wrong):
        raise BadInput(
            f"'correct' is {wrong.tolist()[0]!r} in {len(wrong)} row(s), but must be 0 or 1: grade the completions first."
        )
    table = frame[[column for column in (*COLUMNS, "cluster", "sample") if column in frame]].copy()
    for column in ("variant", "scheme", "question"):
        table[column] = table[column].astype(str)
    compatibility.check(frame)
    table["correct"] = table["correct"].astype(float)
    table["seed"] = _labels(frame["seed"]) if "seed" in frame else ""
    key = [column for column in ("variant", "scheme", "seed", "question", "sample") if column in table]
    twice = table[table.duplicated(key)]
    if len(twice):
        row = twice.iloc[0]
        raise BadInput(
            f"Cell {row.variant} · {row.scheme} answers question '{row.question}' more than once ({len(twice)} such rows in all): expected one row "
            "per cell and question; a column 'seed' tells training runs apart, a column 'sample' several answers of one."
        )
    return table


def _labels(seeds: pd.Series) -> pd.Series:
    """Seeds as text; whole numbers stay whole where empty ones beside them made them floats."""
    numbers = pd.to_numeric(seeds, errors="coerce").astype(float)
    whole = (numbers.abs() < 2**53) & (numbers % 1 == 0)
    text = (
        seeds.astype(object).where(~whole, numbers.where(whole, 0).astype("int64")).where(seeds.notna(), "").astype(str)
    )
    written = {label: set() for label in text.unique()}
    for label, raw in set(zip(text, seeds, strict=True)):
        if isinstance(raw, str):
            written[label].add(raw)
    for spellings in written.values():
        if len(spellings) > 1:
            raise BadInput(
                f"The seeds {_list(sorted(spellings))} are the same number: write one training run's seed in one way, and two runs' in two."
            )
    return text


def _samples(counted: pd.DataFrame) -> dict[tuple[str, str], int]:
    found = {}
    for (variant, scheme), part in counted.groupby(["variant", "scheme"]):
        most = int(part["size"].max())
        short = part[part["size"] != most]
        if len(short):
            row = short.iloc[0]
            raise BadInput(
                f"Cell {variant} · {scheme} answers question '{row.question}' {row['size']} time(s), others {most} times: "
                "expected as many samples of every question in a cell."
            )
        found[variant, scheme] = most
    return found


def _runs(counted: pd.DataFrame) -> tuple[str, ...]:
    """Seeds of the trained variants, the same in each of their cells; one empty label where there are none."""
    trained = counted[counted["variant"] != BASE]
    by_cell = {cell: set(part["seed"]) for cell, part in trained.groupby(["variant", "scheme"])}
    every = set().union(*by_cell.values())
    for (variant, scheme), seeds in by_cell.items():
        if "" in seeds and len(every) > 1:
            raise BadInput(
                f"Cell {variant} · {scheme} has answers without a seed beside others with one: say which training run gave each."
            )
        if seeds != every:
            lacking = sorted(every - seeds)
            raise BadInput(
                f"Cell {variant} · {scheme} lacks seed {_list(lacking)} of {_list(sorted(every))}: every trained cell is needed for every training run."
            )
    broken = [label for label in every if label and not LABEL.fullmatch(label)]
    if broken:
        raise BadInput(f"'{broken[0]}' is no label for a seed: expected letters, digits, spaces and . _ + -.")
    return tuple(
        sorted(every, key=lambda label: (not label.isdecimal(), int(label) if label.isdecimal() else 0, label))
    )


def _unlike(counted: pd.DataFrame) -> dict[tuple[str, str], int]:
    of_base = counted[counted["variant"] == BASE]
    differ = of_base.groupby(["variant", "scheme", "question"])["mean"].nunique() > 1
    found = differ.groupby(["variant", "scheme"]).sum()
    return {cell: int(count) for cell, count in found.items() if count}


def _wide(counted: pd.DataFrame, run: str) -> pd.DataFrame:
    """One run's outcomes: a row per question, a column per cell; all cells on the same questions."""
    own = counted[counted["seed"] == run]
    asked = pd.Index(own["question"].unique())
    parts = [own]
    for scheme, base in counted[counted["variant"] == BASE].groupby("scheme"):
        if run in set(base["seed"]):
            continue
        others = base[base["question"].isin(asked)].drop_duplicates(
            "question"
        )  # sorted: those without a seed come first
        parts.append(others.assign(variant=BASE, scheme=scheme))
    cells = counted[["variant", "scheme"]].drop_duplicates()
    wide = pd.concat(parts).pivot(index="question", columns=["variant", "scheme"], values="mean")
    wide = wide.reindex(columns=pd.MultiIndex.from_frame(cells)).sort_index()
    gaps = wide.isna().sum()
    if gaps.any():
        variant, scheme = gaps.idxmax()
        question = wide.index[wide[(variant, scheme)].isna()][0]
        of_run = f" under seed {run}" if run else ""
        raise BadInput(
            f"Cell {variant} · {scheme} lacks {gaps.max()} of {len(wide)} questions{of_run}, '{question}' first: cells are compared on the same questions only."
        )
    return wide


def _groups(table: pd.DataFrame, questions: list[pd.Index]) -> tuple[tuple[np.ndarray, ...], int | None]:
    """A number for each question of each run, or for its cluster; and how many clusters there are."""
    every = pd.Index(sorted(set().union(*questions)))
    if "cluster" not in table or table["cluster"].isna().all():
        return tuple(every.get_indexer(each) for each in questions), None
    labels = table.groupby("question")["cluster"].agg(["nunique", "first", "size", "count"])
    broken = labels[(labels["nunique"] != 1) | (labels["size"] != labels["count"])]
    if len(broken):
        raise BadInput(
            f"Question '{broken.index[0]}' has no single cluster: each question belongs to one group, the same in every cell."
        )
    if labels["first"].nunique() < 2:
        raise BadInput(
            "All questions are in one cluster, which supports no error bar: drop the column, or name the real groups."
        )
    codes, names = pd.factorize(labels["first"].astype(str), sort=True)
    of_question = pd.Series(codes, index=labels.index)
    return tuple(of_question.loc[each].to_numpy() for each in questions), len(names)


def _list(words: Any) -> str:
    return ", ".join(f"'{word}'" for word in words)
