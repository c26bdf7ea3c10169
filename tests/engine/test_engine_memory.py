"""Memory that runs out: half the batch once, a sentence, and results of every question and step."""

import pytest
import torch

from qrl import checkpoint, names, recipe, tasks, tiny
from qrl.engine import hf, memory
from qrl.errors import QrlError
from qrl.recipe import Train
from qrl.steps import evaluate
from qrl.steps import train as step
from qrl.train import Job, footprint, grpo, trainers

CPU = RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory")
FULL = [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), MemoryError(), CPU]


@pytest.mark.process
@pytest.mark.parametrize("error", FULL)
def test_half_the_batch_is_tried_once_and_said(error):
    sizes, said = [], []

    def work(size: int) -> int:
        sizes.append(size)
        if size > 4:
            raise error
        return size

    assert memory.halved(work, 8, "evaluate.batch_size", say=said.append) == 4 and sizes == [8, 4]
    assert len(said) == 1 and "8" in said[0] and "goes on with 4" in said[0]
    with pytest.raises(QrlError, match=r"evaluate\.batch_size = 16, and with 8: lower"):
        memory.halved(work, 16, "evaluate.batch_size", say=said.append)
    with pytest.raises(QrlError, match=r"train\.micro_batch = 6 .*: set train\.gradient_checkpointing"):
        memory.halved(work, 6, "train.micro_batch", divisor_of=16)
    with pytest.raises(ZeroDivisionError):
        memory.halved(lambda size: 1 / 0, 8, "evaluate.batch_size")


@pytest.mark.process
def test_a_cell_is_answered_whole_in_smaller_batches(monkeypatch, capsys):
    decode = hf._decode

    def limited(model, tokens, prompts, *rest):
        if len(prompts) > 3:
            raise FULL[0]
        return decode(model, tokens, prompts, *rest)

    monkeypatch.setattr(hf, "_decode", limited)
    settings = recipe.load("tiny", {"evaluate.n": "8", "evaluate.batch_size": "6", "evaluate.max_new_tokens": "8"})
    questions = tasks.load("arithmetic", "heldout", 8)
    weights = checkpoint.check(tiny.PATH)
    cell = evaluate.Evaluation(settings, "base", "full", str(tiny.PATH), weights, weights.digest, questions, "cpu")
    counted = []
    asked = evaluate._ask(evaluate.cells.Engines(), cell, counted.append)
    assert asked.receipt["batch_size"] == 3 and sum(counted) == len(asked.frame) == 8
    assert "base · full: Memory ran out with evaluate.batch_size = 6" in capsys.readouterr().err


def test_the_space_of_a_training_is_of_its_checkpoints_and_its_model():
    base = checkpoint.check(tiny.PATH)
    parameters = base.bytes // 2  # stored in bf16; a header beside them
    for saved, changes in {
        1: {"train.steps": "8"},
        3: {"train.steps": "90"},
        6: {"train.steps": "90", "train.keep_checkpoints": "5"},
    }.items():
        settings = recipe.load("tiny", changes | {"train.save_every": "10"})
        assert footprint.written(settings.train, base) == pytest.approx(saved * 12 * parameters + base.bytes, rel=0.01)
    assert footprint.written(recipe.load("tiny-lora", {}).train, base) == 0


@pytest.mark.slow
@pytest.mark.process
def test_training_resumes_with_half_the_micro_batch(tmp_path, monkeypatch, capsys):
    tags, steps = {}, {}
    monkeypatch.setattr(step.contents, "tag", tags.__setitem__)
    trainer_of = grpo.grpo_trainer

    def trainer(*given):
        class Small(trainer_of(*given)):
            def training_step(self, *inputs):
                if self.args.per_device_train_batch_size > 4 and self.state.global_step == 2:
                    raise FULL[0]
                return super().training_step(*inputs)

        return Small

    monkeypatch.setattr(grpo, "grpo_trainer", trainer)
    small = {"prompts_per_step": 4, "generations": 4, "max_completion_tokens": 24, "keep_checkpoints": 1}
    settings = Train(steps=4, micro_batch=8, save_every=1, learning_rate=4e-5, **small)
    data = {"base": tiny.PATH, "questions": tasks.load("arithmetic", "train", 32, 0), "task": "arithmetic"}
    folders = {"work": tmp_path / "work", "out": tmp_path / "model"}
    log = lambda metrics, number: steps.setdefault(number, metrics)  # noqa: E731
    job = Job(settings=settings, template="plain", seed=0, device="cpu", log=log, **data, **folders)
    trained = step._train_within_memory(trainers.TRAINERS["grpo"], job)
    assert trained.resumed_from == 2 and sorted(steps) == [1, 2, 3, 4] and len(trained.history) == 4
    assert checkpoint.check(trained.path).dtype == checkpoint.check(tiny.PATH).dtype
    assert "goes on with 4" in tags[f"{names.TAG_WATCH}memory"] and "warning" in capsys.readouterr().err
    assert [path.name for path in folders["work"].glob("checkpoint-*")] == ["checkpoint-4"]
