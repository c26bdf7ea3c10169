"""Folders of GSM8K's files: read, drawn from, and refused in one sentence that names file and line."""

import json
import os
from pathlib import Path

import pytest

from qrl.errors import BadInput
from qrl.tasks import TASKS, grade, load

ROW = {"question": "1 + 1?", "answer": "It is 1+1=<<1+1=2>>2.\n#### 2"}


def write(folder: Path, *lines: str | bytes, name: str = "train.jsonl") -> str:
    (folder / name).write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return str(folder)


@pytest.fixture
def hundred(tmp_path):
    rows = [json.dumps({"question": f"{i}?", "answer": f"#### {i}"}) for i in range(100)]
    return write(tmp_path, *rows, name="test.jsonl")


@pytest.mark.parametrize("task", TASKS)
def test_rows_become_questions_of_any_task(tmp_path, task):
    (found,) = load(task, "train", data=write(tmp_path, json.dumps(ROW), ""))
    assert (found.question, found.answer) == ("1 + 1?", "2")
    assert found.solution == "It is 1+1=2.\n#### 2"


def test_a_subset_is_seeded_and_all_keeps_the_order(hundred):
    whole = load("gsm8k", "heldout", data=hundred)
    assert [found.answer for found in whole] == [str(i) for i in range(100)]
    assert load("gsm8k", "heldout", 100, seed=5, data=hundred) == whole
    some = load("gsm8k", "heldout", 10, seed=5, data=hundred)
    assert some == load("gsm8k", "heldout", 10, seed=5, data=hundred) != load("gsm8k", "heldout", 10, seed=6, data=hundred)
    assert set(some) < set(whole)
    assert len(set(some)) == 10


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("not json", "JSON"),
        ('{"question": "a", "answer": "#### 1"', "JSON"),
        (b"\xff\xfe\x00", "UTF-8"),
        ("[" * 100_000, "JSON"),
        ("[1]", "list"),
        ('{"question": "a"}', "'answer'"),
        ('{"answer": "#### 1"}', "'question'"),
        ('{"question": "  ", "answer": "#### 1"}', "'question'"),
        ('{"question": "a", "answer": 1}', "'answer'"),
        ('{"question": "a", "answer": "it is 1"}', "####"),
        ('{"question": "a", "answer": "#### none"}', "####"),
        ('{"question": "a", "answer": "#### 1\\n#### 2"}', "####"),
    ],
)
def test_a_bad_row_is_named(tmp_path, line, said):
    with pytest.raises(BadInput) as caught:
        load("gsm8k", "train", data=write(tmp_path, json.dumps(ROW), line))
    assert "train.jsonl, line 2" in str(caught.value)
    assert said in str(caught.value)


def test_missing_folders_files_and_rows_are_told(tmp_path, hundred):
    for arguments, said in [
        ({"split": "train", "data": str(tmp_path / "none")}, "no data folder"),
        ({"split": "train", "data": hundred}, "train.jsonl"),
        ({"split": "heldout", "data": hundred, "n": 0}, "at least 1"),
        ({"split": "other", "data": hundred}, "split 'other'"),
    ]:
        with pytest.raises(BadInput, match=said):
            load("gsm8k", **arguments)
    with pytest.raises(BadInput, match="no questions"):
        load("gsm8k", "train", data=write(tmp_path, ""))


def test_a_set_smaller_than_asked_for_gives_all_it_has(hundred):
    assert load("gsm8k", "heldout", n=101, data=hundred) == load("gsm8k", "heldout", data=hundred)
    assert len(load("gsm8k", "heldout", n=101, data=hundred)) == 100


def test_an_unknown_task_and_an_endless_one_are_told():
    with pytest.raises(BadInput, match="arithmetic, gsm8k"):
        load("chess", "train", 1)
    with pytest.raises(BadInput, match="arithmetic, gsm8k"):
        grade("chess", "#### 1", "1")
    with pytest.raises(BadInput, match="how many"):
        load("arithmetic", "train")


def test_every_real_gold_answer_grades_as_right():
    if "QRL_DATA_DIR" not in os.environ:
        pytest.skip("QRL_DATA_DIR names no folder that holds gsm8k/train.jsonl and gsm8k/test.jsonl")
    folder = str(Path(os.environ["QRL_DATA_DIR"]) / "gsm8k")
    train, heldout = load("gsm8k", "train", data=folder), load("gsm8k", "heldout", data=folder)
    assert (len(train), len(heldout)) == (7473, 1319)
    for found in train + heldout:
        verdict = grade("gsm8k", found.solution, found.answer)
        assert verdict.strict, found
        assert verdict.flexible, found
        assert verdict.parsed == found.answer
