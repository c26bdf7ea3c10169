"""A step as a managed job of SkyPilot, by a program that answers as `sky` 0.12.3 does: no cloud was at hand."""

import json
import os
import socket
import sys
from pathlib import Path

import mlflow
import pytest

from qrl import names, process
from qrl.cluster import config, driver, jobs
from qrl.cluster.skypilot import SkyPilot
from qrl.errors import BadInput
from qrl.tracking import projects

SKY = """#!{python}
import json, pathlib, sys

place = pathlib.Path({place!r})
with (place / "calls").open("a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
if sys.argv[1:3] == ["api", "info"]:
    sys.exit(print((place / "info").read_text()))
answers = json.loads((place / "answers").read_text())
if sys.argv[2] == "launch":
    print("\\x1b[0m⚙︎ Job submitted, ID: 7" if answers else "")
    sys.exit(None if answers else "sky.exceptions: the cluster was refused\\nNo cloud is enabled.")
if sys.argv[2] == "queue":
    answer = answers[0]
    (place / "answers").write_text(json.dumps(answers[1:] or answers))
    if answer == "down":
        sys.exit("the API server does not answer")
    for row in answer if isinstance(answer, list) else ():
        if "--verbose" not in sys.argv:
            row.update(region=None, failure_reason=None)
    print(f"Checking managed jobs\\n{{json.dumps(answer, indent=2)}}" if answer != "garbage" else "[[")
"""


class Fake:
    """The program `sky` of a test: what it answers next, and how it was called."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def answer(self, *rows: object) -> None:
        """Set what the queue shows at each question; the last stays. Nothing: a launch is refused."""
        (self.place / "answers").write_text(json.dumps(rows))

    def calls(self, command: str) -> list[list[str]]:
        lines = (self.place / "calls").read_text().splitlines()
        return [words for words in map(json.loads, lines) if words[1] == command]


@pytest.fixture
def sky(store, tmp_path, monkeypatch) -> Fake:
    place = tmp_path / "bin"
    place.mkdir()
    program = place / "sky"
    program.write_text(SKY.format(python=sys.executable, place=str(place)))
    program.chmod(0o755)
    (place / "info").write_text(json.dumps({"server": {"url": "http://127.0.0.1:46580"}, "user": "lab"}))
    monkeypatch.setenv("PATH", f"{place}:{os.environ['PATH']}")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "pass-8251")
    return Fake(place)


def row(status: str, **more: object) -> list[dict]:
    """Return the queue with the job of the test, among others'."""
    return [{"job_id": 6, "status": "FAILED"}, {"job_id": 7, "status": status, "region": None, **more}]


def made(**parameters: str) -> driver.Job:
    settings = {"driver": "skypilot", "poll": 0.01, "steps": {"train": {"gpus": 1, "gpu": "H100"}}}
    run_id = mlflow.MlflowClient().create_run("0").info.run_id
    return driver.Job("train", process.ROOT, parameters, run_id, Path.cwd() / "job", config.load(settings))


def test_a_step_is_launched_waited_for_and_ends_its_run(sky, capsys):
    there = {"region": "us-east-1", "recovery_count": 1}
    sky.answer(row("PENDING"), row("STARTING"), "down", row("RUNNING", **there), row("SUCCEEDED", **there))
    job = made(model="a b")
    assert jobs.submit(job).wait()
    (launched,) = sky.calls("launch")
    assert launched[-1] == str(job.script) and {"--yes", "--detach-run"} <= set(launched)
    assert launched[launched.index("--secret") + 1] == "MLFLOW_TRACKING_PASSWORD"
    assert "8251" not in (sky.place / "calls").read_text() + job.script.read_text()
    run = mlflow.get_run(job.run_id)
    assert (run.info.status, run.data.tags[jobs.ID], run.data.tags[jobs.NODE]) == ("FINISHED", "7", "us-east-1")
    assert run.data.tags[jobs.RESTARTS] == "1" and "job 7 waits: pending" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "status", "reason"),
    [
        (row("FAILED", failure_reason="exit code 1."), "FAILED", "FAILED: exit code 1; `sky jobs logs 7` shows"),
        (row("FAILED_NO_RESOURCE", failure_reason="no H100"), "FAILED", "FAILED_NO_RESOURCE: no H100; `sky jobs logs"),
        (row("FAILED_CONTROLLER"), "FAILED", "FAILED_CONTROLLER: SkyPilot gives no reason; "),
        (row("CANCELLED", region="k8s"), "KILLED", "CANCELLED on k8s: it was cancelled: submit it again"),
        ([], "KILLED", "VANISHED: the cluster does not know it any more"),
    ],
)
def test_how_a_managed_job_ends_is_how_its_run_ends(sky, answer, status, reason):
    sky.answer(row("RUNNING"), answer)
    job = made()
    assert not jobs.submit(job).wait()
    assert mlflow.get_run(job.run_id).info.status == status
    assert f"Job 7 ended {reason}" in projects.failure(job.run_id)[0]


@pytest.mark.parametrize("answer", ["down", "garbage", row(None)], ids=["down", "garbage", "no status"])
def test_a_controller_that_gives_no_answer_changes_nothing(sky, answer):
    sky.answer(answer)
    job = made()
    submitted = jobs.submit(job)
    assert SkyPilot().state("7") is None and submitted.get_status() == "SCHEDULED"


def test_a_job_is_cancelled_by_its_number(sky):
    sky.answer(row("RUNNING"), row("CANCELLED"))
    job = made()
    submitted = jobs.submit(job)
    assert submitted.get_status() == "SCHEDULED"
    submitted.cancel()
    assert sky.calls("cancel") == [["jobs", "cancel", "--yes", "7"]]
    assert all("--all-users" in words for words in sky.calls("queue"))
    assert mlflow.get_run(job.run_id).info.status == "KILLED"


def test_a_launch_that_is_refused_is_a_sentence_in_the_run(sky):
    sky.answer()
    job = made()
    with pytest.raises(BadInput, match=r"SkyPilot refuses the job of train \(No cloud is enabled\.\): correct"):
        jobs.submit(job)
    run = mlflow.get_run(job.run_id)
    assert run.info.status == "FAILED" and "No cloud is enabled" in run.data.tags[names.TAG_REASON]


@pytest.mark.parametrize(
    ("info", "name"),
    [
        ({"server": {"url": "http://127.0.0.1:46580"}, "user": "lab"}, socket.gethostname()),
        ({"server": {"url": "https://sky.lab.org/api"}, "user": "lab"}, "sky.lab.org"),
        ("No SkyPilot API server is connected", ""),
    ],
)
def test_which_list_of_jobs_this_machine_asks(sky, info, name):
    (sky.place / "info").write_text(info if isinstance(info, str) else json.dumps(info))
    assert SkyPilot().name() == name


def test_a_job_of_another_api_server_is_left_alone(sky):
    sky.answer([])  # so the job would count as vanished
    job = made()
    jobs.submit(job)
    mlflow.MlflowClient().set_tag(job.run_id, jobs.CLUSTER, "skypilot:elsewhere")
    assert jobs.settle_all() == [] and mlflow.get_run(job.run_id).info.status == "SCHEDULED"
    with pytest.raises(BadInput, match="is a job of skypilot:elsewhere, which this machine does not ask"):
        jobs.listed(cancel=job.run_id)
    assert sky.calls("cancel") == []
    mlflow.MlflowClient().set_tag(job.run_id, jobs.CLUSTER, f"skypilot:{SkyPilot().name()}")
    assert jobs.settle_all() == [job.run_id] and mlflow.get_run(job.run_id).info.status == "KILLED"


def test_a_machine_without_sky_says_so(store, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BadInput, match="`sky` is not installed here"):
        SkyPilot().cancel("7")
