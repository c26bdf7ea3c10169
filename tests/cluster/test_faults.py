"""Faults of a node, made for real: a folder that it does not mount, daemons that were killed, a server that is down."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import mlflow
import psutil
import pytest
import requests

from qrl import names
from qrl.cluster import jobs
from qrl.cluster.driver import RUNNING
from tests.cluster import one_machine
from tests.cluster.test_jobs import ROOT, artifacts, begun, ended, project, start_again, status, submit, tags, until
from tests.tracking import team

__all__ = ["project"]  # a fixture, used by its name

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(one_machine.missing()), reason=one_machine.missing() or "Slurm is here"),
]
N1, N2 = one_machine.NODES
SMALL = {
    "recipe": "tiny-lora",
    "train.steps": "30",
    "train.prompts_per_step": "2",
    "train.questions": "60",
    "train.micro_batch": "16",
    "train.save_every": "1",
}
ON = {node: {"options": {"nodelist": node}} for node in one_machine.NODES}


@pytest.fixture(scope="module")
def slurm():
    cluster = one_machine.Slurm(patience=10)
    yield cluster
    cluster.stop()


def mounts() -> bool:
    """Return whether this machine lets a process have mounts of its own, which a container may not."""
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not mounts(), reason="no process here may mount a folder")
@pytest.mark.parametrize(
    "what",
    ["working folder", "store", *(pytest.param(what, marks=pytest.mark.long) for what in ("checkout", "project"))],
)
def test_a_folder_that_one_node_does_not_mount(what, project, slurm, tmp_path, monkeypatch):
    (work := tmp_path / "work").mkdir()
    store = Path.cwd()
    monkeypatch.chdir(work)
    folder = {"working folder": work, "checkout": ROOT, "project": project, "store": store}[what]
    slurm.start_node(N1, blind=folder)
    try:
        job = submit(project, options=ON[N1])
        assert ended(job) == "FAILED"
        reason = tags(job)[names.TAG_REASON]
        assert f"on {N1}" in reason and str(folder) in reason and "`shared`" in reason
        again = submit(project, options=ON[N2])
        assert ended(again) == "FINISHED"
    finally:
        slurm.start_node(N1)
    assert {"job/job.sh", "job/cluster.json"} <= artifacts(job) and status(job) == "FAILED"


@contextlib.contextmanager
def without(slurm: one_machine.Slurm, node: str) -> Iterator[None]:
    """Have a node's daemons killed in the block; its jobs' own processes live on, unless something ends them."""
    slurm.crash(node)
    try:
        yield
    finally:
        slurm.start_node(node)


def alive(job: jobs.Submitted) -> list[psutil.Process]:
    """Return the processes of a job."""
    every = psutil.process_iter(["environ"])
    return [each for each in every if (each.info["environ"] or {}).get("SLURM_JOB_ID") == job.job_id]


def test_killed_daemons_end_a_job_that_may_not_requeue(project, slurm):
    job = submit(project, entry="train", options=ON[N1], until=str(project / "never"))
    until(lambda: begun(job))
    slurm.run("scontrol", "update", f"job={job.job_id}", "requeue=0")
    with without(slurm, N1):
        until(lambda: not alive(job), 60)
        assert job.driver.state(job.job_id).word == RUNNING  # Slurm does not know yet
        assert ended(job) == "KILLED"
    assert f"ended NODE_FAIL on {N1}: its node failed" in tags(job)[names.TAG_REASON]
    assert "begun" in mlflow.artifacts.load_text(f"runs:/{job.run_id}/job/log.txt")


def test_a_training_under_killed_daemons_goes_on_at_the_other_node(project, slurm):
    train = submit(ROOT, entry="train", **SMALL)
    until(lambda: any(Path(".qrl").rglob("checkpoint-*")))
    node = tags(train)[jobs.NODE]
    with without(slurm, node):
        until(lambda: not alive(train), 60)
        until(lambda: not jobs.settle(mlflow.get_run(train.run_id)) and status(train) == "SCHEDULED")
        start_again(slurm, train)
        assert ended(train) == "FINISHED", train.log.read_text()[-3000:]
    assert tags(train)[jobs.RESTARTS] == "1" and tags(train)[jobs.NODE] not in ("", node)
    assert "Resumed from the checkpoint of step" in train.log.read_text()
    assert names.TAG_REASON not in tags(train)


@contextlib.contextmanager
def server(folder: Path, port: int) -> Iterator[None]:
    """Run MLflow's tracking server, which also serves artifacts; it ends with the block."""
    command = [sys.executable, "-m", "mlflow", "server", "--host", "0.0.0.0", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", str(folder / "kept")]
    variables = os.environ | team.SAFE
    variables.pop("MLFLOW_TRACKING_URI")
    with (folder / "server.log").open("a") as log:
        how = {"stdout": log, "stderr": log, "start_new_session": True}
        process = subprocess.Popen([*command, "--allowed-hosts", "*"], env=variables, **how)
    try:
        until(lambda: answers(port), 120)
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answers(port: int) -> bool:
    try:
        return requests.get(f"http://{socket.gethostname()}:{port}/health", timeout=5).ok
    except requests.RequestException:
        return False


def test_a_tracking_server_that_is_down_when_a_job_begins(project, slurm, tmp_path, monkeypatch):
    (folder := tmp_path / "server").mkdir()
    (port,) = one_machine.ports(1)
    address = f"http://{socket.gethostname()}:{port}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    mlflow.set_tracking_uri(address)
    with server(folder, port):
        job = submit(project, options={"options": {"begin": "now+600"}})
    slurm.run("scontrol", "update", f"job={job.job_id}", "starttime=now")
    until(lambda: job.driver.state(job.job_id).ended, 120)  # MLflow's client alone would try for eight minutes
    with server(folder, port):
        assert ended(job) == "FAILED" and artifacts(job) == {"job/job.sh", "job/cluster.json", "job/log.txt"}
        reason = tags(job)[names.TAG_REASON]
        assert f"The store {address} does not answer" in reason and "Traceback" not in job.log.read_text()
        assert ended(submit(project)) == "FINISHED"
