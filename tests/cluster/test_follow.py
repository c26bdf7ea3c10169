"""A study that waits for its steps' jobs, with a cluster that says what a test tells it to."""

import signal

import mlflow
import pytest
from mlflow.exceptions import ExecutionException

from qrl import names, process
from qrl.cluster import config, driver, jobs
from qrl.errors import BadInput
from qrl.tracking import contents, projects, runs, signals


class Scripted:
    """A driver whose answers are given beforehand; the last one stays."""

    states: list = []  # noqa: RUF012
    submitted: list = []  # noqa: RUF012
    cancelled: list = []  # noqa: RUF012

    def name(self) -> str:
        return "test"

    def script(self, job) -> str:
        return "#!/bin/sh\n"

    def submit(self, job) -> str:
        self.submitted.append(job.run_id)
        return str(len(self.submitted))

    def state(self, job_id: str):
        answer = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def cancel(self, job_id: str) -> None:
        self.cancelled.append(job_id)


WAITS, RUNS = driver.State(driver.WAITING, detail="Resources"), driver.State(driver.RUNNING, "n1")


@pytest.fixture
def scripted(store, monkeypatch):
    for kept in (Scripted.states, Scripted.submitted, Scripted.cancelled):
        kept.clear()
    monkeypatch.setitem(jobs.DRIVERS, "slurm", Scripted)
    return Scripted


def opened() -> tuple[config.Cluster, str, str]:
    """Return a cluster, and the ids of a study's run and of its step's."""
    parent = mlflow.MlflowClient().create_run("0").info.run_id
    cluster = config.load({"driver": "slurm", "shared": "/", "poll": 0.01})
    return cluster, parent, projects.open_child(parent, "train")


def test_a_study_that_comes_back_waits_for_the_step_that_it_had_submitted(scripted, capsys):
    cluster, parent, run_id = opened()
    scripted.states[:] = [WAITS, RUNS, SystemError("the study's node dies")]
    with pytest.raises(SystemError):
        jobs.run(cluster, process.ROOT, "train", {"seed": "1"}, run_id)
    assert "job 1 waits: Resources" in capsys.readouterr().err
    scripted.states[:] = [RUNS]
    assert jobs.adopted(parent, "train", {"seed": "2"}) is None
    assert jobs.adopted(parent, "train", {"seed": "1"}) == run_id
    scripted.states[:] = [RUNS, driver.State(driver.COMPLETED, "n1")]
    jobs.run(cluster, process.ROOT, "train", {"seed": "1"}, run_id)
    assert scripted.submitted == [run_id]
    assert jobs.adopted(parent, "train", {"seed": "1"}) is None  # it has ended


def test_a_study_that_is_stopped_cancels_the_step(scripted):
    cluster, _, run_id = opened()
    scripted.states[:] = [RUNS, KeyboardInterrupt(), driver.State("CANCELLED", "n1")]
    with pytest.raises(KeyboardInterrupt):
        jobs.run(cluster, process.ROOT, "train", {}, run_id)
    assert scripted.cancelled == ["1"] and mlflow.get_run(run_id).info.status == "KILLED"


def test_a_study_that_is_stopped_while_the_store_fails_is_stopped(scripted, monkeypatch, capsys):
    cluster, _, run_id = opened()
    scripted.states[:] = [RUNS, KeyboardInterrupt()]

    def locked(*_, **__):
        raise mlflow.MlflowException("database is locked")

    with monkeypatch.context() as failing, pytest.raises(KeyboardInterrupt):
        failing.setattr(scripted, "cancel", locked)
        jobs.run(cluster, process.ROOT, "train", {}, run_id)
    assert "Job 1 may still run: database is locked" in capsys.readouterr().err
    with monkeypatch.context() as failing:
        failing.setattr(mlflow.MlflowClient, "set_terminated", locked)
        assert not projects.mark_stopped(run_id, KeyboardInterrupt())
    assert f"Run {run_id} was not told that it was stopped: database is locked" in capsys.readouterr().err
    projects.mark_stopped(run_id, KeyboardInterrupt())
    assert mlflow.get_run(run_id).info.status == "KILLED"


@pytest.mark.parametrize(
    ("word", "status"),
    [("OUT_OF_MEMORY", "FAILED"), ("BOOT_FAIL", "KILLED"), ("DEADLINE", "FAILED"), ("PREEMPTED", "KILLED")],
)
def test_how_a_job_ends_is_how_its_run_ends(scripted, word, status):
    cluster, _, run_id = opened()
    cell = projects.open_child(run_id, "grpo · nf4")  # of an evaluation whose process is dead
    scripted.states[:] = [driver.State(word, "n1", "0:9")]
    with pytest.raises(ExecutionException):
        jobs.run(cluster, process.ROOT, "train", {}, run_id)
    reason, code = projects.failure(run_id)
    assert f"Job 1 ended {word} on n1" in reason and code > 128  # so that the study says it
    assert mlflow.get_run(run_id).info.status == status and mlflow.get_run(cell).info.status == "KILLED"


def test_the_cluster_says_why_it_stopped_a_process(scripted, monkeypatch):
    """A node that lost touch ends its processes after the cluster has given them up, so that they write last."""
    cluster, _, run_id = opened()
    jobs.submit(jobs.prepared(cluster, process.ROOT, "train", {}, run_id))
    projects.mark_stopped(run_id, KeyboardInterrupt())
    run = mlflow.get_run(run_id)
    assert run.info.status == "KILLED" and names.TAG_REASON not in run.data.tags
    assert jobs.settle(run, driver.State("NODE_FAIL", "n1"))
    monkeypatch.setenv("MLFLOW_RUN_ID", run_id)
    with pytest.raises(SystemExit), runs.step("train"):
        raise signals.Stopped(signal.SIGTERM)
    run = mlflow.get_run(run_id)
    assert run.info.status == "KILLED" and "ended NODE_FAIL on n1" in run.data.tags[names.TAG_REASON]


def test_a_step_that_reported_keeps_its_reason(scripted):
    _, _, run_id = opened()
    contents.tag_run(run_id, {names.TAG_REASON: "The prompt is too long.", names.TAG_EXIT_CODE: "2"})
    mlflow.MlflowClient().set_terminated(run_id, "FAILED")
    contents.tag_run(run_id, {jobs.ID: "1", jobs.CLUSTER: "slurm:test", jobs.LOG: "/nowhere"})
    scripted.states[:] = [driver.State("FAILED", "n1", "2:0")]
    assert jobs.settle(mlflow.get_run(run_id))
    assert projects.failure(run_id) == ("The prompt is too long.", 2)


@pytest.mark.parametrize("left", ["KILLED", "RUNNING"], ids=["ended its run", "killed outright"])
def test_a_run_that_was_killed_and_requeued_waits_again(scripted, left):
    _, _, run_id = opened()
    contents.tag_run(run_id, {jobs.ID: "1", jobs.CLUSTER: "slurm:test", jobs.LOG: "/nowhere"})
    mlflow.MlflowClient().update_run(run_id, status=left)
    scripted.states[:] = [driver.State(driver.WAITING, restarts=1)]
    assert not jobs.settle(mlflow.get_run(run_id))
    assert mlflow.get_run(run_id).info.status == "SCHEDULED"


def test_a_cluster_that_gives_no_answer_changes_nothing(scripted):
    cluster, _, run_id = opened()
    scripted.states[:] = [None]
    submitted = jobs.submit(jobs.prepared(cluster, process.ROOT, "train", {}, run_id))
    assert submitted.get_status() == "SCHEDULED"


@pytest.mark.parametrize(
    "cluster_name", ["slurm:elsewhere", "skypilot:test"], ids=["another cluster", "a driver that is gone"]
)
def test_a_job_of_another_cluster_is_left_alone(scripted, cluster_name):
    cluster, _, run_id = opened()
    scripted.states[:] = [driver.State(driver.VANISHED)]
    jobs.submit(jobs.prepared(cluster, process.ROOT, "train", {}, run_id))
    mlflow.MlflowClient().set_tag(run_id, jobs.CLUSTER, cluster_name)
    assert jobs.settle_all() == [] and mlflow.get_run(run_id).info.status == "SCHEDULED"
    with pytest.raises(BadInput, match=f"is a job of {cluster_name}, which this machine does not ask"):
        jobs.listed(cancel=run_id)
    assert len(jobs.listed()) == 1 and scripted.cancelled == []
    mlflow.MlflowClient().set_tag(run_id, jobs.CLUSTER, "slurm:test")
    assert jobs.settle_all() == [run_id] and mlflow.get_run(run_id).info.status == "KILLED"
    assert "VANISHED: the cluster does not know it any more" in projects.failure(run_id)[0]
