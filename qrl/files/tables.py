"""Tables that users bring: a frame, or parquet, CSV, JSON or JSONL in one file or in a file per cell."""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qrl.errors import BadInput
from qrl.files import reading

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

Row = tuple[str, dict[str, Any]]  # where it is, for errors, and its fields
FORMATS = (".parquet", ".csv", ".json", ".jsonl")
_BATCH = 1024  # rows of a parquet file that are unpacked together
_IN_ARROW, _IN_PYTHON = 8, 50  # bytes that a value of a parquet file takes at least, of a text its number
ROW, TEXTS = "qrl.row", "qrl.texts"  # a column: where in its files a row stands; an attribute: the files, as `Texts`
CELL = re.compile(r"([^:=,]+):([^:=,]+)=(.+)")


@dataclass(frozen=True)
class Texts:
    """Parquet files in which a table's long texts stay until some of them are wanted."""

    files: tuple[str, ...]
    columns: Mapping[str, str] = field(default_factory=dict)  # our name of a column → its name in the files

    def take(self, rows: pd.Series, columns: Sequence[str]) -> pd.DataFrame:
        """Return what some rows, numbered over all files, hold of some columns; the files are read in parts."""
        import pandas as pd

        wanted, parts_read, begin = np.unique(rows.to_numpy()), [], 0
        for path in self.files:
            file = _parquet(path)
            of_file = {self.columns.get(name, name): name for name in columns}
            there = [name for name in of_file if name in file.schema_arrow.names]
            for group in range(file.num_row_groups):
                end = begin + file.metadata.row_group(group).num_rows
                left, at = wanted[(wanted >= begin) & (wanted < end)], begin
                parts = file.iter_batches(_BATCH, [group], there) if there and len(left) else ()
                for part in parts:
                    own = left[(left >= at) & (left < at + len(part))]
                    taken = part.take(own - at)
                    texts = {name: _decoded(taken.column(name)).to_pandas() for name in taken.schema.names}
                    parts_read.append(pd.DataFrame(texts).rename(columns=of_file).set_index(own))
                    if (at := at + len(part)) > left[-1]:
                        break
                begin = end
        table = pd.concat(parts_read) if parts_read else pd.DataFrame(index=wanted)
        return table.reindex(rows.to_numpy()).set_index(rows.index)


def narrow(
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

    source = {name: name for name in (*needed, *optional)} | dict(columns or {})
    tables, held, most = [], 0, reading.memory_bytes()
    if any(Path(path).suffix != ".parquet" for _, path in files):
        return None
    try:
        for labels, path in files:
            reading.check(Path(path), sys.maxsize)
            file = _parquet(path)
            if len(set(file.schema_arrow.names)) < len(file.schema_arrow.names):
                return None
            there = [
                ours for ours, theirs in source.items() if theirs in file.schema_arrow.names and ours not in labels
            ]
            if {*needed, *(columns or {})} - {*there, *labels} or not file.metadata.num_rows:
                return None
            _check_values(path, file, [source[ours] for ours in there], _IN_ARROW, most)
            batches = []
            for batch in file.iter_batches(16 * _BATCH, columns=list({source[ours] for ours in there})):
                coded = {ours: _coded(batch.column(source[ours])) for ours in there}
                batches.append(pa.table(coded))
                if (held := held + batches[-1].nbytes) > most or batch.nbytes > most:
                    raise _too_large(path, most)
            table = pa.concat_tables(batches)
            for name, label in labels.items():
                constant = pa.DictionaryArray.from_arrays(np.zeros(len(table), dtype=np.int32), pa.array([label]))
                table = table.append_column(name, constant)
            tables.append(table)
        frame = pa.concat_tables(tables, promote_options="permissive").unify_dictionaries()
        del tables, batches, table
        frame = frame.to_pandas(self_destruct=True, split_blocks=True)  # fails for a text that is no UTF-8
    except (pa.ArrowException, OSError, ValueError, OverflowError):
        return None
    for name in frame.select_dtypes("category"):
        known = frame[name].cat.remove_categories([text for text in frame[name].cat.categories if text == ""])
        frame[name] = known.cat.set_categories(known.cat.categories.sort_values())
    frame[ROW] = np.arange(len(frame))
    frame.attrs[TEXTS] = Texts(tuple(str(path) for _, path in files), dict(columns or {}))
    return frame


def _coded(column: pa.Array) -> pa.Array:
    """Return a column of texts as numbers of its distinct ones, which take a few bytes; any other as it is."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return column.cast(pa.string()).dictionary_encode()
    if not pa.types.is_dictionary(column.type):
        return column
    used = pc.unique(column.indices).drop_null()  # never written out: one text of a file may stand in all its rows
    texts = column.dictionary.take(used).cast(pa.string()).dictionary_encode()
    return pa.DictionaryArray.from_arrays(texts.indices.take(pc.index_in(column.indices, used)), texts.dictionary)


def _decoded(column: pa.Array) -> pa.Array:
    import pyarrow as pa

    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _parquet(source: Any) -> Any:
    """Return a ParquetFile that leaves texts as numbers of distinct ones, as they are in the file."""
    from pyarrow import parquet

    schema = parquet.ParquetFile(source).schema
    texts = [leaf for leaf in map(schema.column, range(len(schema))) if leaf.physical_type == "BYTE_ARRAY"]
    texts = [leaf.path for leaf in texts if leaf.logical_type.type != "DECIMAL"]
    return parquet.ParquetFile(source, read_dictionary=texts)


def _check_values(path: str | Path, file: Any, columns: Sequence[str], each: int, most: int) -> None:
    """Raise BadInput if a file's rows, `each` bytes a value at least, do not fit: a few bytes of a file may hold many.

    A list counts as one value: how many it holds, pyarrow says only by a call that ends the process for some files.
    """
    leaves = [
        leaf for leaf in map(file.schema.column, range(len(file.schema))) if leaf.path.partition(".")[0] in columns
    ]
    if sum(max(each, leaf.length or 0) for leaf in leaves) * file.metadata.num_rows > most:
        raise _too_large(path, most)


def _too_large(path: str | Path, most: int) -> BadInput:
    return BadInput(f"{path} unpacks to more than {most >> 20:,} MiB: divide it into smaller files.")


def _unpacked(column: pa.Array) -> int:
    """Return the bytes of a column with every text written out."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    if pa.types.is_dictionary(kind):
        return pc.sum(pc.binary_length(column.dictionary).cast(pa.int64()).take(column.indices)).as_py() or 0
    if pa.types.is_map(kind):
        return _unpacked(column.keys) + _unpacked(column.items)
    if pa.types.is_struct(kind):
        return sum(map(_unpacked, column.flatten()))
    return _unpacked(column.flatten()) if pa.types.is_nested(kind) else column.nbytes


def records(
    source: pd.DataFrame | str | Path, columns: Mapping[str, str] | None = None, where: Mapping[str, str] | None = None
) -> list[Row]:
    """Return a table's rows, each with where it stands.

    Args:
        source: a frame, a file, or `VARIANT:SCHEME=FILE,…`, whose rows get the columns `variant` and `scheme`.
        columns: our name of a column → its name in the table.
        where: column → the value of the rows to keep, such as {"filter": "strict-match"}.

    Raises:
        BadInput: a file is missing, or not in the format that its name says; a named column or value is missing from
            it; it has no rows.
    """
    kept: list[Row] = []
    for labels, name, rows in _parts(source):
        present = list(dict.fromkeys(key for _, row in rows for key in row))
        if not rows:
            raise BadInput(f"{name} has no rows: expected named columns, and a row per answer.")
        if absent := [column for column in [*(columns or {}).values(), *(where or {})] if column not in present]:
            turned = [ours for ours, theirs in (columns or {}).items() if theirs == absent[0] and ours in present]
            hint = f" Our name comes first: --columns {absent[0]}={turned[0]}." if turned else ""
            raise BadInput(f"{name} has no column '{absent[0]}': its columns are {', '.join(present)[:300]}.{hint}")
        for column, value in (where or {}).items():
            values = dict.fromkeys(str(row[column]) for _, row in rows if column in row)
            if value not in values:
                raise BadInput(f"{name} has no row with {column}={value}: that column holds {', '.join(values)[:300]}.")
            rows[:] = [(at, row) for at, row in rows if str(row.get(column)) == value]
        renamed = (columns or {}).items()
        kept += [(at, row | labels | {new: row.get(old) for new, old in renamed}) for at, row in rows]
    return kept


def frame(
    source: pd.DataFrame | str | Path, columns: Mapping[str, str] | None = None, where: Mapping[str, str] | None = None
) -> pd.DataFrame:
    """Return the same table as a frame; empty texts are missing values. Arguments and errors as for `records`."""
    table = framed([row for _, row in records(source, columns, where)])
    return table.mask(table.map(lambda value: isinstance(value, str) and not value), None)


def framed(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Return rows as a frame; a lone surrogate, which JSON can hold and UTF-8 cannot, becomes a question mark."""
    import pandas as pd

    def valid(value: Any) -> Any:
        return value.encode(errors="replace").decode() if isinstance(value, str) else value

    try:
        return pd.DataFrame(rows)
    except UnicodeEncodeError:
        return pd.DataFrame([{valid(key): valid(value) for key, value in row.items()} for row in rows])


def _parts(source: pd.DataFrame | str | Path) -> Iterator[tuple[dict[str, str], str, list[Row]]]:
    """Yield each file's labels, name and rows; a frame and a single file have no labels."""
    if not isinstance(source, str | Path):
        source = getattr(source, "frame", source)  # graded answers
        if not hasattr(source, "to_dict"):
            raise BadInput(f"A {type(source).__name__} is no table: give a frame, or the path of a file.")
        _check("The table", list(map(str, source.columns)))
        yield {}, "The table", _numbered("row", source.to_dict("records"))
    else:
        for labels, path in files(str(source)):
            yield labels, path, list(_rows(Path(path)))


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
                for name, new in change.items():
                    texts = rows[name].combine_chunks().dictionary_encode()
                    renamed = pa.array(map(new, texts.dictionary.to_pylist()), schema.field(name).type)
                    texts = pa.DictionaryArray.from_arrays(texts.indices, renamed).dictionary_decode()
                    rows = rows.set_column(rows.column_names.index(name), name, texts)
                rows = pa.concat_tables([schema.empty_table(), rows], promote_options="permissive")
                writer.write_table(rows.select(schema.names).cast(schema))


def files(source: str) -> Iterator[tuple[dict[str, str], str]]:
    """Yield the labels of each file's rows, and its path; a single file has no labels."""
    if not CELL.match(source):
        yield {}, source
        return
    for variant, scheme, path in cells(source):
        yield {"variant": variant, "scheme": scheme}, path


def cells(source: str) -> Iterator[tuple[str, str, str]]:
    """Yield variant, scheme and file of each item of `VARIANT:SCHEME=FILE,…`; raise BadInput for any other item."""
    for item in filter(None, map(str.strip, source.split(","))):
        if not (cell := CELL.fullmatch(item)):
            raise BadInput(f"'{item}' is no cell with its file: expected VARIANT:SCHEME=FILE, several by comma.")
        variant, scheme, path = cell.groups()
        yield variant, scheme, path


def _rows(path: Path) -> Iterator[Row]:
    """Yield a file's rows; characters that are not UTF-8 are replaced."""
    if path.suffix not in FORMATS:
        raise BadInput(f"{path} ends in '{path.suffix}', but tables are read from {', '.join(FORMATS)}: convert it.")
    if not path.is_file():
        raise BadInput(f"There is no file {path}: give a table with a row per question or completion.")
    content = reading.content(path, reading.TABLE_BYTES)
    text = content.decode("utf-8-sig", errors="replace") if path.suffix != ".parquet" else ""
    if path.suffix == ".csv":
        yield from _of_csv(path, text)
    elif path.suffix == ".jsonl":
        lines = ((f"{path}, line {number}", line) for number, line in enumerate(text.split("\n"), 1))
        yield from ((at, _object(at, parsed(at, line))) for at, line in lines if line.strip())
    else:
        rows = _of_parquet(path, content) if path.suffix == ".parquet" else parsed(str(path), text)
        if not isinstance(rows, list):
            raise BadInput(f"{path} holds a JSON {type(rows).__name__}: expected an array of objects, one per row.")
        yield from ((at, _object(at, row)) for at, row in _numbered(f"{path}, row", rows))


def _of_parquet(path: Path, content: bytes) -> list[dict[str, Any]]:
    from pyarrow import ArrowException, BufferReader

    most, rows, size = reading.TABLE_BYTES, [], 0
    try:
        file = _parquet(BufferReader(content))
        _check_values(path, file, file.schema_arrow.names, _IN_PYTHON, reading.memory_bytes())
        for batch in file.iter_batches(_BATCH):
            if (size := size + sum(map(_unpacked, batch.columns))) > most:
                raise _too_large(path, most)
            rows += batch.to_pylist()
        columns = file.schema_arrow.names
    except (ArrowException, OSError, ValueError, OverflowError):
        raise BadInput(f"{path} is no parquet file, or is damaged: write it again, or give the table as CSV.") from None
    _check(str(path), columns)
    return rows


def _of_csv(path: Path, text: str) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)  # completions are longer than 128 kB
    head = text.partition("\n")[0]
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=max(",;\t", key=head.count), strict=True)
    try:
        names = next(reader, [])
        _check(str(path), names)
        for fields in filter(None, reader):
            at = f"{path}, line {reader.line_num}"
            if len(fields) != len(names):
                raise BadInput(f"{at} has {len(fields)} values, but the header names {len(names)} columns: correct it.")
            yield at, dict(zip(names, fields, strict=True))
    except csv.Error:
        raise BadInput(
            f"{path}, line {reader.line_num} has a quotation mark too many or too few: correct it."
        ) from None


def _check(name: str, columns: Sequence[str]) -> None:
    if len(set(columns)) < len(columns):
        raise BadInput(f"{name} has two columns of one name: rename one of {', '.join(columns)[:300]}.")


def _numbered(what: str, rows: Sequence[Any]) -> list[tuple[str, Any]]:
    return [(f"{what} {number}", row) for number, row in enumerate(rows, 1)]


def parsed(where: str, text: str | bytes) -> Any:
    """Return what a JSON text holds; raise BadInput, with where it stands, if it is no JSON."""
    try:
        return reading.parsed(text)
    except ValueError:
        raise BadInput(f"{where} is not JSON: expected objects with a value per column.") from None


def _object(where: str, row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise BadInput(f"{where} is a JSON {type(row).__name__}: expected an object with a value per column.")
    return row
