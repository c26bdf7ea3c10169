"""A step that lacks space on the disk says so before it writes, and leaves no run behind that looks alive."""

import shutil
from collections import namedtuple

import mlflow
import peft
import pytest
from transformers import AutoModelForCausalLM

from qrl import checkpoint, quantize, recipe, tiny, workspace
from qrl.errors import BadInput
from qrl.formats import plain
from qrl.steps import evaluate, train
from qrl.steps import quantize as quantizing
from qrl.tracking import models, runs

Usage = namedtuple("Usage", "total used free")
SMALL = {"device": "cpu", "train.steps": "1", "train.questions": "8", "train.prompts_per_step": "2", "evaluate.n": "20"}


@pytest.fixture
def full(store, monkeypatch):
    """Let the disk have 1,000 bytes left, in a store of its own."""
    monkeypatch.setattr(workspace.shutil, "disk_usage", lambda path: Usage(10**9, 10**9 - 1000, 1000))


@pytest.fixture
def adapter(tmp_path):
    """Return a folder with an adapter of the shipped model."""
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tiny.PATH), peft.LoraConfig(r=2))
    model.save_pretrained(tmp_path / "adapter")
    return str(tmp_path / "adapter")


def test_training_refuses_a_disk_that_its_checkpoints_would_fill(full):
    with pytest.raises(BadInput, match=r"Training, checkpoints .* included, needs 0\.\d+ GB, but .* has 1e-06 GB free"):
        train.train(recipe.load("tiny", SMALL))
    assert not mlflow.search_runs().size


def test_merging_refuses(full, adapter):
    with pytest.raises(BadInput, match=r"The merged model needs 0\.0"):
        train.merge(recipe.load("tiny-lora", SMALL), adapter)
    assert not mlflow.search_runs().size


def test_quantizing_refuses(full):
    with pytest.raises(BadInput, match=r"A quantized copy of the model needs 0\.0"):
        quantizing.quantize(recipe.load("tiny", SMALL), ("nf4",), None)
    assert not mlflow.search_runs().size


@pytest.mark.process
def test_evaluating_refuses_to_copy_a_model_into_a_full_store(full):
    with pytest.raises(BadInput, match=r"A copy of the model in the store needs 0\.0"):
        evaluate.evaluate(recipe.load("tiny", SMALL), None)
    runs_ = mlflow.MlflowClient().search_runs(["0"])
    assert {run.info.status for run in runs_} == {"FAILED"}
    assert all("needs 0.0" in run.data.tags["qrl.reason"] for run in runs_)
    assert not any(str(model.status) == "READY" for model in mlflow.search_logged_models(output_format="list"))


def test_an_unpacked_copy_refuses(full, tmp_path):
    with pytest.MonkeyPatch.context() as roomy:
        roomy.setattr(workspace.shutil, "disk_usage", lambda path: Usage(10**12, 0, 10**12))
        quantize.run("rtn-int4", tiny.PATH, tmp_path / "packed")
    with pytest.raises(BadInput, match=r"An unpacked copy of the model needs 0\.0"):
        plain.write(tmp_path / "packed", tmp_path / "plain")
    assert not (tmp_path / "plain").exists()


def test_a_checkpoint_that_is_linked_into_the_store_needs_no_space(full, tmp_path):
    shutil.copytree(tiny.PATH, tmp_path / "model")
    labels = {"digest": checkpoint.digest(tiny.PATH), "variant": "base", "scheme": "full", "task": "arithmetic"}
    with runs.step("train"):
        assert models.log_checkpoint(tmp_path / "model", name="base", move=True, **labels)
