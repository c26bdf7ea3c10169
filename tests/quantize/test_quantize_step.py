"""The quantize step: calibration from task, file and rollouts, its record, its bars, and a step that is killed."""

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
from qrl.quantize import calibration
from qrl.steps import quantize as step
from qrl.tasks import prompt, question_sets
from qrl.tracking import addresses, reuse

pytestmark = pytest.mark.process

SAMPLES = 4


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    """The shipped model with changed weights, so that its answers differ: a variant."""
    folder = shutil.copytree(tiny.PATH, tmp_path_factory.mktemp("other") / "model")
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in (name for name in weights if name.endswith("down_proj.weight")):
        noise = weights[name].float().std() * torch.randn(weights[name].shape, generator=generator)
        weights[name] += noise.to(weights[name].dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def settings(**given) -> recipe.Recipe:
    small = {"quantize.calibration_samples": str(SAMPLES), "evaluate.max_new_tokens": "40", "device": "cpu"}
    return recipe.load("tiny", small | given)


def records() -> dict[str, dict]:
    """Return variant → params and metrics of its latest run."""
    variants = "tags.`qrl.variant` LIKE '%'"
    newest_last = mlflow.search_runs(filter_string=variants, order_by=["start_time ASC"], output_format="list")
    return {run.data.params["variant"]: run.data.params | run.data.metrics for run in newest_last}


def own_answers(chosen: recipe.Recipe, model: Path) -> list[str]:
    """Return training questions with the model's own answers, rendered without the step's code."""
    tokens = hf.tokenizer(model)
    loaded, _ = hf.load(model, "cpu", torch.float32)
    questions = question_sets.load(chosen, "train", SAMPLES)
    prompts = [prompt.render(tokens, question.question, chosen.prompt) for question in questions]
    written = hf.generate(loaded, tokens, prompts, max_new_tokens=40, batch_size=SAMPLES)
    texts = [
        prompt.training_text(hf.plain_tokenizer(model), replace(question, solution=answer.raw), chosen.prompt)
        for question, answer in zip(questions, written, strict=True)
    ]
    return [
        text if answer.finish_reason == "stop" else text.removesuffix(tokens.eos_token)
        for text, answer in zip(texts, written, strict=True)
    ]


@pytest.mark.slow
def test_several_schemes_in_one_step_store_what_each_stores_alone(store, other):
    """Libraries keep state in a process: what one scheme leaves behind must not reach the next."""
    schemes, models = ("gptq", "nf4", "awq-ct", "rtn-int4"), f"base={tiny.PATH},grpo={other}"

    def digests() -> dict[str, str]:
        oldest_first = {"filter_string": "tags.`qrl.variant` LIKE '%'", "order_by": ["start_time ASC"]}
        made = mlflow.search_runs(output_format="list", **oldest_first)
        return {run.info.run_name: reuse.outputs(run).values["digest"] for run in made}

    step.quantize(settings(), schemes, models)
    together = digests()
    assert len(together) == len(set(together.values())) == 8
    parent = mlflow.search_runs(filter_string="params.scheme = 'gptq,nf4,awq-ct,rtn-int4'", output_format="list")
    assert len(parent) == 1 and len(parent[0].inputs.dataset_inputs) == 1, "one calibration set"
    for scheme in schemes:
        step.quantize(settings(), (scheme,), models)
    assert digests() == together and len(runs_named("grpo · nf4")) == 2


def runs_named(name: str) -> list:
    return mlflow.search_runs(filter_string=f"attributes.run_name = '{name}'", output_format="list")


@pytest.mark.slow
def test_rollouts_are_each_models_own_answers_to_the_same_questions(store, other):
    chosen = settings(**{"quantize.calibration": "rollouts"})
    step.quantize(chosen, ("gptq",), f"base={tiny.PATH},grpo={other}")
    first = records()
    for variant, model in (("base", tiny.PATH), ("grpo", other)):
        assert first[variant]["calibration_digest"] == calibration.digest(own_answers(chosen, model))
    assert first["base"]["calibration_digest"] != first["grpo"]["calibration_digest"]
    assert first["base"][names.SETTINGS] == first["grpo"][names.SETTINGS]  # same questions: the cells may be compared
    reseeded = settings(**{"quantize.calibration": "rollouts", "quantize.calibration_seed": "7"})
    step.quantize(reseeded, ("gptq",), f"grpo={other}")
    assert records()["grpo"][names.SETTINGS] != first["base"][names.SETTINGS]  # other questions: compare refuses them


@pytest.mark.slow
def test_every_model_is_calibrated_on_the_file_and_the_record_is_complete(store, other, tmp_path):
    problem = "Tom has {} apples and buys {} more. How many does he have? #### {}"
    texts = [problem.format(i, i + 2, 2 * i + 2) for i in range(SAMPLES)]
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    step.quantize(settings(**{"quantize.calibration": str(file)}), ("gptq",), f"base={tiny.PATH},grpo={other}")
    base, grpo = (records()[variant] for variant in ("base", "grpo"))
    assert base["calibration_digest"] == grpo["calibration_digest"] == calibration.digest(texts)
    assert base[names.SETTINGS] == grpo[names.SETTINGS]
    for record in (base, grpo):
        assert record["scheme"] == "gptq" and record["settings.calibration"] == str(file) and int(record["bytes"]) > 1e6
        assert 4.1 < record["quantize/bits_per_weight"] < 4.2 and record["quantize/seconds"] > 0
        assert 0 < record["quantize/layer_error"] < 1
    run, *_ = mlflow.search_runs(filter_string="params.variant = 'base'", output_format="list")
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "quantize/layer_error")
    assert [point.step for point in history] == [0, 1, 2, 3]  # a layer each


@pytest.mark.slow
def test_the_record_the_message_and_a_versions_tags_say_which_scales_a_model_has(store, capsys):
    from qrl import registry

    step.quantize(settings(**{"quantize.kv_cache": "fp8"}), ("fp8-static", "rtn-int8"), None)
    said = capsys.readouterr().err
    assert "base · fp8-static: activation scales static, per tensor; kv scales static, per layer" in said
    assert "base · rtn-int8: kv scales static, per layer" in said
    tags = {}
    for model in mlflow.search_logged_models(output_format="list"):
        scheme = model.params["scheme"]
        if scheme in ("fp8-static", "rtn-int8"):
            uri = f"models:/{model.model_id}"
            cell = {"digest": model.params["digest"], "variant": "base", "scheme": scheme}
            version = registry.register("qrl-scales", uri, **cell, accuracy=0.5, stderr=0.1, n=20)
            tags[scheme] = mlflow.MlflowClient().get_model_version("qrl-scales", str(version.version)).tags
    assert tags["fp8-static"][names.TAG_ACTIVATION_SCALES] == "static, per tensor"
    assert names.TAG_ACTIVATION_SCALES not in tags["rtn-int8"]
    assert {each[names.TAG_KV_SCALES] for each in tags.values()} == {"static, per layer"}


@pytest.mark.slow
def test_bars_count_the_texts_that_are_drawn_rendered_generated_and_tokenized(store, monkeypatch):
    bars = {}

    class Bar(step.tqdm):
        def close(self):
            bars.setdefault(self.desc, []).append((self.n, self.total))
            super().close()

    monkeypatch.setattr(step, "tqdm", Bar)
    step.quantize(settings(**{"quantize.calibration": "rollouts"}), ("gptq",), None)
    for what in ("draw", "generate", "render", "tokenize"):
        (counts,) = [counts for name, counts in bars.items() if name.startswith(what)]
        assert (SAMPLES, SAMPLES) in counts, what


def test_impossible_requests_are_refused_before_a_run_is_opened(store, tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "one"}\n')
    for source, key in ((file, r"1 calibration texts.* 4\b"), (tmp_path / "none", "cannot be read")):
        with pytest.raises(BadInput, match=key):
            step.quantize(settings(**{"quantize.calibration": str(source)}), ("gptq",), None)
    with pytest.raises(BadInput, match="'int3'"):
        step.quantize(settings(), ("int3",), None)
    odd = shutil.copytree(tiny.PATH, tmp_path / "odd")
    config = json.loads((odd / "config.json").read_text())
    (odd / "config.json").write_text(json.dumps(config | {"intermediate_size": 200}))
    for scheme in ("gptq", "rtn-int4"):
        with pytest.raises(BadInput, match="down_proj has 200 inputs"):
            step.quantize(settings(), (scheme,), f"base={odd}")
    assert not mlflow.search_runs(output_format="list")


def test_a_cell_with_another_scheme_than_its_model_is_refused(store):
    for scheme, other, words in (
        ("nf4", "int8", "4-bit floats.* 8-bit integers"),
        ("rtn-int8", "w8a16", "rtn-int8.* w8a16"),
    ):
        step.quantize(settings(), (scheme,), None)
        (model,) = mlflow.search_logged_models(filter_string=f"params.scheme = '{scheme}'", output_format="list")
        address = f"models:/{model.model_id}"
        assert addresses.stored_as(("base", scheme), address).quantization == names.STORED_AS[scheme]
        with pytest.raises(BadInput, match=words):
            addresses.stored_as(("base", other), address)


@pytest.mark.slow
def test_a_killed_step_leaves_nothing_in_the_store_and_the_next_one_cleans_up(store):
    options = ["--scheme", "awq-ct", "--device", "cpu", "--quantize.calibration_samples", "64"]
    words = [sys.executable, "-m", "qrl", "quantize", *options]
    root = Path(qrl.__file__).parents[1]
    child = subprocess.Popen(words, env=os.environ | {"PYTHONPATH": str(root)}, stderr=subprocess.PIPE)
    folders = Path(".qrl")
    while child.poll() is None and not list(folders.glob("quantize-awq-ct-by-*/base")):
        time.sleep(0.05)
    assert child.poll() is None, child.stderr.read().decode()[-2000:]
    time.sleep(1)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert list(folders.glob("quantize-awq-ct-by-*/base"))  # half-written, outside the store
    assert not mlflow.search_logged_models(output_format="list")
    step.quantize(settings(), ("fp8",), None)
    assert not list(folders.glob("quantize-*"))
    assert [model.name for model in mlflow.search_logged_models(output_format="list")] == ["base-fp8"]
    assert {run.info.status for run in mlflow.search_runs(output_format="list")} == {"FINISHED", "KILLED"}
