"""Files to compare: a row per cell and question, or counts alone; their names for columns and full precision."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from qrl import names
from qrl.compare.answers import MEASURES
from qrl.compare.validate import COLUMNS, OPTIONAL
from qrl.errors import BadInput
from qrl.files import reading, tables


def read_questions(
    source: pd.DataFrame | tables.Rows | str | Path,
    *,
    columns: Mapping[str, str] | None = None,
    where: Mapping[str, str] | None = None,
    reference: str | None = None,
    whole: bool = True,
) -> pd.DataFrame:
    """Return a row per cell and question, with our names for columns and for full precision.

    Args:
        source: a frame, a list of rows, a file (parquet, CSV, JSON, JSONL), or `VARIANT:SCHEME=FILE,…`.
        columns: our name of a column → its name in the table, such as {"correct": "exact_match"}.
        where: column → the value of the rows to keep, such as {"filter": "strict-match"}.
        reference: the table's name for the scheme `full`; it is shown as a dtype, `full (bf16)`.
        whole: read all columns of parquet files, not only those that a comparison computes with.

    Raises:
        BadInput: as `tables.read_rows`; no row has the reference as its scheme.
    """
    if not whole and not where and isinstance(source, str | Path):
        frame = read_columns(list(tables.files_of(str(source))), columns, reference)
        if frame is not None:
            return frame
    return _named(tables.read_frame(source, columns, where), reference)


def read_columns(
    files: Sequence[tuple[Mapping[str, str], str | Path]],
    columns: Mapping[str, str] | None = None,
    reference: str | None = None,
) -> pd.DataFrame | None:
    """Return the columns of parquet files that a comparison computes with; None if another reader is needed.

    Args:
        files: the labels that each one's rows get, and its path.
        columns, reference: as for `read_questions`.
    """
    measures = [column for column, _ in MEASURES.values()]
    frame = tables.read_columns(files, COLUMNS, (*OPTIONAL, *measures, names.UNHEALTHY, "subject", "level"), columns)
    return None if frame is None else _named(frame, reference)


def _named(frame: pd.DataFrame, reference: str | None) -> pd.DataFrame:
    """Return the table with our names of schemes."""
    if "scheme" not in frame:
        return frame
    schemes = frame["scheme"]
    distinct = schemes.cat.categories if isinstance(schemes.dtype, pd.CategoricalDtype) else list(schemes)
    if reference is not None:
        if reference not in distinct:
            present = ", ".join(dict.fromkeys(map(str, distinct)))
            raise BadInput(f"No row has the scheme '{reference}': the schemes are {present}.")
        if names.FULL in {names.scheme(str(scheme)) for scheme in distinct if scheme != reference}:
            both = f"Rows have the scheme '{reference}' and the scheme 'full'"
            raise BadInput(f"{both}, but only one can be full precision: rename the other, or leave out --reference.")
        # The user's name for full precision is a dtype, such as "bf16", and is shown as that.
        dtypes = frame[names.DTYPE] if names.DTYPE in frame else pd.Series(None, index=frame.index)
        dtypes = dtypes.astype(object).where(schemes != reference, reference)
        frame = frame.assign(**{names.DTYPE: dtypes})

    def our_name(scheme: Any) -> Any:
        return names.scheme(scheme, reference) if isinstance(scheme, str) else scheme

    return frame.assign(scheme=schemes.map(our_name))


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
        counts = reading.parse_json(reading.read_bytes(path, reading.MIB), unique=True)
    except ValueError as error:  # not JSON, not UTF-8, a huge number, or a key twice
        raise BadInput(f"{path} is not valid JSON: {str(error)[:200]}.") from None
    if not isinstance(counts, dict):
        expected = "an object with 'n' and a mapping per variant was expected"
        raise BadInput(f"{path} holds a {type(counts).__name__}, but {expected}.")
    return counts
