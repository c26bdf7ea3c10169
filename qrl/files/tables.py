"""Tables that users bring: a frame, or parquet, CSV, JSON or JSONL in one file or in a file per cell.

There are two ways to read one. `read_rows` and `read_frame` read any format whole, row by row in Python, so that an
error can name the line. `read_columns` reads a few columns of parquet files, in batches, with texts as categoricals;
the long texts (`completion`, say) stay in the files until `Texts.take` reads those of some rows. A study with many
cells and seeds has millions of answers, and a comparison computes with none of their texts.

Files come from anyone, so what they unpack to is bounded: a parquet file of 4 kB can hold a billion values, or one long
text in every row. That is why batches are read here with `ParquetFile.iter_batches` and not with pyarrow.dataset, which
is faster, but unpacks whole row groups before it yields the first batch. Measured with 1.5 million rows of 0.5 kB, in
row groups of 25,000: the columns take 1.1 s and 0.4 GB here, 0.7 s and 0.3 GB there; the texts of 1,200 rows take 4 s
and 0.2 GB here, 1.8 s and 0.4 GB there (seconds of processor time). With row groups of a million rows, those texts take
20 s and 1.2 GB here, 2.7 s and 1.0 GB there.
"""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qrl.errors import BadInput
from qrl.files import reading

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

Row = tuple[str, dict[str, Any]]  # where it is, for errors, and its fields
Rows = Sequence[Mapping[str, Any]]  # a table as Python has it: a mapping per row
EXTENSIONS = (".parquet", ".csv", ".json", ".jsonl")
CELL = re.compile(r"([^:=,]+):([^:=,]+)=(.+)")
ROW = "qrl.row"  # a column of `read_columns`: the number of a row, counted over all files
TEXTS = "qrl.texts"  # an attribute of its frame: the files, as `Texts`
_BATCH = 1024  # rows of a parquet file that are unpacked together
# Bytes that a value of a parquet file takes at least: in pyarrow, where a text is its number, and as a Python object.
_BYTES_IN_ARROW = 8
_BYTES_IN_PYTHON = 50


@dataclass(frozen=True)
class Texts:
    """Parquet files in which a table's long texts stay until some of them are wanted."""

    files: tuple[str, ...]
    columns: Mapping[str, str] = field(default_factory=dict)  # our name of a column → its name in the files

    def take(self, rows: pd.Series, columns: Sequence[str]) -> pd.DataFrame:
        """Return what some rows, numbered over all files, hold of some columns; the files are read in parts."""
        import pandas as pd

        row_numbers = np.unique(rows.to_numpy())
        parts = []
        file_start = 0
        for path in self.files:
            file = _parquet(path)
            of_file = row_numbers[(row_numbers >= file_start) & (row_numbers < file_start + file.metadata.num_rows)]
            parts += self._taken(file, of_file - file_start, columns, file_start)
            file_start += file.metadata.num_rows
        table = pd.concat(parts) if parts else pd.DataFrame(index=row_numbers)
        return table.reindex(rows.to_numpy()).set_index(rows.index)

    def _taken(
        self, file: ParquetFile, rows: np.ndarray, columns: Sequence[str], file_start: int
    ) -> Iterator[pd.DataFrame]:
        """Yield some rows of a file in parts, indexed by their numbers over all files.

        Args:
            rows: sorted numbers within the file.
            columns: our names; those that the file lacks are left out.
            file_start: number of the file's first row over all files.
        """
        import pandas as pd

        our_names = {self.columns.get(name, name): name for name in columns}
        present = [name for name in our_names if name in file.schema_arrow.names]
        if not present:
            return
        for numbers, batch in _batches_with(file, rows, present):
            texts = {name: _decoded(batch.column(name)).to_pandas() for name in batch.schema.names}
            yield pd.DataFrame(texts).rename(columns=our_names).set_index(numbers + file_start)


def _batches_with(
    file: ParquetFile, rows: np.ndarray, columns: list[str]
) -> Iterator[tuple[np.ndarray, pa.RecordBatch]]:
    """Yield the rows of a file that are wanted, with their numbers; no batch after a row group's last one is read."""
    group_start = 0
    for group in range(file.num_row_groups):
        group_end = group_start + file.metadata.row_group(group).num_rows
        of_group = rows[(rows >= group_start) & (rows < group_end)]
        batch_start = group_start
        group_start = group_end
        if not len(of_group):
            continue

        for batch in file.iter_batches(_BATCH, [group], columns):
            batch_end = batch_start + len(batch)
            of_batch = of_group[(of_group >= batch_start) & (of_group < batch_end)]
            yield of_batch, batch.take(of_batch - batch_start)
            batch_start = batch_end
            if batch_end > of_group[-1]:
                break


def read_columns(
    files: Sequence[tuple[Mapping[str, str], str | Path]],
    needed: Sequence[str],
    optional: Sequence[str],
    columns: Mapping[str, str] | None = None,
) -> pd.DataFrame | None:
    """Return some columns of parquet files, read in parts, texts as categoricals; None if it takes another reader.

    The frame has a column `ROW`, and an attribute `TEXTS` to read the rest of a row with.

    Args:
        files: the labels that each one's rows get, and its path.
        needed: columns that the files must have.
        optional: columns that they may have.
        columns: our name of a column → its name in the files.

    Raises:
        BadInput: the columns are larger in memory than half of what is free.
    """
    import pyarrow as pa

    if any(Path(path).suffix != ".parquet" for _, path in files):
        return None
    renamed = dict(columns or {})
    file_names = {name: name for name in (*needed, *optional)} | renamed
    required = {*needed, *renamed}

    tables: list[pa.Table] = []
    memory_limit = reading.memory_limit_bytes()
    memory_left = memory_limit
    try:
        for labels, path in files:
            reading.check_regular_file(Path(path), sys.maxsize)
            file = _parquet(path)
            of_file = _present(file, file_names, labels)
            if of_file is None or required - {*of_file, *labels}:
                return None
            _check_values(path, file, of_file.values(), _BYTES_IN_ARROW, memory_limit)
            table = _coded_table(path, file, of_file, memory_left, memory_limit)
            memory_left -= table.nbytes
            tables.append(_labelled(table, labels))
        joined = pa.concat_tables(tables, promote_options="permissive").unify_dictionaries()
        del tables, table
        frame = joined.to_pandas(self_destruct=True, split_blocks=True)  # fails for a text that is no UTF-8
    except (pa.ArrowException, OSError, ValueError, OverflowError):
        return None

    for name in frame.select_dtypes("category"):
        frame[name] = _without_empty(frame[name])
    frame[ROW] = np.arange(len(frame))
    frame.attrs[TEXTS] = Texts(tuple(str(path) for _, path in files), renamed)
    return frame


def _present(file: ParquetFile, file_names: Mapping[str, str], labels: Mapping[str, str]) -> dict[str, str] | None:
    """Return our name → the file's name of the columns that a file has and no label replaces.

    None if the file has no rows, or two columns of one name.
    """
    in_file = file.schema_arrow.names
    if not file.metadata.num_rows or len(set(in_file)) < len(in_file):
        return None
    return {ours: theirs for ours, theirs in file_names.items() if theirs in in_file and ours not in labels}


def _coded_table(
    path: str | Path, file: ParquetFile, columns: Mapping[str, str], memory_left: int, memory_limit: int
) -> pa.Table:
    """Return a file's columns under our names, texts as numbers of distinct ones; raise BadInput if they do not fit."""
    import pyarrow as pa

    tables = []
    for batch in file.iter_batches(16 * _BATCH, columns=list(set(columns.values()))):
        table = pa.table({ours: _coded(batch.column(theirs)) for ours, theirs in columns.items()})
        tables.append(table)
        memory_left -= table.nbytes
        if memory_left < 0 or batch.nbytes > memory_limit:
            raise _too_large(path, memory_limit)
    return pa.concat_tables(tables)


def _labelled(table: pa.Table, labels: Mapping[str, str]) -> pa.Table:
    """Return a table with a column for each label, which has the same value in every row."""
    import pyarrow as pa

    for name, label in labels.items():
        first_text = np.zeros(len(table), dtype=np.int32)
        table = table.append_column(name, pa.DictionaryArray.from_arrays(first_text, pa.array([label])))
    return table


def _without_empty(column: pd.Series) -> pd.Series:
    """Return a column of categories, sorted, with empty texts as missing values."""
    empty = [text for text in column.cat.categories if text == ""]
    column = column.cat.remove_categories(empty)
    return column.cat.set_categories(column.cat.categories.sort_values())


def _coded(column: pa.Array) -> pa.Array:
    """Return a column of texts as numbers of its distinct ones, which take a few bytes; any other as it is."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return column.cast(pa.string()).dictionary_encode()
    if not pa.types.is_dictionary(column.type):
        return column

    # The texts that the batch uses are numbered anew. They are never written out for each row: one long text may be in
    # all of them.
    used_numbers = pc.unique(column.indices).drop_null()
    texts = column.dictionary.take(used_numbers).cast(pa.string()).dictionary_encode()
    numbers = texts.indices.take(pc.index_in(column.indices, used_numbers))
    return pa.DictionaryArray.from_arrays(numbers, texts.dictionary)


def _decoded(column: pa.Array) -> pa.Array:
    import pyarrow as pa

    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _parquet(source: Any) -> ParquetFile:
    """Return a ParquetFile that leaves texts as numbers of distinct ones, as they are in the file."""
    from pyarrow import parquet

    schema = parquet.ParquetFile(source).schema
    leaves = [schema.column(index) for index in range(len(schema))]
    is_text = [leaf.physical_type == "BYTE_ARRAY" and leaf.logical_type.type != "DECIMAL" for leaf in leaves]
    texts = [leaf.path for leaf, text in zip(leaves, is_text, strict=True) if text]
    return parquet.ParquetFile(source, read_dictionary=texts)


def _check_values(
    path: str | Path, file: ParquetFile, columns: Collection[str], value_bytes: int, memory_limit: int
) -> None:
    """Raise BadInput if a file's rows do not fit into memory: a few bytes of a file may hold many values.

    A list counts as one value: how many it holds, pyarrow says only by a call that ends the process for some files.

    Args:
        columns: those that are read.
        value_bytes: bytes that a value takes at least.
        memory_limit: in bytes.
    """
    row_bytes = 0
    for index in range(len(file.schema)):
        leaf = file.schema.column(index)
        if leaf.path.partition(".")[0] in columns:
            row_bytes += max(value_bytes, leaf.length or 0)
    if row_bytes * file.metadata.num_rows > memory_limit:
        raise _too_large(path, memory_limit)


def _too_large(path: str | Path, limit_bytes: int) -> BadInput:
    return BadInput(f"{path} unpacks to more than {limit_bytes >> 20:,} MiB: divide it into smaller files.")


def _unpacked_bytes(column: pa.Array) -> int:
    """Return the bytes of a column with every text written out."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_dictionary(column.type):
        lengths = pc.binary_length(column.dictionary).cast(pa.int64())
        return pc.sum(lengths.take(column.indices)).as_py() or 0
    if pa.types.is_map(column.type):
        return _unpacked_bytes(column.keys) + _unpacked_bytes(column.items)
    if pa.types.is_struct(column.type):
        return sum(map(_unpacked_bytes, column.flatten()))
    if pa.types.is_nested(column.type):
        return _unpacked_bytes(column.flatten())
    return column.nbytes


def read_rows(
    source: pd.DataFrame | Rows | str | Path,
    columns: Mapping[str, str] | None = None,
    where: Mapping[str, str] | None = None,
) -> list[Row]:
    """Return a table's rows, each with where it stands.

    Args:
        source: a frame, a list of rows, a file, or `VARIANT:SCHEME=FILE,…`, whose rows get the columns `variant` and
            `scheme`.
        columns: our name of a column → its name in the table.
        where: column → the value of the rows to keep, such as {"filter": "strict-match"}.

    Raises:
        BadInput: a file is missing, or not in the format that its name says; a named column or value is missing from
            it; it has no rows.
    """
    renamed = dict(columns or {})
    conditions = dict(where or {})
    result: list[Row] = []
    for labels, name, rows in _parts(source):
        if not rows:
            raise BadInput(f"{name} has no rows: expected named columns, and a row per answer.")
        _check_present(name, rows, renamed, conditions)
        selected = rows
        for column, value in conditions.items():
            selected = _matching(name, selected, column, value)
        for location, row in selected:
            ours = {our_name: row.get(their_name) for our_name, their_name in renamed.items()}
            result.append((location, row | labels | ours))
    return result


def _check_present(name: str, rows: Sequence[Row], renamed: Mapping[str, str], conditions: Mapping[str, str]) -> None:
    """Raise BadInput if no row has a column that is renamed or filtered by."""
    present = list(dict.fromkeys(key for _, row in rows for key in row))
    absent = [column for column in (*renamed.values(), *conditions) if column not in present]
    if not absent:
        return
    swapped = [ours for ours, theirs in renamed.items() if theirs == absent[0] and ours in present]
    hint = f" Our name comes first: --columns {absent[0]}={swapped[0]}." if swapped else ""
    raise BadInput(f"{name} has no column '{absent[0]}': its columns are {', '.join(present)[:300]}.{hint}")


def _matching(name: str, rows: Sequence[Row], column: str, value: str) -> list[Row]:
    """Return the rows with a value in a column, as texts; raise BadInput if there is none."""
    values = dict.fromkeys(str(row[column]) for _, row in rows if column in row)
    if value not in values:
        raise BadInput(f"{name} has no row with {column}={value}: that column holds {', '.join(values)[:300]}.")
    return [(location, row) for location, row in rows if str(row.get(column)) == value]


def read_frame(
    source: pd.DataFrame | Rows | str | Path,
    columns: Mapping[str, str] | None = None,
    where: Mapping[str, str] | None = None,
) -> pd.DataFrame:
    """Return the same table as a frame; empty texts are missing values. Arguments and errors as for `records`."""
    table = as_frame([row for _, row in read_rows(source, columns, where)])
    return table.mask(table.map(lambda value: isinstance(value, str) and not value), None)


def as_frame(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Return rows as a frame; a lone surrogate, which JSON can hold and UTF-8 cannot, becomes a question mark."""
    import pandas as pd

    def valid(value: Any) -> Any:
        return value.encode(errors="replace").decode() if isinstance(value, str) else value

    try:
        return pd.DataFrame(rows)
    except UnicodeEncodeError:
        return pd.DataFrame([{valid(key): valid(value) for key, value in row.items()} for row in rows])


def _parts(source: pd.DataFrame | Rows | str | Path) -> Iterator[tuple[dict[str, str], str, list[Row]]]:
    """Yield each file's labels, name and rows; a frame, a list of rows and a single file have no labels."""
    if isinstance(source, str | Path):
        for labels, path in files_of(str(source)):
            yield labels, path, list(_rows(Path(path)))
        return
    if isinstance(source, list | tuple):
        rows = [_fields(f"row {number}", row) for number, row in enumerate(source, 1)]
        yield {}, "The list", _numbered("row", rows)
        return
    table: Any = getattr(source, "frame", source)  # graded answers have their table there
    if not hasattr(table, "to_dict"):
        raise BadInput(f"A {type(table).__name__} is no table: give a frame, a list of rows, or the path of a file.")
    _check_columns("The table", list(map(str, table.columns)))
    yield {}, "The table", _numbered("row", table.to_dict("records"))


def _fields(location: str, row: Any) -> dict[str, Any]:
    """Return a row's fields by the names of their columns; raise BadInput if it is something else than a mapping."""
    if not isinstance(row, Mapping):
        raise BadInput(f"{location} of the list is a {type(row).__name__}: expected a dict with a value per column.")
    return {str(column): value for column, value in row.items()}


def join(files: Sequence[str | Path], out: Path, change: Mapping[str, Callable[[str], str]]) -> None:
    """Write the rows of parquet files into one, in parts; what a file lacks is missing in its rows.

    Args:
        files: in order.
        out: the new file.
        change: column of texts → its new value.
    """
    import pyarrow as pa
    from pyarrow import parquet

    schemas = [parquet.read_schema(path).remove_metadata() for path in files]
    schema = pa.unify_schemas(schemas, promote_options="permissive")
    with parquet.ParquetWriter(out, schema) as writer:
        for path in files:
            for batch in parquet.ParquetFile(path).iter_batches(16 * _BATCH):
                rows = pa.Table.from_batches([batch]).replace_schema_metadata(None)
                for name, new_text in change.items():
                    rows = _with_texts(rows, name, new_text, schema.field(name).type)
                rows = pa.concat_tables([schema.empty_table(), rows], promote_options="permissive")
                writer.write_table(rows.select(schema.names).cast(schema))


def _with_texts(rows: pa.Table, name: str, new_text: Callable[[str], str], kind: pa.DataType) -> pa.Table:
    """Return rows with a function applied to a column of texts, once for each distinct one."""
    import pyarrow as pa

    coded = rows[name].combine_chunks().dictionary_encode()
    new_texts = pa.array(map(new_text, coded.dictionary.to_pylist()), kind)
    column = pa.DictionaryArray.from_arrays(coded.indices, new_texts).dictionary_decode()
    return rows.set_column(rows.column_names.index(name), name, column)


def files_of(source: str) -> Iterator[tuple[dict[str, str], str]]:
    """Yield the labels of each file's rows, and its path; a single file has no labels."""
    if not CELL.match(source):
        yield {}, source
        return
    for variant, scheme, path in parse_cells(source):
        yield {"variant": variant, "scheme": scheme}, path


def parse_cells(source: str) -> Iterator[tuple[str, str, str]]:
    """Yield variant, scheme and file of each item of `VARIANT:SCHEME=FILE,…`; raise BadInput for any other item."""
    for item in filter(None, map(str.strip, source.split(","))):
        cell = CELL.fullmatch(item)
        if not cell:
            raise BadInput(f"'{item}' is no cell with its file: expected VARIANT:SCHEME=FILE, several by comma.")
        variant, scheme, path = cell.groups()
        yield variant, scheme, path


def _rows(path: Path) -> Iterator[Row]:
    """Yield a file's rows; characters that are not UTF-8 are replaced."""
    if path.suffix not in EXTENSIONS:
        raise BadInput(f"{path} ends in '{path.suffix}', but tables are read from {', '.join(EXTENSIONS)}: convert it.")
    if not path.is_file():
        raise BadInput(f"There is no file {path}: give a table with a row per question or completion.")
    content = reading.read_bytes(path, reading.TABLE_BYTES)
    if path.suffix == ".parquet":
        yield from _numbered(f"{path}, row", _of_parquet(path, content))
        return

    reading.check_encoding(str(path), content)
    text = content.decode("utf-8-sig", errors="replace")
    if path.suffix == ".csv":
        yield from _of_csv(path, text)
    elif path.suffix == ".jsonl":
        yield from _of_jsonl(path, text)
    else:
        yield from _of_json(path, text)


def _of_parquet(path: Path, content: bytes) -> list[dict[str, Any]]:
    from pyarrow import ArrowException, BufferReader

    rows: list[dict[str, Any]] = []
    size_bytes = 0
    try:
        file = _parquet(BufferReader(content))
        columns = file.schema_arrow.names
        _check_values(path, file, columns, _BYTES_IN_PYTHON, reading.memory_limit_bytes())
        for batch in file.iter_batches(_BATCH):
            size_bytes += sum(map(_unpacked_bytes, batch.columns))
            if size_bytes > reading.TABLE_BYTES:
                raise _too_large(path, reading.TABLE_BYTES)
            rows += batch.to_pylist()
    except (ArrowException, OSError, ValueError, OverflowError):
        raise BadInput(f"{path} is no parquet file, or is damaged: write it again, or give the table as CSV.") from None
    _check_columns(str(path), columns)
    return rows


def _of_csv(path: Path, text: str) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)  # completions are longer than 128 kB
    header = text.partition("\n")[0]
    delimiter = max(",;\t", key=header.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        columns = next(reader, [])
        _check_columns(str(path), columns)
        for fields in filter(None, reader):
            location = f"{path}, line {reader.line_num}"
            if len(fields) != len(columns):
                counts = f"{len(fields)} values, but the header names {len(columns)} columns"
                raise BadInput(f"{location} has {counts}: correct it.")
            yield location, dict(zip(columns, fields, strict=True))
    except csv.Error:
        location = f"{path}, line {reader.line_num}"
        raise BadInput(f"{location} has a quotation mark too many or too few: correct it.") from None


def _of_jsonl(path: Path, text: str) -> Iterator[Row]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            location = f"{path}, line {number}"
            yield location, _object(location, parse_json(location, line))


def _of_json(path: Path, text: str) -> Iterator[Row]:
    rows = parse_json(str(path), text)
    if not isinstance(rows, list):
        raise BadInput(f"{path} holds a JSON {type(rows).__name__}: expected an array of objects, one per row.")
    for location, row in _numbered(f"{path}, row", rows):
        yield location, _object(location, row)


def _check_columns(name: str, columns: Sequence[str]) -> None:
    if len(set(columns)) < len(columns):
        raise BadInput(f"{name} has two columns of one name: rename one of {', '.join(columns)[:300]}.")


def _numbered(label: str, rows: Sequence[Any]) -> list[tuple[str, Any]]:
    return [(f"{label} {number}", row) for number, row in enumerate(rows, 1)]


def parse_json(location: str, text: str | bytes) -> Any:
    """Return what a JSON text holds; raise BadInput, with its location, if it is no JSON."""
    try:
        return reading.parse_json(text)
    except ValueError:
        raise BadInput(f"{location} is not JSON: expected objects with a value per column.") from None


def _object(location: str, row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise BadInput(f"{location} is a JSON {type(row).__name__}: expected an object with a value per column.")
    return row
