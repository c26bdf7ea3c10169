"""`arithmetic` written as GSM8K, MATH and DeepMath, and loaded from files, from a mirror, and from a hub."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from qrl.errors import BadInput
from qrl.tasks import arithmetic, contamination, grade_many, load, rows, write
from tests.tasks import hub

FORMS = ("gsm8k", "math", "deepmath")


@pytest.fixture
def cache(tmp_path, monkeypatch) -> None:
    """Let `datasets` keep its tables here."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.mark.process
@pytest.mark.parametrize("layout", ["files", "hub"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_loaded_as_its_data_set_with_right_gold_answers(tmp_path, cache, form, layout):
    write.write(form, tmp_path / "data", 500, 20, seed=3, layout=layout)
    parts = {split: load(form, split, data=str(tmp_path / "data")) for split in ("train", "heldout")}
    assert {split: len(part) for split, part in parts.items()} == {"train": 500, "heldout": 20}
    for split, part in parts.items():
        assert {arithmetic.split_of(question.question) for question in part} == {split}
        verdicts = grade_many(form, [q.solution for q in part], [q.answer for q in part])
        assert all(verdict.strict for verdict in verdicts)
        assert form == "gsm8k" or {question.level for question in part} <= {1, 2, 3, 4}
        assert form == "gsm8k" or len({question.subject for question in part}) > 3


def test_files_have_the_questions_of_arithmetic_and_gsm8ks_have_its_solutions(tmp_path):
    write.write("gsm8k", tmp_path / "gsm8k", 30, 5, seed=2)
    write.write("math", tmp_path / "math", 30, 5, seed=2)
    own = load("arithmetic", "train", 30, seed=2)
    read = load("gsm8k", "train", data=str(tmp_path / "gsm8k"))
    assert [(q.question, q.solution, q.answer) for q in read] == [(q.question, q.solution, q.answer) for q in own]
    assert "<<" in (tmp_path / "gsm8k" / "train.jsonl").read_text()
    worked = load("math", "train", data=str(tmp_path / "math"))
    assert [(q.question, q.answer) for q in worked] == [(q.question, q.answer) for q in own]
    assert all("\\boxed{" in q.solution and "$" in q.solution for q in worked)
    assert any("\\frac{" in q.solution for q in worked) and any("\\times" in q.solution for q in worked)


def test_no_heldout_question_has_the_words_of_a_training_one(tmp_path):
    write.write("gsm8k", tmp_path / "data", 1000, 50)
    trained, heldout = (load("gsm8k", split, data=str(tmp_path / "data")) for split in ("train", "heldout"))
    assert len(heldout) == 50 and contamination.overlap(trained, heldout).shared == 0
    assert contamination.overlap(trained, load("arithmetic", "heldout", 50, 0)).shared > 0


def test_columns_are_those_of_the_data_sets(tmp_path):
    found = {}
    for form in FORMS:
        write.write(form, tmp_path / form, 2, 2)
        for name in rows.FILES.values():
            found[form, name] = set(json.loads((tmp_path / form / name).read_text().splitlines()[0]))
    assert found["gsm8k", "train.jsonl"] == {"question", "answer"}
    assert found["math", "train.jsonl"] == {"problem", "level", "type", "solution"}
    assert found["math", "test.jsonl"] == {"problem", "solution", "answer", "subject", "level", "unique_id"}
    solutions = {f"r1_solution_{i}" for i in (1, 2, 3)}
    assert found["deepmath", "test.jsonl"] == {"question", "final_answer", "difficulty", "topic"} | solutions


def test_a_folder_that_is_not_empty_is_kept(tmp_path):
    (tmp_path / "mine").write_text("")
    result = CliRunner().invoke(write.main, ["--as", "math", "--out", str(tmp_path)])
    assert (result.exit_code, "not empty" in result.output) == (2, True)
    few = ["--as", "math", "--out", str(tmp_path / "new"), "--n", "5", "--layout", "hub"]
    result = CliRunner().invoke(write.main, few)
    assert (result.exit_code, "too few" in result.output) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_mirror_without_the_tasks_data_set_is_reported_and_a_broken_one_too(tmp_path, cache):
    write.write("gsm8k", tmp_path / "data", 4, 2, layout="hub")
    with pytest.raises(BadInput, match="not HuggingFaceH4/MATH-500"):
        load("math", "heldout", data=str(tmp_path / "data"))
    for file in (tmp_path / "data").rglob("*.parquet"):
        file.write_bytes(b"not parquet")
    with pytest.raises(BadInput, match="download openai/gsm8k into it again"):
        load("gsm8k", "heldout", data=str(tmp_path / "data"))


def test_a_data_folders_files_are_its_jsonl_files_or_all_of_a_mirror(tmp_path):
    write.write("gsm8k", tmp_path / "files", 4, 2)
    (tmp_path / "files" / "notes.txt").write_text("")
    assert [path.name for path in rows.files(tmp_path / "files")] == ["test.jsonl", "train.jsonl"]
    write.write("gsm8k", tmp_path / "mirror", 4, 2, layout="hub")
    names = [path.name for path in rows.files(tmp_path / "mirror")]
    assert names == ["README.md", *(f"{part}-00000-of-00001.parquet" for part in ("test", "train"))]


@pytest.mark.slow
@pytest.mark.process
def test_the_hubs_own_client_loads_every_data_set_from_a_hub_and_then_from_its_cache(tmp_path):
    for form in FORMS:
        write.write(form, tmp_path / form, 500, 10, layout="hub")
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    for form in FORMS:
        for owner in (tmp_path / form).iterdir():
            owner.rename(mirror / owner.name)
    code = """
from qrl.tasks import load, rows
for task in ("gsm8k", "math", "deepmath"):
    train, heldout = load(task, "train"), load(task, "heldout")
    with rows.from_cache():
        assert load(task, "train") == train and load(task, "heldout") == heldout
    print(task, len(train), len(heldout), len({question.question for question in train + heldout}))
"""
    offline = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    with hub.serving(mirror) as address:
        settings = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "NO_PROXY": "127.0.0.1"}
        command, root = [sys.executable, "-c", code], Path(__file__).parents[2]
        run = subprocess.run(command, env=offline | settings, cwd=root, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == ["gsm8k 500 10 510", "math 500 10 510", "deepmath 500 10 510"]
