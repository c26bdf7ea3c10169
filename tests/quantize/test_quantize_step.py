"""The step as it is run: calibration from task, file and rollouts, one record, and nothing half-written by a process that is killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import mlflow
import pytest
import torch
from safetensors.torch import load_file, save_file

import qrl
from qrl import names, recipe, tiny
from qrl.engine import hf
from qrl.errors import BadInput
from qrl.quantize import calibration, staging
from qrl.steps import inputs
from qrl.steps import quantize as step
from qrl.tasks import prompt

SAMPLES = 4


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    """The shipped model with other weights, so that it answers otherwise: a variant."""
    folder = shutil.copytree(tiny.PATH, tmp_path_factory.mktemp("other") / "model")
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in (name for name in weights if name.endswith("down_proj.weight")):
        weights[name] += (weights[name].float().std() * torch.randn(weights[name].shape, generator=generator)).to(
            weights[name].dtype
        )
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def settings(**given) -> recipe.Recipe:
    return recipe.load(
        "tiny", {"quantize.calibration_samples": str(SAMPLES), "evaluate.max_new_tokens": "40", "device": "cpu"} | given
    )


def records() -> dict[str, dict]:
    """Variant → the params of its latest run, metrics beside them."""
    found = mlflow.search_runs(
        filter_string="tags.`qrl.variant` LIKE '%'", order_by=["start_time ASC"], output_format="list"
    )
    return {run.data.params["variant"]: run.data.params | run.data.metrics for run in found}


def own_answers(chosen: recipe.Recipe, model: Path) -> list[str]:
    """Training questions with what the model says itself, rendered by hand."""
    tokens = hf.tokenizer(model)
    loaded, _ = hf.load(model, "cpu", torch.float32)
    questions = inputs.questions(chosen, "train", SAMPLES)
    prompts = [prompt.render(tokens, question.question, chosen.prompt) for question in questions]
    written = hf.generate(loaded, tokens, prompts, max_new_tokens=40, batch_size=SAMPLES)
    texts = [
        prompt.training_text(staging.tokenizer(model), replace(question, solution=answer.raw), chosen.prompt)
        for question, answer in zip(questions, written, strict=True)
    ]
    return [
        text if answer.finish_reason == "stop" else text.removesuffix(tokens.eos_token)
        for text, answer in zip(texts, written, strict=True)
    ]


def test_rollouts_are_each_models_own_answers_to_the_same_questions(store, other):
    chosen = settings(**{"quantize.calibration": "rollouts"})
    step.quantize(chosen, "gptq", f"base={tiny.PATH},grpo={other}")
    found = records()
    for variant, model in (("base", tiny.PATH), ("grpo", other)):
        assert found[variant]["calibration_digest"] == calibration.digest(own_answers(chosen, model))
    assert found["base"]["calibration_digest"] != found["grpo"]["calibration_digest"]
    assert (
        found["base"][names.SETTINGS] == found["grpo"][names.SETTINGS]
    )  # same questions, so their cells may be compared
    step.quantize(
        settings(**{"quantize.calibration": "rollouts", "quantize.calibration_seed": "7"}), "gptq", f"grpo={other}"
    )
    assert records()["grpo"][names.SETTINGS] != found["base"][names.SETTINGS]  # other questions: compare refuses them


def test_a_file_is_what_every_model_is_calibrated_on_and_the_record_is_whole(store, other, tmp_path):
    texts = [
        f"Tom has {i} apples and buys {i + 2} more. How many does he have? #### {2 * i + 2}" for i in range(SAMPLES)
    ]
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    step.quantize(settings(**{"quantize.calibration": str(file)}), "gptq", f"base={tiny.PATH},grpo={other}")
    found = records()
    assert found["base"]["calibration_digest"] == found["grpo"]["calibration_digest"] == calibration.digest(texts)
    assert found["base"][names.SETTINGS] == found["grpo"][names.SETTINGS]
    for record in found.values():
        assert record["scheme"] == "gptq" and record["settings.calibration"] == str(file) and int(record["bytes"]) > 1e6
        assert (
            4.1 < record["quantize/bits_per_weight"] < 4.2
            and record["quantize/seconds"] > 0
            and 0 < record["quantize/layer_error"] < 1
        )
    history = mlflow.MlflowClient().get_metric_history(
        mlflow.search_runs(filter_string="params.variant = 'base'", output_format="list")[0].info.run_id,
        "quantize/layer_error",
    )
    assert [point.step for point in history] == [0, 1, 2, 3]  # of each layer


def test_what_cannot_be_done_is_told_before_a_run_is_opened(store, tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "one"}\n')
    for given, words in (
        ({"quantize.calibration": str(file)}, "has 1 calibration texts, but 4 were asked for"),
        ({"quantize.calibration": str(tmp_path / "none")}, "cannot be read"),
    ):
        with pytest.raises(BadInput, match=words):
            step.quantize(settings(**given), "gptq", None)
    with pytest.raises(BadInput, match="no scheme 'int3'"):
        step.quantize(settings(), "int3", None)
    odd = shutil.copytree(tiny.PATH, tmp_path / "odd")
    config = json.loads((odd / "config.json").read_text())
    (odd / "config.json").write_text(json.dumps(config | {"intermediate_size": 200}))
    for scheme in ("gptq", "rtn-int4"):
        with pytest.raises(BadInput, match="down_proj has 200 inputs"):
            step.quantize(settings(), scheme, f"base={odd}")
    assert not mlflow.search_runs(output_format="list")


def test_a_cell_is_not_called_by_another_scheme_than_the_one_its_model_is_stored_in(store):
    for scheme, other, words in (
        ("nf4", "int8", "stored as 4-bit floats: expected 8-bit integers"),
        ("rtn-int8", "w8a16", "stored as rtn-int8: expected w8a16"),
    ):
        step.quantize(settings(), scheme, None)
        (model,) = mlflow.search_logged_models(filter_string=f"params.scheme = '{scheme}'", output_format="list")
        address = f"models:/{model.model_id}"
        assert inputs.stored_as(("base", scheme), address).quantization == names.STORED_AS[scheme]
        with pytest.raises(BadInput, match=words):
            inputs.stored_as(("base", other), address)


def test_a_step_killed_outright_leaves_nothing_in_the_store_and_the_next_one_sweeps(store):
    words = [
        sys.executable,
        "-m",
        "qrl",
        "quantize",
        "--scheme",
        "awq-ct",
        "--device",
        "cpu",
        "--quantize.calibration_samples",
        "64",
    ]
    root = Path(qrl.__file__).parents[1]
    child = subprocess.Popen(words, env=os.environ | {"PYTHONPATH": str(root)}, stderr=subprocess.PIPE)
    folders = Path(".qrl")
    while child.poll() is None and not list(folders.glob("quantize-awq-ct-pid*/base")):
        time.sleep(0.05)
    assert child.poll() is None, child.stderr.read().decode()[-2000:]
    time.sleep(1)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert list(folders.glob("quantize-awq-ct-pid*/base"))  # half-written, and not in the store
    assert not mlflow.search_logged_models(output_format="list")
    step.quantize(settings(), "fp8", None)
    assert not list(folders.glob("quantize-*"))
    assert [model.name for model in mlflow.search_logged_models(output_format="list")] == ["base-fp8"]
    assert {run.info.status for run in mlflow.search_runs(output_format="list")} == {"FINISHED", "KILLED"}
