"""NaN never passes through training unnoticed: not from a base or a teacher, not from a loss, not into a model."""

import itertools
import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from qrl import tasks, tiny
from qrl.errors import BadInput, QrlError
from qrl.recipe import Train
from qrl.train import Job, distill, grpo, loop, policy
from qrl.train.job import Machine

pytestmark = pytest.mark.process

SMALL = Train(steps=2, prompts_per_step=4, generations=2, micro_batch=8, max_completion_tokens=16, save_every=1)
SPOILT = "model.layers.0.mlp.gate_proj.weight"


def job(folder, settings=SMALL, base=tiny.PATH):
    data = {"base": base, "questions": tasks.load("arithmetic", "train", 16, 0), "task": "arithmetic"}
    where = {"work": folder / "work", "out": folder / "model"}
    return Job(settings=settings, template="plain", seed=0, device="cpu", **data, **where)


@pytest.fixture
def spoilt(tmp_path):
    """Return the built-in model with one weight that is NaN."""
    folder = shutil.copytree(tiny.PATH, tmp_path / "spoilt")
    weights = load_file(folder / "model.safetensors")
    weights[SPOILT][3, 5] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_base_that_holds_nan_is_refused_before_it_samples(method, spoilt, tmp_path):
    with pytest.raises(BadInput, match=rf"spoilt holds NaN or infinity in .*{SPOILT}: give weights that are finite"):
        grpo.run(job(tmp_path, SMALL.model_copy(update={"method": method}), spoilt))
    assert not (tmp_path / "model").exists()


def test_a_teacher_that_holds_nan_is_refused_before_the_student_learns_from_it(spoilt, tmp_path):
    with pytest.raises(BadInput, match=rf"spoilt holds NaN or infinity in {SPOILT}"):
        distill.run(replace(job(tmp_path), teacher=spoilt))
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_loss_that_is_no_number_ends_the_training_without_a_checkpoint_of_that_step(value, tmp_path, monkeypatch):
    whole, steps = distill.divergence, itertools.count()  # one micro-batch is a whole step

    def spoilt(student, teacher, **named):
        return whole(student, teacher, **named) + (value if next(steps) else 0)

    monkeypatch.setattr(distill, "divergence", spoilt)
    with pytest.raises(QrlError, match=rf"^At step 2 train/loss is {value}, so the weights are NaN"):
        distill.run(replace(job(tmp_path), teacher=tiny.PATH))
    assert loop.step(loop.latest(tmp_path / "work")) == 1 and not (tmp_path / "model").exists()


def test_an_update_that_leaves_no_numbers_is_not_kept(tmp_path, monkeypatch):
    moved = distill.loop.sharded.gathered

    def overflowed(trainer):
        with torch.no_grad():
            trainer.model.get_parameter(SPOILT)[0, 0] = torch.inf
        return moved(trainer)

    monkeypatch.setattr(loop.sharded, "gathered", overflowed)
    with pytest.raises(QrlError, match=rf"Training has left NaN or infinity in {SPOILT}: .*Nothing is kept"):
        distill.run(replace(job(tmp_path, SMALL.model_copy(update={"steps": 1})), teacher=tiny.PATH))
    assert not (tmp_path / "model").exists()


def test_integers_and_empty_weights_are_finite():
    weights = {"codes": torch.zeros(2, dtype=torch.uint8), "empty": torch.empty(0), "whole": torch.ones(2)}
    assert policy.first_nonfinite(weights.items()) is None
    assert policy.first_nonfinite({**weights, "bad": torch.tensor([0, -torch.inf])}.items()) == "bad"


@pytest.mark.parametrize("only_the_teachers", [True, False])
def test_a_teacher_whose_tokens_have_other_ids_is_refused(only_the_teachers, tmp_path):
    folder = shutil.copytree(tiny.PATH, tmp_path / "teacher")
    tokens = json.loads((folder / "tokenizer.json").read_text())
    ids = tokens["model"]["vocab"]
    if only_the_teachers:  # a token that the student does not know
        ids["unknown to it"] = ids.pop("9")
    else:
        ids["0"], ids["1"] = ids["1"], ids["0"]
    (folder / "tokenizer.json").write_text(json.dumps(tokens))
    if only_the_teachers:
        distill.check(replace(job(tmp_path), teacher=folder), Machine("cpu"))
        return
    with pytest.raises(BadInput, match=r"gives 2 tokens other ids \('0' is token \d+ there and \d+ in the student's"):
        distill.check(replace(job(tmp_path), teacher=folder), Machine("cpu"))
