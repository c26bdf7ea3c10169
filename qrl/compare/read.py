"""Files to compare: a row per cell and question, or counts alone."""

import json
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pandas as pd

from qrl import names
from qrl.errors import BadInput


def read_questions(path: str | Path) -> pd.DataFrame:
    """Return a row per cell and question, from parquet, CSV or JSON (an array of records, or a record per line).

    Raises:
        BadInput: the file is missing, or is not in the format that its name says.
    """
    path = Path(path)
    labels: dict[Hashable, type[str]] = dict.fromkeys(("variant", "scheme", "question", "cluster", "seed"), str)
    readers = {
        ".parquet": pd.read_parquet,
        ".csv": lambda file: pd.read_csv(file, dtype=labels),
        ".json": lambda file: pd.read_json(file, dtype={"question": str}),
        ".jsonl": lambda file: pd.read_json(file, dtype={"question": str}, lines=True),
    }
    if path.suffix not in readers:
        expected = f"per-question outcomes are read from {', '.join(readers)}"
        raise BadInput(f"{path} ends in '{path.suffix}', but {expected}: rename or convert it.")
    if not path.is_file():
        advice = "give the table of per-question outcomes, such as a study's questions.parquet"
        raise BadInput(f"There is no file {path}: {advice}.")
    try:
        frame = readers[path.suffix](path)
    except (ValueError, OSError, UnicodeDecodeError) as error:  # pyarrow's and pandas' parser errors are ValueErrors
        reason = " ".join(str(error).split())[:200].rstrip(".")
        raise BadInput(f"{path} is not readable as {path.suffix[1:]}: {reason}.") from None
    return frame.assign(scheme=frame["scheme"].map(names.scheme, na_action="ignore")) if "scheme" in frame else frame


def read_counts(path: str | Path) -> dict[str, Any]:
    """Return counts alone, from JSON: `{"n": 100, "base": {"full": 68, …}, "grpo": {…}}`.

    Raises:
        BadInput: the file is missing, or is not a JSON object.
    """
    path = Path(path)
    if not path.is_file():
        example = '{"n": 100, "base": {"full": 68}, "grpo": {"full": 72}}'
        raise BadInput(f"There is no file {path}: give a JSON file such as {example}.")
    try:
        counts = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, a huge number, or brackets nested too deep
        raise BadInput(f"{path} is not valid JSON: {str(error)[:200]}.") from None
    if not isinstance(counts, dict):
        expected = "an object with 'n' and a mapping per variant was expected"
        raise BadInput(f"{path} holds a {type(counts).__name__}, but {expected}.")
    return counts


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object with unique keys; of two equal keys, JSON's reader would silently keep the last."""
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"'{next(key for key in keys if keys.count(key) > 1)}' is given twice")
    return content
