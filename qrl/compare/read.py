"""Files of outcomes: a row per cell and question, or counts alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd

from qrl import names
from qrl.errors import BadInput


def read_questions(path: str | Path) -> pd.DataFrame:
    """A row per cell and question, from parquet, CSV or JSON (records, or a record a line).

    Raises:
        BadInput: no such file, or not readable as what its name says.
    """
    path = Path(path)
    readers = {
        ".parquet": pd.read_parquet,
        ".csv": lambda file: pd.read_csv(
            file, dtype={"variant": str, "scheme": str, "question": str, "cluster": str, "seed": str}
        ),
        ".json": lambda file: pd.read_json(file, dtype={"question": str}),
        ".jsonl": lambda file: pd.read_json(file, dtype={"question": str}, lines=True),
    }
    if path.suffix not in readers:
        raise BadInput(
            f"{path} ends in '{path.suffix}', but per-question outcomes are read from {', '.join(readers)}: rename or convert it."
        )
    if not path.is_file():
        raise BadInput(
            f"There is no file {path}: give the table of per-question outcomes, such as a study's questions.parquet."
        )
    try:
        frame = readers[path.suffix](path)
    except (ValueError, OSError, UnicodeDecodeError) as error:  # pyarrow's and pandas' parser errors are ValueErrors
        raise BadInput(
            f"{path} is not readable as {path.suffix[1:]}: {' '.join(str(error).split())[:200].rstrip('.')}."
        ) from None
    return frame.assign(scheme=frame["scheme"].map(names.scheme, na_action="ignore")) if "scheme" in frame else frame


def read_counts(path: str | Path) -> dict[str, Any]:
    """Counts alone, from JSON: `{"n": 100, "base": {"full": 68, …}, "grpo": {…}}`.

    Raises:
        BadInput: no such file, or not a JSON object.
    """
    path = Path(path)
    if not path.is_file():
        raise BadInput(
            f'There is no file {path}: give a JSON file such as {{"n": 100, "base": {{"full": 68}}, "grpo": {{"full": 72}}}}.'
        )
    try:
        counts = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except (
        ValueError,
        RecursionError,
    ) as error:  # not JSON, not UTF-8, a number of thousands of digits, brackets without end
        raise BadInput(f"{path} is not valid JSON: {str(error)[:200]}.") from None
    if not isinstance(counts, dict):
        raise BadInput(
            f"{path} holds a {type(counts).__name__}, but an object with 'n' and a mapping per variant was expected."
        )
    return counts


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys stand once: of two, JSON's reader silently takes the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"'{next(key for key in keys if keys.count(key) > 1)}' is given twice")
    return found
