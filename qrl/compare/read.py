"""Files to compare: a row per cell and question, or counts alone; their names for columns and full precision."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from qrl import names, reading, tables
from qrl.errors import BadInput


def read_questions(
    source: pd.DataFrame | str | Path,
    *,
    columns: Mapping[str, str] | None = None,
    where: Mapping[str, str] | None = None,
    reference: str | None = None,
) -> pd.DataFrame:
    """Return a row per cell and question, with our names for columns and for full precision.

    Args:
        source: a frame, a file (parquet, CSV, JSON, JSONL), or `VARIANT:SCHEME=FILE,…`.
        columns: our name of a column → its name in the table, such as {"correct": "exact_match"}.
        where: column → the value of the rows to keep, such as {"filter": "strict-match"}.
        reference: the table's name for the scheme `full`; it is shown as a dtype, `full (bf16)`.

    Raises:
        BadInput: as `tables.records`; no row has the reference as its scheme.
    """
    frame = tables.frame(source, columns, where)
    if "scheme" not in frame:
        return frame
    labels = list(frame["scheme"])
    if reference is not None:
        if reference not in labels:
            present = ", ".join(dict.fromkeys(map(str, labels)))
            raise BadInput(f"No row has the scheme '{reference}': the schemes are {present}.")
        if names.FULL in {names.scheme(str(label)) for label in labels if label != reference}:
            both = f"Rows have the scheme '{reference}' and the scheme 'full'"
            raise BadInput(f"{both}, but only one can be full precision: rename the other, or leave out --reference.")
        former = frame[names.DTYPE] if names.DTYPE in frame else [None] * len(frame)
        dtypes = [reference if label == reference else dtype for label, dtype in zip(labels, former, strict=True)]
        frame = frame.assign(**{names.DTYPE: dtypes})
    schemes = [names.scheme(label, reference) if isinstance(label, str) else label for label in labels]
    return frame.assign(scheme=schemes)


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
        counts = reading.parsed(reading.content(path, reading.MIB), unique=True)
    except ValueError as error:  # not JSON, not UTF-8, a huge number, or a key twice
        raise BadInput(f"{path} is not valid JSON: {str(error)[:200]}.") from None
    if not isinstance(counts, dict):
        expected = "an object with 'n' and a mapping per variant was expected"
        raise BadInput(f"{path} holds a {type(counts).__name__}, but {expected}.")
    return counts
