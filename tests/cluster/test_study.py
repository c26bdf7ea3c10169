"""A whole study on a real Slurm, a job a step, and a training on two nodes."""

from pathlib import Path

import mlflow
import pytest

import qrl
from qrl import names
from qrl.cluster import backend, config, jobs
from tests.cluster import one_machine
from tests.cluster.test_jobs import PROJECT, die, start_again, tags, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(one_machine.missing()), reason=one_machine.missing() or "Slurm is here"),
]

ROOT = Path(qrl.__file__).parents[1]
SMALL = {
    "recipe": "tiny-lora",
    "train.steps": "30",
    "train.prompts_per_step": "2",
    "train.questions": "60",
    "train.micro_batch": "16",
    "train.save_every": "1",
    "quantize.schemes": "nf4",
    "evaluate.n": "20",
    "promote.min_gain": "-1",
    "promote.max_loss": "1",
    "yes": "true",
}
CLUSTER = {
    "driver": "slurm",
    "shared": "/",
    "poll": 1,
    "defaults": {"partition": "cpu", "time": 60, "options": {"nodelist": "n2"}},
    "steps": {"main": {"options": {"nodelist": "n1"}}, "evaluate": {"partition": "gpu"}},
}


def test_a_study_is_submitted_whole_and_survives(slurm, store, tmp_path, monkeypatch):
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)
    study = backend.start(config.load(CLUSTER), ROOT, "main", SMALL, "local")

    def step(name: str) -> mlflow.entities.Run | None:
        query = f"tags.mlflow.parentRunId = '{study.run_id}' and attributes.run_name = '{name}'"
        return next(iter(mlflow.search_runs(filter_string=query, output_format="list")), None)

    until(lambda: any(Path(".qrl").rglob("checkpoint-*")))
    train = jobs.Submitted(step("train").info.run_id, 1)
    die(study)
    (toy := tmp_path / "toy").mkdir()
    (toy / "MLproject").write_text(PROJECT)
    whole = {"partition": "gpu", "options": {"nodelist": "n2", "exclusive": True}}
    urgent = backend.start(config.load(CLUSTER | {"steps": {"main": whole}}), toy, "main", {}, "local")
    until(lambda: jobs.settle(mlflow.get_run(urgent.run_id)))  # it took the node from the training
    slurm.run("scontrol", "requeue", study.job_id)
    for job in (study, train):
        start_again(slurm, job)
    assert study.wait(), study.log.read_text()[-3000:]
    assert mlflow.get_run(study.run_id).info.status == "FINISHED" and names.TAG_REASON not in tags(study)
    assert "Resumed from the checkpoint of step" in train.log.read_text()
    steps = mlflow.search_runs(filter_string=f"tags.mlflow.parentRunId = '{study.run_id}'", output_format="list")
    expected = sorted(backend.STEPS)  # one each: none was submitted twice
    assert sorted(run.info.run_name for run in steps) == expected
    assert all(run.info.status == "FINISHED" and jobs.ID in run.data.tags for run in steps)


def test_a_training_spreads_over_two_nodes(slurm, store, monkeypatch):
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)
    whole = {"nodes": 2, "options": {"exclusive": True}}
    settings = CLUSTER | {"steps": {"train": whole}, "defaults": {"partition": "cpu", "time": 60}}
    small = {name: value for name, value in SMALL.items() if name.startswith("train.")} | {"train.steps": "2"}
    train = backend.start(config.load(settings), ROOT, "train", small, "local")
    assert train.wait(), train.log.read_text()[-3000:]
    (run,) = mlflow.search_runs(output_format="list")
    assert run.info.status == "FINISHED" and run.data.params["processes"] == "2"
    assert tags(train)[jobs.NODE] == "n[1-2]"
