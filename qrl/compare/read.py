"""Files to compare: a row per cell and question, or counts alone; their names for columns and full precision."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from qrl import names, tables
from qrl.errors import BadInput


def read_questions(
    source: str | Path,
    *,
    columns: Mapping[str, str] | None = None,
    where: Mapping[str, str] | None = None,
    reference: str | None = None,
) -> pd.DataFrame:
    """Return a row per cell and question, from parquet, CSV or JSON (an array of records, or a record per line).

    Args:
        source: a file, or `VARIANT:SCHEME=FILE,…`.
        columns: our name of a column → its name in the file, such as {"correct": "exact_match"}.
        where: column → the value of the rows to keep, such as {"filter": "strict-match"}.
        reference: the file's name for the full-precision scheme; None if it is `full`.

    Raises:
        BadInput: as `tables.records`, or as `referred`.
    """
    return referred(tables.frame(source, columns, where), reference)


def referred(frame: pd.DataFrame, reference: str | None) -> pd.DataFrame:
    """Return a table of outcomes with full precision called `full`; tables show the reference's own name beside it.

    Raises:
        BadInput: as `present_names`.
    """
    if "scheme" not in frame:
        return frame
    labels = frame["scheme"].astype(object)
    schemes = present_names({label for label in labels if isinstance(label, str)}, reference)
    if reference is not None:
        dtype = frame[names.DTYPE].astype(object) if names.DTYPE in frame else pd.Series("", frame.index, dtype=object)
        frame = frame.assign(**{names.DTYPE: dtype.mask(labels == reference, reference)})
    return frame.assign(scheme=[schemes.get(label, label) if isinstance(label, str) else label for label in labels])


def present_names(labels: Iterable[str], reference: str | None) -> dict[str, str]:
    """Return a file's name of each scheme → ours; `reference` is the file's name of full precision.

    Raises:
        BadInput: the reference is none of the labels, or another label means full precision too.
    """
    schemes = {label: names.FULL if label == reference else names.scheme(label) for label in labels}
    full = [label for label, scheme in schemes.items() if scheme == names.FULL]
    if reference is not None and full != [reference]:
        found = f"but the schemes are {', '.join(sorted(schemes))}"
        if reference in full:
            found = f"but {', '.join(label for label in full if label != reference)} means full precision too"
        raise BadInput(f"The reference is '{reference}', {found}: name the one scheme that is full precision.")
    return schemes


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
