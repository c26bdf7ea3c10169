"""Files of outcomes, and what they must hold before a statistic may touch them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from qrl.errors import BadInput
from qrl.names import BASE, FP16

COLUMNS = ("variant", "scheme", "question", "correct")
LABEL = re.compile(r"[\w.+-]+( [\w.+-]+)*")  # goes into metric names and tables


def read_questions(path: str | Path) -> pd.DataFrame:
    """A row per cell and question, from parquet, CSV or JSON (records, or a record a line).

    Raises:
        BadInput: no such file, or not readable as what its name says.
    """
    path = Path(path)
    readers = {
        ".parquet": pd.read_parquet,
        ".csv": lambda file: pd.read_csv(file, dtype={"variant": str, "scheme": str, "question": str, "cluster": str}),
        ".json": lambda file: pd.read_json(file, dtype={"question": str}),
        ".jsonl": lambda file: pd.read_json(file, dtype={"question": str}, lines=True),
    }
    if path.suffix not in readers:
        raise BadInput(f"{path} ends in '{path.suffix}', but per-question outcomes are read from {', '.join(readers)}: rename or convert it.")
    if not path.is_file():
        raise BadInput(f"There is no file {path}: give the table of per-question outcomes, such as a study's questions.parquet.")
    try:
        return readers[path.suffix](path)
    except (ValueError, OSError, UnicodeDecodeError) as error:  # pyarrow's and pandas' parser errors are ValueErrors
        raise BadInput(f"{path} is not readable as {path.suffix[1:]}: {' '.join(str(error).split())[:200]}.") from None


def read_counts(path: str | Path) -> dict[str, Any]:
    """Counts alone, from JSON: `{"n": 100, "base": {"fp16": 68, …}, "grpo": {…}}`.

    Raises:
        BadInput: no such file, or not a JSON object.
    """
    path = Path(path)
    if not path.is_file():
        raise BadInput(f'There is no file {path}: give a JSON file such as {{"n": 100, "base": {{"fp16": 68}}, "grpo": {{"fp16": 72}}}}.')
    try:
        counts = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is not valid JSON: {error}.") from None
    if not isinstance(counts, dict):
        raise BadInput(f"{path} holds a {type(counts).__name__}, but an object with 'n' and a mapping per variant was expected.")
    return counts


def outcomes(frame: pd.DataFrame) -> tuple[dict[tuple[str, str], np.ndarray], np.ndarray | None]:
    """Cells' outcomes, aligned by question.

    Args:
        frame: columns variant, scheme, question, correct, and optionally seed and cluster.

    Returns:
        (variant, scheme) → (n,) 0 or 1, all in one order of questions; and (n,) cluster labels or None.

    Raises:
        BadInput: a sentence for whatever makes the cells incomparable.
    """
    missing = [column for column in COLUMNS if column not in frame]
    if missing:
        raise BadInput(f"The table of outcomes lacks {_list(missing)}: expected the columns {_list(COLUMNS)}, a row per cell and question.")
    if frame.empty:
        raise BadInput("The table of outcomes is empty: expected a row per cell and question.")
    empty = [column for column in COLUMNS if frame[column].isna().any()]
    if empty:
        raise BadInput(f"The column '{empty[0]}' has {int(frame[empty[0]].isna().sum())} empty values: every row needs {_list(COLUMNS)}.")
    wrong = frame.loc[~frame["correct"].isin([0, 1]), "correct"]
    if len(wrong):
        raise BadInput(f"'correct' is {wrong.tolist()[0]!r} in {len(wrong)} row(s), but must be 0 or 1: grade the completions first.")
    if "seed" in frame and frame["seed"].nunique(dropna=False) > 1:
        seeds = _list(sorted(map(str, frame["seed"].unique())))
        raise BadInput(f"The table mixes training seeds ({seeds}), which must not be pooled as if they were more questions: compare one seed at a time.")
    table = frame.assign(question=frame["question"].astype(str), **{key: frame[key].astype(str) for key in ("variant", "scheme")})
    twice = table[table.duplicated(["variant", "scheme", "question"])]
    if len(twice):
        row = twice.iloc[0]
        raise BadInput(f"Cell {row.variant} · {row.scheme} answers question '{row.question}' more than once ({len(twice)} such rows in all): expected one row per cell and question.")
    wide = table.pivot(index="question", columns=["variant", "scheme"], values="correct")
    _same_questions(wide)
    return {cell: wide[cell].to_numpy(dtype=np.int8) for cell in wide.columns}, _clusters(table, wide.index)


def check_grid(cells: dict[tuple[str, str], Any], n: int) -> None:
    """Refuses cells that no gain can be computed from: each variant must be under each scheme, base and fp16 among them.

    Raises:
        BadInput: one sentence.
    """
    variants, schemes = (list(dict.fromkeys(part)) for part in zip(*cells, strict=True))
    for label in (*variants, *schemes):
        if not LABEL.fullmatch(label):
            raise BadInput(f"'{label}' is no label for a variant or scheme: expected letters, digits, spaces and . _ + -.")
    if BASE not in variants:
        raise BadInput(f"The variants are {_list(variants)}, but a gain is measured from '{BASE}': name the untrained variant so.")
    if len(variants) == 1:
        raise BadInput(f"'{BASE}' is the only variant: a comparison needs a trained one beside it.")
    if FP16 not in schemes:
        raise BadInput(f"The schemes are {_list(schemes)}, but survival is measured from '{FP16}': name the full-precision scheme so.")
    gaps = [f"{variant} · {scheme}" for variant in variants for scheme in schemes if (variant, scheme) not in cells]
    if gaps:
        raise BadInput(f"Cell {gaps[0]} is missing: every variant ({_list(variants)}) is needed under every scheme ({_list(schemes)}).")
    if n < 2:
        raise BadInput(f"There is {n} question, which supports no error bar: expected at least 2, and hundreds for a verdict.")


def _same_questions(wide: pd.DataFrame) -> None:
    gaps = wide.isna().sum()
    if gaps.any():
        variant, scheme = gaps.idxmax()
        question = wide.index[wide[(variant, scheme)].isna()][0]
        raise BadInput(f"Cell {variant} · {scheme} lacks {gaps.max()} of {len(wide)} questions, '{question}' first: cells are compared on the same questions only.")


def _clusters(table: pd.DataFrame, questions: pd.Index) -> np.ndarray | None:
    if "cluster" not in table or table["cluster"].isna().all():
        return None
    labels = table.groupby("question")["cluster"].agg(["nunique", "first", "size", "count"])
    broken = labels[(labels["nunique"] != 1) | (labels["size"] != labels["count"])]
    if len(broken):
        raise BadInput(f"Question '{broken.index[0]}' has no single cluster: each question belongs to one group, the same in every cell.")
    if labels["first"].nunique() < 2:
        raise BadInput("All questions are in one cluster, which supports no error bar: drop the column, or name the real groups.")
    return labels["first"].astype(str).loc[questions].to_numpy()


def _list(words: Any) -> str:
    return ", ".join(f"'{word}'" for word in words)
