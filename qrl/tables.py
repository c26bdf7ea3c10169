"""Tables that users bring: parquet, CSV, JSON or JSONL, in one file or in a file per cell."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qrl.errors import BadInput

if TYPE_CHECKING:
    import pandas as pd

Row = tuple[str, dict[str, Any]]  # where it is, for errors, and its fields
CELL = re.compile(r"([\w.+ -]+):([\w.+ -]+)=(.+)")
FORMATS = (".parquet", ".csv", ".json", ".jsonl")


def records(
    source: str | Path, columns: Mapping[str, str] | None = None, where: Mapping[str, str] | None = None
) -> list[Row]:
    """Return a table's rows, each with where it stands.

    Args:
        source: a file, or `VARIANT:SCHEME=FILE,…`, whose rows get the columns `variant` and `scheme`. Files per cell
            without a column `question` are matched by position if their answers are the same.
        columns: our name of a column → its name in the file.
        where: column → the value of the rows to keep, such as {"filter": "strict-match"}.

    Raises:
        BadInput: a file is missing, is not in the format that its name says, lacks a named column, or has no rows;
            files per cell cannot be matched.
    """
    files = _files(str(source))
    by_file = {path: [(where, row | labels) for where, row in _rows(path)] for labels, path in files}
    if len(by_file) < len(files):
        raise BadInput(f"'{source}' names a file twice: expected a file of its own for every cell.")
    for path, rows in by_file.items():
        if not rows:
            raise BadInput(f"{path} has no rows: expected a header or keys, and a row per answer.")
        for column, value in (where or {}).items():
            values = dict.fromkeys(str(row.get(column)) for _, row in rows)
            if value not in values:
                present = ", ".join(values)[:300]
                raise BadInput(f"{path} has no row with '{value}' in the column '{column}', which holds {present}.")
            rows[:] = [row for row in rows if str(row[1].get(column)) == value]
        if columns:
            _check(str(path), list(dict.fromkeys(key for _, row in rows for key in row)), columns)
            new = [{ours: row.get(theirs) for ours, theirs in columns.items()} for _, row in rows]
            rows[:] = [(where, row | named) for (where, row), named in zip(rows, new, strict=True)]
    if files[0][0]:
        _match(by_file)
    return [row for rows in by_file.values() for row in rows]


def frame(
    source: str | Path, columns: Mapping[str, str] | None = None, where: Mapping[str, str] | None = None
) -> pd.DataFrame:
    """Return the same table as a frame; empty cells of a CSV file are missing values. Arguments, errors: `records`."""
    import pandas as pd

    rows = records(source, columns, where)
    return pd.DataFrame([{key: value for key, value in row.items() if value != ""} for _, row in rows])


def renamed(frame: pd.DataFrame, columns: Mapping[str, str] | None) -> pd.DataFrame:
    """Return a frame with our names for some columns; `columns` as for `records`.

    Raises:
        BadInput: a column is missing, or two have one name.
    """
    _check("The table", list(map(str, frame.columns)), columns or {})
    return frame.assign(**{ours: frame[theirs] for ours, theirs in (columns or {}).items()})


def _check(source: str, present: list[str], columns: Mapping[str, str]) -> None:
    if len(set(present)) < len(present):
        raise BadInput(f"{source} has two columns of one name: rename one of {', '.join(present)[:300]}.")
    for ours, theirs in columns.items():
        if theirs not in present:
            raise BadInput(f"{source} has no column '{theirs}': name one of {', '.join(present)[:300]} for '{ours}'.")


def _files(source: str) -> list[tuple[dict[str, str], Path]]:
    """Return the labels and the path of each file; a single file has no labels."""
    if not CELL.match(source):
        return [({}, Path(source))]
    files: dict[tuple[str, str], Path] = {}
    for item in filter(None, map(str.strip, source.split(","))):
        if not (match := CELL.fullmatch(item)):
            raise BadInput(f"'{item}' is not a cell with its file: expected VARIANT:SCHEME=FILE, several by comma.")
        variant, scheme, path = match.groups()
        if (variant, scheme) in files:
            raise BadInput(f"The cell {variant}:{scheme} is given twice: expected one file per cell.")
        files[variant, scheme] = Path(path)
    return [({"variant": variant, "scheme": scheme}, path) for (variant, scheme), path in files.items()]


def _match(by_file: dict[Path, list[Row]]) -> None:
    """Number the rows of files per cell that have no `question`, if the same answers stand in the same rows."""
    if any("question" in row for rows in by_file.values() for _, row in rows):
        return
    first, *others = by_file
    answers = {path: [str(row.get("answer", "")) for _, row in rows] for path, rows in by_file.items()}
    for path in others:
        if answers[path] != answers[first] or not all(answers[path]):
            raise BadInput(
                f"{first} and {path} have no column 'question', and not the same 'answer' in every row, so their rows "
                "cannot be matched: name the column that identifies the question, as in --columns question=id."
            )
    for rows in by_file.values():
        for number, (_, row) in enumerate(rows, 1):
            row["question"] = str(number)


def _rows(path: Path) -> Iterator[Row]:
    """Yield a file's rows; characters that are not UTF-8 are replaced."""
    if path.suffix not in FORMATS:
        raise BadInput(f"{path} ends in '{path.suffix}', but tables are read from {', '.join(FORMATS)}: convert it.")
    if not path.is_file():
        raise BadInput(f"There is no file {path}: give a table, such as a study's questions.parquet.")
    try:
        if path.suffix == ".parquet":
            yield from _of_parquet(path)
        else:
            text = path.read_bytes().decode("utf-8-sig", errors="replace")
            yield from {".csv": _of_csv, ".json": _of_json, ".jsonl": _of_lines}[path.suffix](path, text)
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror or error}): give a file that is readable.") from None


def _of_parquet(path: Path) -> Iterator[Row]:
    from pyarrow import ArrowException, parquet

    try:
        table = parquet.ParquetFile(path).read()
        rows = table.to_pylist()
    except (ArrowException, OSError, ValueError, OverflowError):
        raise BadInput(f"{path} is no parquet file, or is damaged: write it again, or give the table as CSV.") from None
    _check(str(path), table.column_names, {})
    return ((f"{path}, row {number}", row) for number, row in enumerate(rows, 1))


def _of_csv(path: Path, text: str) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)  # completions are longer than 128 kB
    head = text.partition("\n")[0]
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=max(",;\t", key=head.count), strict=True)
    try:
        names = next(reader, [])
        _check(str(path), names, {})
        for fields in reader:
            where = f"{path}, line {reader.line_num}"
            if fields and len(fields) != len(names):
                raise BadInput(
                    f"{where} has {len(fields)} values, but the header names {len(names)} columns: correct it."
                )
            if fields:
                yield where, dict(zip(names, fields, strict=True))
    except csv.Error:
        raise BadInput(
            f"{path}, line {reader.line_num} has a quotation mark too many or too few: correct it."
        ) from None


def _of_json(path: Path, text: str) -> Iterator[Row]:
    rows = _parsed(str(path), text)
    if not isinstance(rows, list):
        raise BadInput(f"{path} holds a JSON {type(rows).__name__}: expected an array of objects, one per row.")
    yield from (_object(f"{path}, row {number}", row) for number, row in enumerate(rows, 1))


def _of_lines(path: Path, text: str) -> Iterator[Row]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield _object(f"{path}, line {number}", _parsed(f"{path}, line {number}", line))


def _parsed(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # the latter for brackets nested by the thousand
        raise BadInput(f"{where} is not JSON: expected objects with a value per column.") from None


def _object(where: str, row: Any) -> Row:
    if not isinstance(row, dict):
        raise BadInput(f"{where} is a JSON {type(row).__name__}: expected an object with a value per column.")
    return where, row
