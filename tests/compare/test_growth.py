"""A comparison of large tables: what is read and held, not how long it takes."""

import pandas as pd
import pytest
from pyarrow import parquet

from qrl import compare, names
from qrl.compare import ranking
from qrl.files import tables
from tests.compare.test_answers import rows as answers

TEXTS = {"completion", "parsed", "answer", names.QUESTION_TEXT}


@pytest.fixture
def rows(tmp_path):
    """A table of answers with texts, and its file, of several row groups."""
    frame = answers(300)
    frame["completion"] = [f"because {i}" for i in range(len(frame))]
    frame["parsed"], frame["answer"] = frame.index.astype(str), "7"
    frame.to_parquet(tmp_path / "q.parquet", row_group_size=250)
    return frame, tmp_path / "q.parquet"


def spied(monkeypatch) -> list[tuple[set[str], int]]:
    """Return a list that gets the columns and rows of every batch that is read of a parquet file."""
    read, original = [], parquet.ParquetFile.iter_batches

    def iter_batches(self, *args, **more):
        for batch in original(self, *args, **more):
            read.append((set(batch.schema.names), len(batch)))
            yield batch

    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", iter_batches)
    return read


def test_a_file_gives_the_numbers_of_its_frame_and_its_texts_stay_in_it(rows, monkeypatch):
    frame, path = rows
    whole, read = compare.from_questions(frame), spied(monkeypatch)
    found = compare.compare(path)
    assert found.table_json() == whole.table_json() and found.metrics() == whole.metrics()
    assert read and not any(columns & TEXTS for columns, _ in read)
    read.clear()
    pd.testing.assert_frame_equal(found.changed_sample(), whole.changed_sample())
    ranked = [ranking.measure(each) for each in (compare.read_questions(str(path), whole=False), frame)]
    pd.testing.assert_frame_equal(*(each.changed_sample() for each in ranked))
    assert ranking.as_json(ranked[0]) == ranking.as_json(ranked[1]) and len(ranked[0].changed_sample())
    read.clear()
    found.changed_sample()
    assert len(whole.changed_sample()) and sum(count for columns, count in read if "completion" in columns) <= 2 * len(
        frame
    )


def test_texts_are_read_up_to_the_last_row_that_is_wanted(rows, monkeypatch):
    frame, path = rows
    monkeypatch.setattr(tables, "_BATCH", 10)
    read = spied(monkeypatch)
    taken = tables.Texts((str(path), str(path))).take(pd.Series([253, 3, len(frame) + 4]), ["completion", "no such"])
    assert taken["completion"].tolist() == ["because 253", "because 3", "because 4"] and list(taken) == ["completion"]
    assert [count for _, count in read] == [10, 10, 10]  # the first part of three row groups


def test_memory_grows_by_the_columns_that_are_computed_with(rows, tmp_path):
    frame, path = rows
    frame.assign(completion=["x" * 5000 for _ in range(len(frame))]).to_parquet(tmp_path / "long.parquet")
    sizes = [
        compare.read_questions(str(file), whole=False).memory_usage(deep=True).sum()
        for file in (path, tmp_path / "long.parquet")
    ]
    assert sizes[0] == sizes[1] < 5000 * len(frame) / 10


def test_files_of_cells_and_names_of_ones_own_are_read_in_columns_too(rows, tmp_path):
    frame, _ = rows
    parts = []
    for (variant, scheme), part in frame.groupby(["variant", "scheme"], sort=False):
        part.drop(columns=["variant", "scheme"]).rename(columns={"correct": "hit"}).to_parquet(
            tmp_path / f"{variant}-{scheme}.parquet"
        )
        parts.append(f"{variant}:{scheme}={tmp_path}/{variant}-{scheme}.parquet")
    source = ",".join(parts)
    found = compare.read_questions(source, columns={"correct": "hit"}, whole=False)
    assert tables.ROW in found and "completion" not in found
    assert compare.from_questions(found).table_json() == compare.from_questions(frame).table_json()
    assert repr(ranking.measure(found)) == repr(ranking.measure(frame))


def test_files_are_joined_as_frames_are(tmp_path):
    first = pd.DataFrame({"scheme": ["fp16", "nf4"], "fault": [None, None], "n": [1, 2], "old": ["a", "b"]})
    second = pd.DataFrame({"scheme": ["full", "awq"], "fault": ["timeout", None], "n": [1.5, 2.0]})
    for place, frame in enumerate((first, second)):
        frame.to_parquet(tmp_path / f"{place}.parquet")
    files = [tmp_path / "0.parquet", tmp_path / "1.parquet"]
    tables.join(files, tmp_path / "all.parquet", {"scheme": names.scheme})
    expected = pd.concat([first, second], ignore_index=True)
    expected["scheme"] = expected["scheme"].map(names.scheme)
    joined = pd.read_parquet(tmp_path / "all.parquet")
    assert joined.astype(object).fillna("").equals(expected.astype(object).fillna(""))
