"""Folders with GSM8K's and MATH's files: reading, sampling, and errors that name file and line."""

import json
import os
import shutil
from pathlib import Path

import pytest

from qrl import recipe
from qrl.errors import BadInput
from qrl.tasks import TASKS, grade, load, question_sets
from qrl.tasks.math import dataset

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
    (question,) = load(task, "train", data=write(tmp_path, json.dumps(ROW), ""))
    assert (question.question, question.answer) == ("1 + 1?", "2")
    assert question.solution == "It is 1+1=2.\n" + ("\\boxed{2}" if task in ("math", "deepmath") else "#### 2")
    assert grade(task, question.solution, question.answer).strict


def test_a_subset_is_seeded_and_all_keeps_the_order(hundred):
    whole = load("gsm8k", "heldout", data=hundred)
    assert [question.answer for question in whole] == [str(i) for i in range(100)]
    assert load("gsm8k", "heldout", 100, seed=5, data=hundred) == whole
    some = load("gsm8k", "heldout", 10, seed=5, data=hundred)
    assert (
        some == load("gsm8k", "heldout", 10, seed=5, data=hundred) != load("gsm8k", "heldout", 10, seed=6, data=hundred)
    )
    assert set(some) < set(whole)
    assert len(set(some)) == 10


def test_the_first_rows_are_those_of_the_file_and_generated_questions_have_none(hundred):
    for seed in (0, 5):
        first = load("gsm8k", "heldout", 10, seed, hundred, "first")
        assert [question.answer for question in first] == [str(i) for i in range(10)]
    assert load("gsm8k", "heldout", 10, 5, hundred) == load("gsm8k", "heldout", 10, 5, hundred, "random") != first
    settings = recipe.load("instruct", {"data": hundred, "evaluate.n": "3", "evaluate.selection": "first"})
    assert [question.answer for question in question_sets.load_evaluated(settings)] == ["0", "1", "2"]
    shutil.copy(Path(hundred) / "test.jsonl", Path(hundred) / "train.jsonl")
    more = {"train.questions": "4", "train.selection": "first", "data": hundred}
    assert [question.answer for question in question_sets.load_training(recipe.load("instruct", more))] == [
        "0",
        "1",
        "2",
        "3",
    ]
    with pytest.raises(BadInput, match="has no first rows: leave selection = first out, or give a folder as data"):
        load("arithmetic", "heldout", 10, selection="first")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("not json", "JSON"),
        ('{"question": "a", "answer": "#### 1"', "JSON"),
        (b"\xff\xfe\x00", "UTF-8"),
        ("[" * 100_000, "JSON"),
        ("[1]", "list"),
        (r'{"question": "half a character, \ud800", "answer": "#### 1"}', "UTF-8"),
        ('{"question": "a"}', "'answer'"),
        ('{"answer": "#### 1"}', "'question'"),
        ('{"question": "  ", "answer": "#### 1"}', "'question'"),
        ('{"question": "a", "answer": true}', "'answer'"),
        ('{"question": "a", "answer": [1]}', "'answer'"),
        ('{"question": "a", "answer": "many"}', "####"),
        ('{"question": "a", "answer": "1 or 2"}', "####"),
        ('{"question": "a", "answer": "6 + 6 = 12\\nso it is 12"}', "####"),
        ('{"question": "a", "answer": "#### none"}', "####"),
        ('{"question": "a", "answer": "#### 1\\n#### 2"}', "####"),
    ],
)
def test_an_error_names_the_bad_row(tmp_path, line, reason):
    with pytest.raises(BadInput) as caught:
        load("gsm8k", "train", data=write(tmp_path, json.dumps(ROW), line))
    assert "train.jsonl, line 2" in str(caught.value)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("28", "28"),
        (28, "28"),
        (28.5, "57/2"),
        (" $1,000.50 ", "2001/2"),
        ("-3", "-3"),
        ("3/4", "3/4"),
        ("28 apples", "28"),
    ],
)
def test_an_answer_without_a_solution_is_read_as_grade_reads_it(tmp_path, answer, number):
    folder = write(tmp_path, json.dumps(ROW | {"answer": answer}))
    (question,) = load("gsm8k", "train", data=folder)
    assert question.answer == number or grade("gsm8k", f"#### {question.answer}", number).strict
    assert grade("gsm8k", question.solution, str(answer)).strict  # the file's own answer, read by the grader


def test_missing_folders_files_and_rows_are_told(tmp_path, hundred):
    for arguments, reason in [
        ({"split": "train", "data": str(tmp_path / "none")}, "no data folder"),
        ({"split": "train", "data": hundred}, "train.jsonl"),
        ({"split": "heldout", "data": hundred, "n": 0}, "at least 1"),
        ({"split": "other", "data": hundred}, "split 'other'"),
    ]:
        with pytest.raises(BadInput, match=reason):
            load("gsm8k", **arguments)
    with pytest.raises(BadInput, match="no questions"):
        load("gsm8k", "train", data=write(tmp_path, ""))


def test_a_set_smaller_than_n_is_returned_whole(hundred):
    assert load("gsm8k", "heldout", n=101, data=hundred) == load("gsm8k", "heldout", data=hundred)
    assert len(load("gsm8k", "heldout", n=101, data=hundred)) == 100


def test_an_unknown_task_and_an_endless_one_without_n_are_rejected():
    with pytest.raises(BadInput, match="arithmetic, gsm8k, math"):
        load("chess", "train", 1)
    with pytest.raises(BadInput, match="arithmetic, gsm8k, math"):
        grade("chess", "#### 1", "1")
    with pytest.raises(BadInput, match="number of questions"):
        load("arithmetic", "train")


WORKED = "Half of $\\frac{28}{3}$ is $\\boxed{\\frac{14}{3}}$."


@pytest.mark.process
@pytest.mark.parametrize(
    ("row", "answer", "subject", "level"),
    [
        (
            {"problem": "a?", "solution": WORKED, "answer": "14/3", "subject": "Algebra", "level": 3},
            "14/3",
            "Algebra",
            3,
        ),
        (
            {"problem": "a?", "solution": WORKED, "type": "Number Theory", "level": "Level 5"},
            r"\frac{14}{3}",
            "Number Theory",
            5,
        ),
        ({"problem": "a?", "solution": WORKED, "level": "Level ?"}, r"\frac{14}{3}", None, None),
        ({"problem": "a?", "solution": "It is plain.", "answer": "14/3"}, "14/3", None, None),
        ({"question": "a?", "answer": WORKED}, r"\frac{14}{3}", None, None),
        ({"question": "a?", "answer": r"\text{Evelyn}"}, r"\text{Evelyn}", None, None),
        ({"question": "a?", "answer": 7}, "7", None, None),
    ],
)
def test_rows_of_math_become_questions(tmp_path, row, answer, subject, level):
    (question,) = load("math", "train", data=write(tmp_path, json.dumps(row)))
    assert (question.question, question.answer, question.subject, question.level) == ("a?", answer, subject, level)
    assert grade("math", question.solution, question.answer).strict


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[1]", "list"),
        ('{"solution": "\\\\boxed{1}"}', "'problem'"),
        ('{"problem": "a"}', "'solution' and 'answer' are missing"),
        ('{"problem": "a", "solution": "it is 1"}', "no boxed answer"),
        ('{"problem": "a", "solution": "\\\\boxed{}"}', "empty"),
    ],
)
def test_an_error_names_the_bad_row_of_math(tmp_path, line, reason):
    with pytest.raises(BadInput) as caught:
        load("math", "train", data=write(tmp_path, json.dumps({"problem": "a", "solution": WORKED}), line))
    assert "train.jsonl, line 2" in str(caught.value)
    assert reason in str(caught.value)


def test_the_hubs_training_questions_are_those_outside_math500(monkeypatch, tmp_path):
    """Uses the real `datasets`, on folders with the splits and configurations of the hub."""
    import datasets

    heldout, whole = tmp_path / "heldout", tmp_path / "whole"
    heldout.mkdir()
    write(
        heldout,
        json.dumps({"problem": "algebra  test 1?", "solution": "$\\boxed{1}$", "answer": "1", "level": 2}),
        name="test.jsonl",
    )
    files = []
    for subject in dataset.SUBJECTS:
        (whole / subject).mkdir(parents=True)
        splits = [f"{{split: {part}, path: {subject}/{part}.jsonl}}" for part in ("train", "test")]
        files.append(f"- {{config_name: {subject}, data_files: [{', '.join(splits)}]}}")
        for part in ("train", "test"):
            rows = [
                {
                    "problem": f"{subject} {part} {i}?",
                    "solution": f"$\\boxed{{{i}}}$",
                    "level": "Level 1",
                    "type": "Algebra",
                }
                for i in range(3)
            ]
            write(whole / subject, *map(json.dumps, rows), name=f"{part}.jsonl")
    (whole / "README.md").write_text("\n".join(["---", "configs:", *files, "---", ""]))
    monkeypatch.setattr(dataset, "HELDOUT", str(heldout))
    monkeypatch.setattr(dataset, "WHOLE", str(whole))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (heldout_question,) = load("math", "heldout")
    train = load("math", "train")
    assert (heldout_question.answer, heldout_question.level) == ("1", 2)
    assert len(train) == 7 * 2 * 3 - 1
    assert {"algebra test 1?", "algebra  test 1?"}.isdisjoint(question.question for question in train)
    assert {question.subject for question in train} == {"Algebra"}


def test_a_hub_that_cannot_be_reached_is_reported(monkeypatch, tmp_path):
    monkeypatch.setattr(dataset, "HELDOUT", str(tmp_path / "none"))
    with pytest.raises(BadInput, match=r"could not be loaded from the hub .* folder .* as data"):
        load("math", "heldout")


def test_math500_alone_is_enough_to_evaluate():
    folder = real("math500")
    heldout = load("math", "heldout", data=folder)
    assert (
        len(heldout),
        len({question.subject for question in heldout}),
        {question.level for question in heldout},
    ) == (500, 7, {1, 2, 3, 4, 5})
    with pytest.raises(BadInput, match=r"train\.jsonl"):
        load("math", "train", data=folder)


def real(name: str) -> str:
    if "QRL_DATA_DIR" not in os.environ:
        pytest.skip(f"QRL_DATA_DIR names no folder with {name}")
    return str(Path(os.environ["QRL_DATA_DIR"]) / name)


def test_every_real_gold_answer_grades_as_right():
    if "QRL_DATA_DIR" not in os.environ:
        pytest.skip("QRL_DATA_DIR names no folder with gsm8k/train.jsonl and gsm8k/test.jsonl")
    folder = str(Path(os.environ["QRL_DATA_DIR"]) / "gsm8k")
    train, heldout = load("gsm8k", "train", data=folder), load("gsm8k", "heldout", data=folder)
    assert (len(train), len(heldout)) == (7473, 1319)
    for question in train + heldout:
        verdict = grade("gsm8k", question.solution, question.answer)
        assert verdict.strict, question
        assert verdict.flexible, question
        assert verdict.parsed == question.answer
