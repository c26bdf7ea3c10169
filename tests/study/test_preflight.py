"""What speaks against a study is said before anything is built or trained, and twenty answers of the base are shown."""

import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

from qrl import names, recipe, tasks, tiny
from qrl.engine import memory
from qrl.errors import BadInput, Objections, QrlError, UnhealthyCell
from qrl.evaluate import health
from qrl.recipe import Evaluate
from qrl.steps import evaluate
from qrl.study import auto, pipeline, preflight, trial
from qrl.study.launch import DryRun
from qrl.train import footprint

ROOT = Path(__file__).parents[2]
SMALL = {"device": "cpu", "evaluate.n": "40", "evaluate.batch_size": "40", "quantize.schemes": "nf4"}
QWEN = footprint.Shape(1_543_714_304, layers=28, hidden=1536, vocabulary=151_936, cached=512, positions=32_768)


def study(**overrides: str) -> recipe.Recipe:
    return recipe.load("tiny", SMALL | overrides)


def everything() -> DryRun:
    """Nothing of a study is in the store."""
    ahead = DryRun(empty=True)
    ahead.missing = {"train": ["train"], "evaluate": ["base:full", "grpo:full"]}
    return ahead


@pytest.fixture(scope="module")
def random_llama(tmp_path_factory) -> Path:
    """A Llama of random weights with the shipped model's tokenizer."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    folder = shutil.copytree(tiny.PATH, tmp_path_factory.mktemp("llama") / "llama")
    ends = {"eos_token_id": 2, "pad_token_id": 0} | {
        key: value
        for key, value in json.loads((tiny.PATH / "generation_config.json").read_text()).items()
        if "id" in key
    }
    sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, max_position_embeddings=512, **ends))
    model.generation_config = GenerationConfig(**ends)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("changes", "beside", "said"),
    [
        ({}, (), ""),
        ({"train.qat": "nvfp4-a4"}, (), "rtn-nvfp4-a4, which is not in quantize.schemes = rtn-int4"),
        ({"train.qat": "nvfp4-a4"}, ("rtn-nvfp4-a4",), ""),
        ({"train.qat": "none"}, (), ""),
    ],
)
def test_a_study_says_where_the_format_that_it_trains_for_is_not_evaluated(changes, beside, said, capsys):
    changed = recipe.load("qad-int4", {"device": "cpu"} | changes)
    preflight.check(changed, {"recipe": "qad-int4"} | changes, beside=beside)
    shown = capsys.readouterr().err
    assert said in shown and ("is stored by" in shown) == bool(said)


def gsm8k(folder: Path, *, shared: bool = False) -> Path:
    """Write questions in GSM8K's form; with `shared`, one held-out question is a training one."""
    folder.mkdir(exist_ok=True)
    for split, file in (("train", "train.jsonl"), ("heldout", "test.jsonl")):
        questions = tasks.load("arithmetic", split, 60, 0)
        if shared and split == "heldout":
            questions[0] = tasks.load("arithmetic", "train", 60, 0)[7]
        rows = [{"question": question.question, "answer": question.solution} for question in questions]
        (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def answers(right: int, wrong: int, unread: int) -> pd.DataFrame:
    kinds = ["right"] * right + ["wrong"] * wrong + ["unread"] * unread
    return pd.DataFrame(
        {
            "question": [f"q{i}" for i in range(len(kinds))],
            "correct": [int(kind == "right") for kind in kinds],
            "correct_flexible": [int(kind == "right") for kind in kinds],
            "parsed": [None if kind == "unread" else "1" for kind in kinds],
            "answer": "7",
            "completion": kinds,
            "leaked": 0,
            "n_tokens": 30,
            "finish_reason": "stop",
            "fault": None,
            "prompt_tokens": 100,
        }
    )


def tried(right: int, wrong: int = 0, unread: int = 0) -> trial.Trial:
    return trial.Trial(answers(right, wrong, unread), 2**34, 2.0)


def test_a_base_with_no_right_answer_is_objected_to_unless_a_teacher_gives_the_signal():
    (sentence,) = trial.objections(tried(0, 20), study())
    assert "none of 20" in sentence and "own.md" not in sentence
    elsewhere = tried(0, 0, 20)  # such as `26 + 13 = 39`: right, and not in the task's form
    elsewhere.frame["correct_flexible"] = 1
    sentence = trial.objections(elsewhere, study())[0]
    assert "20 have the right number elsewhere" in sentence and "qrl/tasks/own.md" in sentence
    assert trial.objections(tried(1, 19), study()) == []
    assert trial.objections(tried(0, 20), study(**{"train.teacher": "qrl-tiny"})) == []


def test_a_limit_counts_as_broken_only_if_twenty_answers_show_it():
    assert trial.objections(tried(12, 5, 3), study()) == []  # 17 of 20 may well be 0.9 of all
    (sentence,) = trial.objections(tried(8, 2, 10), study())
    assert "eval/parse_rate is 0.500 (n = 20)" in sentence and "evaluate.min_parse_rate" in sentence
    rates = health.rates(answers(12, 5, 3))
    assert rates[names.PARSE_RATE] < Evaluate().min_parse_rate and not health.problems(rates, Evaluate(), 20)


def test_the_answers_shown_are_of_different_kinds_and_short():
    shown = health.lines_of_answers(answers(8, 4, 4))
    assert [line.rpartition(" ")[2] for line in shown] == ["unread", "wrong"] and "expected 7" in shown[0]
    assert [line.rpartition(" ")[2] for line in health.lines_of_answers(answers(2, 0, 0))] == ["right", "right"]
    long = answers(1, 1, 0).assign(completion="first\n\n" + "x" * 5000 + "\nlast")
    assert all(
        "first ⏎" in line and line.endswith("⏎ last") and len(line) < 400 for line in health.lines_of_answers(long)
    )


def test_training_memory_is_sixteen_bytes_a_parameter_and_an_adapter_needs_less():
    full = recipe.load("instruct")
    weights, peak = footprint.needed(full.train, QWEN, 150)
    assert weights == 16 * QWEN.parameters and weights < peak < 80 * 2**30  # the recipe says one 80 GB GPU
    adapter = recipe.load("instruct", {"train.method": "qlora"})
    assert footprint.needed(adapter.train, QWEN, 150)[0] < weights / 20
    more = recipe.load("instruct", {"train.micro_batch": "64"})
    assert footprint.needed(more.train, QWEN, 150)[1] > peak


def test_fewer_questions_than_asked_for_are_said(tmp_path):
    rows = "\n".join(json.dumps({"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"}) for i in range(3))
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(rows)
    own = recipe.load("tiny", {"task": "gsm8k", "data": str(tmp_path), "evaluate.n": "4"})
    assert preflight.describe_questions(own) == "3 held-out questions, all there are"
    assert preflight.describe_questions(study()) == "40 held-out questions"


def test_sizes_are_short():
    assert [memory.in_gib(size) for size in (4e7, 5.5e9, 5e10)] == ["0.037 GiB", "5.1 GiB", "47 GiB"]


def test_a_recipe_for_a_gpu_is_refused_on_a_cpu_at_once_and_runs_with_yes(capsys):
    overrides = {"device": "cpu", "task": "arithmetic", "model": "qrl-tiny"}
    settings = recipe.load("instruct", overrides)
    with pytest.raises(BadInput, match=r"instruct is sized for a GPU.* recipe=tiny\. .*--yes"):
        preflight.check(settings, {"recipe": "instruct", **overrides})
    preflight.check(settings, {"recipe": "instruct", **overrides}, yes=True)
    assert "sized for a GPU" in capsys.readouterr().err


def test_a_file_of_ones_own_for_a_gpu_names_the_one_for_a_cpu_beside_it(tmp_path):
    for name, beside in (("sums", "sums-cpu"), ("other", "")):
        (tmp_path / f"{name}.yaml").write_text("extends: tiny\nmachine: gpu\n")
        if beside:
            (tmp_path / f"{beside}.yaml").write_text(f"extends: {name}.yaml\nmachine: any\n")
        path = str(tmp_path / f"{name}.yaml")
        smaller = re.escape(str(tmp_path / f"{beside}.yaml")) if beside else "tiny"
        with pytest.raises(BadInput, match=f"is sized for a GPU.* or recipe={smaller}\\. "):
            preflight.check(recipe.load(path, {"device": "cpu"}), {"recipe": path, "device": "cpu"})


def test_codes_that_vllm_cannot_run_are_refused_before_anything_is_trained():
    given = {"quantize.schemes": "nf4,gptq-int3", "evaluate.engine": "vllm"}
    with pytest.raises(BadInput, match="no kernel for gptq-int3: set"):
        preflight.check(recipe.load("tiny", given), given)
    with pytest.raises(BadInput, match="no kernel for rtn-int2"):
        preflight.check(recipe.load("tiny", given | {"quantize.schemes": "nf4"}), given, beside=["rtn-int2"])


def test_all_that_can_be_known_before_a_model_loads_is_told_at_once(store, tmp_path, monkeypatch):
    monkeypatch.setattr(trial, "run", lambda *_: pytest.fail("the base was loaded"))
    given = {
        "task": "gsm8k",
        "data": str(gsm8k(tmp_path / "data", shared=True)),
        "device": "cpu",
        "evaluate.tensor_parallel": "2",
        "evaluate.max_new_tokens": "480",
        "train.parallel": "ddp",
        "promote.require_signature": str(tmp_path / "absent.pem"),
        "quantize.schemes": "nf4,awq",
    }
    with pytest.raises(BadInput) as refused:
        pipeline.study(recipe.load("tiny", given), given)
    count, *sentences = str(refused.value).splitlines()
    for words in (
        "absent.pem",
        "evaluate.tensor_parallel = 2",
        "train.parallel = ddp",
        "1 of 60 held-out questions are among the training questions",
        "evaluate.max_new_tokens = 480",
        "needs the environment of projects/awq",
    ):
        assert sum(words in sentence for sentence in sentences) == 1, (words, sentences)
    assert count == f"{len(sentences)} things to correct:" and all(line.startswith("- ") for line in sentences)


def test_objections_are_one_sentence_or_a_list_and_hide_what_follows_from_them():
    found = Objections()
    found.insist()

    def refuse(sentence: str) -> None:
        raise BadInput(sentence)

    with pytest.raises(ZeroDivisionError):
        found.keep(lambda: 1 / 0)
    assert found.keep(lambda: 7) == 7 and found.keep(refuse, "No a.") is None
    assert found.keep(lambda: 1 / 0) is None  # it may follow from the objection
    with pytest.raises(BadInput, match=r"\ANo a\.\Z"):
        found.insist()
    for sentence in ("No a.", "No b."):
        found.keep(refuse, sentence)
    with pytest.raises(BadInput, match=r"\A2 things to correct:\n- No a\.\n- No b\.\Z"):
        found.insist()


def test_without_a_recipe_the_device_decides_between_the_small_and_the_large_one():
    own = {"model": "some/model", "device": "cpu"}
    assert auto.recipe_for("auto", own) == "instruct-cpu"
    assert auto.recipe_for("auto", {"task": "math", "device": "cpu"}) == "math-cpu"
    assert auto.recipe_for("auto", {"device": "cpu"}) == "auto" and auto.recipe_for("math", own) == "math"


def test_an_overlap_of_the_users_own_questions_is_found_before_the_base_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(trial, "run", lambda *_: pytest.fail("the base was loaded"))
    own = study(task="gsm8k", data=str(gsm8k(tmp_path / "data", shared=True)))
    with pytest.raises(BadInput, match="1 of 60 held-out questions are among the training questions"):
        preflight.rehearse(own, "cpu", everything(), yes=True)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"evaluate.max_new_tokens": "480"}, "held-out prompt of .* evaluate.max_new_tokens = 480 exceed .* 512"),
        ({"train.max_completion_tokens": "480"}, "training prompt of .*train.max_completion_tokens to at most"),
        ({"quantize.schemes": "nf4,gptq", "quantize.calibration_max_tokens": "60"}, "quantize.calibration_max_tokens"),
    ],
)
def test_texts_without_room_are_named_before_the_base_is_loaded(overrides, says, monkeypatch):
    monkeypatch.setattr(trial, "run", lambda *_: pytest.fail("the base was loaded"))
    with pytest.raises(BadInput, match=says):
        preflight.rehearse(study(**overrides), "cpu", everything(), yes=False)


def test_a_base_that_was_evaluated_already_is_not_asked_again(monkeypatch):
    monkeypatch.setattr(trial, "run", lambda *_: pytest.fail("the base was loaded"))
    ahead = everything()
    ahead.missing["evaluate"].remove("base:full")
    preflight.rehearse(study(), "cpu", ahead, yes=False)


def test_too_little_memory_for_the_optimizer_is_an_objection(monkeypatch):
    monkeypatch.setattr(trial, "run", lambda *_: replace(tried(12, 8), free=2**20))
    with pytest.raises(BadInput, match=r"Training needs .* for weights and optimizer, but .* are free"):
        preflight.rehearse(study(), "cpu", everything(), yes=False)
    monkeypatch.undo()
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1000)
    with pytest.raises(BadInput, match=r"of weights in bf16, but .* are free"):
        trial.run(study(), tiny.PATH, "cpu")


@pytest.mark.process
def test_the_shipped_model_passes_and_two_answers_and_the_memory_are_shown(capsys):
    preflight.rehearse(study(), "cpu", everything(), yes=False)
    shown = capsys.readouterr().err
    assert "base answers 20 held-out questions" in shown and shown.count("arithmetic-heldout-0-") == 2
    assert "memory: about 0.38 GiB for training, 0.037 GiB of it for weights and optimizer" in shown


def full(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.\nMore.")


def killed(*_: object) -> None:
    os._exit(9)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(("end", "says"), [(full, r"\(CUDA out of memory\..*\): free"), (killed, "terminated")])
def test_a_gpu_without_room_for_the_trial_gets_a_sentence(end, says, monkeypatch):
    monkeypatch.setattr(trial, "_run", end)
    with pytest.raises(QrlError, match=f"could not answer 20 questions on this cuda .*{says}"):
        trial.run(study(), tiny.PATH, "cuda")


def waiting(_: object, folder: Path, __: object) -> None:
    (folder / "begun").touch()
    time.sleep(60)
    (folder / "ended").touch()


@pytest.mark.slow
@pytest.mark.process
def test_a_signal_during_the_trial_does_not_wait_for_its_answers(monkeypatch, tmp_path):
    monkeypatch.setattr(trial, "_run", waiting)

    def interrupt() -> None:
        while not (tmp_path / "begun").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    before = multiprocessing.active_children()  # other tests' workers, which stay
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        trial.run(study(), tmp_path, "cuda")
    assert set(multiprocessing.active_children()) <= set(before) and not (tmp_path / "ended").exists()


ON_A_CPU = """
from qrl.study import trial

computed = trial._run

def on_a_cpu(settings, folder, _):
    return computed(settings, folder, "cpu")
"""
REHEARSAL = """
import sys
from on_a_cpu import on_a_cpu
from qrl import recipe, tiny
from qrl.study import trial

trial._run = on_a_cpu
settings = recipe.load("tiny", {"task": sys.argv[1], "evaluate.n": "20", "evaluate.max_new_tokens": "16"})
print(len(trial.run(settings, tiny.PATH, "cuda").frame), "answers")
"""


@pytest.mark.slow
@pytest.mark.process
def test_a_task_of_ones_own_gets_through_the_trial_in_a_process(tmp_path):
    """As on a GPU: the trial's process has started the task's process, and has to end it to end itself."""
    (tmp_path / "sums.py").write_text(
        "from qrl.tasks import Question\n\n"
        "def load(split, n, seed):\n"
        "    return [Question(f'{split}{i}', f'What is {i}+1?', '', str(i + 1)) for i in range(20)]\n\n"
        "def grade(completion, answer):\n"
        "    return completion.strip().endswith(answer)\n"
    )
    (tmp_path / "on_a_cpu.py").write_text(ON_A_CPU)
    (tmp_path / "rehearsal.py").write_text(REHEARSAL)
    words = [sys.executable, str(tmp_path / "rehearsal.py"), str(tmp_path / "sums.py")]
    ended = subprocess.run(
        words,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"},
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )
    assert ended.stdout == "20 answers\n"


@pytest.mark.process
def test_a_base_that_cannot_answer_ends_the_study_with_its_answers_and_yes_goes_on(random_llama, capsys):
    own = study(model=str(random_llama))
    with pytest.raises(BadInput, match=r"none of 20 held-out questions.*--yes"):
        preflight.rehearse(own, "cpu", everything(), yes=False)
    assert capsys.readouterr().err.count("(unreadable, expected") == 2
    preflight.rehearse(own, "cpu", everything(), yes=True)
    assert "none of 20" in capsys.readouterr().err


@pytest.mark.process
def test_an_unhealthy_cell_of_the_base_ends_the_evaluation_with_answers_and_their_place(store, random_llama, capsys):
    import mlflow

    cells = ",".join(f"{variant}:full={random_llama}" for variant in ("base", "grpo"))
    with pytest.raises(UnhealthyCell, match=rf"base · full is void.*{names.EOS_RATE}.*{names.QUESTIONS}"):
        evaluate.evaluate(study(model=str(random_llama)), cells)
    printed = capsys.readouterr().err
    assert printed.count("(unreadable, expected") == 2
    assert printed.splitlines()[-1].startswith("qrl: 1 of 2 cells are void")
    statuses = {run.info.run_name: run.info.status for run in mlflow.search_runs(["0"], output_format="list")}
    assert statuses == {"evaluate": "FAILED", "base · full": "FAILED"}


def test_bad_data_are_named_before_a_missing_environment_is(tmp_path):
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).write_text('{"q": "How many?", "answer": "1"}\n')
    settings = recipe.load("tiny", {"task": "gsm8k", "data": str(tmp_path), "device": "cpu"})
    with pytest.raises(BadInput, match=r"line 1: 'question' is missing"):
        preflight.check(settings, {})
