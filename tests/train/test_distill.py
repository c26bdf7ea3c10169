"""A distillation on two processes: it trains as one process does, resumes bit for bit, and begins with one teacher."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qrl import checkpoint, tasks, tiny
from qrl.recipe import Train
from qrl.train import Job, distill
from tests.train import pair

pytestmark = [pytest.mark.process, pair.flaky]

SMALL = Train(
    teacher="qrl-tiny",
    steps=3,
    prompts_per_step=4,
    generations=2,
    micro_batch=2,
    max_completion_tokens=24,
    save_every=1,
    learning_rate=4e-5,
    qat_calibration_samples=4,
)
CHILD = """
import gc, json, sys
from dataclasses import replace
from pathlib import Path
from qrl import process
process.prepare_process()
from qrl import tasks, tiny
from qrl.recipe import Train
from qrl.train import Job, distill
from qrl.train.teacher import local

base, work, out, settings, *others = sys.argv[1:]
teacher = others[process.rank() - 1] if others and process.rank() else tiny.PATH
job = Job(
    base=Path(base), questions=tasks.load("arithmetic", "train", 16, 0), task="arithmetic", template="plain", seed=0,
    settings=Train.model_validate_json(settings), device="cpu", work=Path(work), out=Path(out),
)
with process.sentences():
    done = distill.run(replace(job, teacher=Path(teacher)))
(scores,) = (each for each in gc.get_objects() if isinstance(each, local.Local))
held = sum(getattr(weight, "_local_tensor", weight).numel() for weight in scores.model.parameters())
told = {"resumed_from": done.resumed_from, "history": done.history.to_dict("list")}
told["teacher"] = held / sum(weight.numel() for weight in scores.model.parameters())
sys.stdout.write(f"rank {process.rank()} told {json.dumps(told)}\\n")
"""


def started(folder: Path, base: Path, settings: Train, *others: Path) -> subprocess.CompletedProcess:
    """Distil on two processes, the second one from another teacher where there is one."""
    folder.mkdir(exist_ok=True)
    return pair.run(folder, CHILD, base, folder / "work", folder / "model", settings.model_dump_json(), *others)


def together(folder: Path, base: Path, settings: Train) -> list[dict]:
    """Return what each of two processes told at its end, by rank."""
    done = started(folder, base, settings)
    pair.check(done)
    told = dict(line.split(" told ") for line in done.stdout.splitlines() if " told " in line)
    return [json.loads(told[f"rank {rank}"]) for rank in (0, 1)]


def alone(folder: Path, base: Path, settings: Train):
    data = {"base": base, "questions": tasks.load("arithmetic", "train", 16, 0), "task": "arithmetic"}
    where = {"work": folder / "work", "out": folder / "model"}
    return distill.run(
        replace(Job(settings=settings, template="plain", seed=0, device="cpu", **data, **where), teacher=tiny.PATH)
    )


@pytest.mark.slow
@pytest.mark.parametrize(("qat", "micro_batch"), [pytest.param("none", 2, marks=pytest.mark.long), ("int8", 8)])
def test_two_processes_distil_as_one_does(qat, micro_batch, tmp_path, away):
    """Sampling is greedy, so that both train on the same completions; the loss is that of temperature 1."""
    settings = SMALL.model_copy(update={"top_k": 1, "qat": qat, "micro_batch": micro_batch})
    whole = alone(tmp_path / "alone", away, settings)
    first, second = together(tmp_path / "together", away, settings)
    names = ["loss", "grad_norm", "completion_tokens", "truncation_rate"]
    names += ["entropy"] * (micro_batch == 8)  # else TRL logs the mean of micro-batches, which differ
    for name in names:
        assert first["history"][name] == pytest.approx(whole.history[name].tolist(), rel=1e-3), name
        assert first["history"][name] == second["history"][name], name  # gathered over both
    assert min(whole.history["loss"]) > 0
    start, one, two = (
        load_file(path / "model.safetensors") for path in (away, tmp_path / "alone/model", tmp_path / "together/model")
    )
    moved = torch.cat([(one[name].float() - start[name].float()).flatten() for name in one])
    apart = torch.cat([(one[name].float() - two[name].float()).flatten() for name in one])
    assert apart.norm() < 0.02 * moved.norm() > 0


@pytest.mark.slow
@pytest.mark.long  # `test_resume.py` and `test_sharded.py` have the same of GRPO
@pytest.mark.parametrize("qat", ["none", "nvfp4-a4"])
def test_two_processes_go_on_from_a_checkpoint_bit_for_bit(qat, tmp_path, away):
    settings = SMALL.model_copy(update={"temperature": 1.5, "qat": qat})
    whole = together(tmp_path / "whole", away, settings)
    kept = Path("work", "checkpoint-2")
    shutil.copytree(tmp_path / "whole" / kept, tmp_path / "again" / kept)
    again = together(tmp_path / "again", away, settings)
    assert [told["resumed_from"] for told in (*whole, *again)] == [0, 0, 2, 2]
    assert checkpoint.digest(tmp_path / "again/model") == checkpoint.digest(tmp_path / "whole/model")
    assert again[0]["history"]["loss"] == whole[0]["history"]["loss"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", [pytest.param("fp32", marks=pytest.mark.long), "bf16"]
)  # in bf16 its linears are stored so, and norms are not
def test_a_sharded_teacher_scores_as_a_whole_one_bit_for_bit(dtype, tmp_path, away):
    settings = SMALL.model_copy(update={"temperature": 1.5, "steps": 2, "dtype": dtype})
    sharded = settings.model_copy(update={"teacher_placement": "sharded"})
    whole, parts = together(tmp_path / "whole", away, settings), together(tmp_path / "parts", away, sharded)
    assert [told["teacher"] for told in whole] == [1.0, 1.0] and all(0.4 < told["teacher"] < 0.6 for told in parts)
    assert parts[0]["history"]["loss"] == whole[0]["history"]["loss"] and min(whole[0]["history"]["loss"]) > 0
    assert checkpoint.digest(tmp_path / "parts/model") == checkpoint.digest(tmp_path / "whole/model")


@pytest.mark.slow
def test_processes_with_another_teacher_are_refused_before_the_first_step(tmp_path, away):
    done = started(tmp_path, tiny.PATH, SMALL, away)
    assert "Process 1 of the training has other teacher than process 0: give" in done.stderr, done.stderr[-3000:]
    assert done.returncode and not [*tmp_path.glob("work/checkpoint-*")] and not (tmp_path / "model").exists()


def test_only_a_distillation_that_can_learn_nothing_is_warned_of(tmp_path):
    base, other = checkpoint.check(tiny.PATH), tmp_path / "other"
    shutil.copytree(tiny.PATH, other)
    weights = load_file(other / "model.safetensors")
    save_file({name: weight * 1.01 for name, weight in weights.items()}, other / "model.safetensors")
    assert "learns nothing" in distill.startup_warnings(base, base, Train())["teacher"]
    assert not distill.startup_warnings(base, base, Train(qat="int8"))
    assert not distill.startup_warnings(base, checkpoint.check(other), Train())


@pytest.mark.slow
def test_a_step_with_a_teacher_starts_its_own_processes(store, tmp_path):
    import mlflow

    given = {"teacher": str(tiny.PATH), "parallel": "ddp", "processes": "2", "steps": "1", "prompts_per_step": "2"}
    given |= {"generations": "2", "micro_batch": "2", "questions": "16", "max_completion_tokens": "16"}
    words = [sys.executable, "-m", "qrl", "train", "--device", "cpu", "--model", "qrl-tiny"]
    words += [word for name, value in given.items() for word in (f"--train.{name}", value)]
    variables = os.environ | {"PYTHONPATH": str(pair.ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "The teacher is the student's own base" in done.stderr
    (run,) = mlflow.search_runs(output_format="list")
    assert (run.info.status, run.data.params["processes"]) == ("FINISHED", "2")
    assert run.data.metrics["train/loss"] == 0 and run.outputs.model_outputs  # the student is its own teacher
