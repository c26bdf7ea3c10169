"""Submissions that sbatch does not end in time: Slurm's queue is full, or its answer is late."""

import os
import shutil
from pathlib import Path

import mlflow
import pytest

from qrl import names
from qrl.cluster import driver, jobs
from qrl.cluster import slurm as driven
from qrl.errors import BadInput
from tests.cluster import one_machine
from tests.cluster.test_jobs import ended, project, submit, tags, until

__all__ = ["project"]  # a fixture, used by its name

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(one_machine.missing()), reason=one_machine.missing() or "Slurm is here"),
]
LATER = {"options": {"begin": "now+600"}}


@pytest.fixture(scope="module")
def slurm():
    cluster = one_machine.Slurm(keep=2, most=3)
    yield cluster
    cluster.stop()


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    monkeypatch.setattr(driven, "_SUBMIT_S", 5)


@pytest.fixture
def sbatch(project, tmp_path, monkeypatch):
    """Return a function that puts lines of shell before or after the real sbatch, whose path is $sbatch."""

    def replaced(lines: str) -> None:
        (folder := tmp_path / "bin").mkdir()
        program = folder / "sbatch"
        program.write_text(f"#!/bin/sh\nsbatch={shutil.which('sbatch')}\n{lines}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    return replaced


def newest() -> mlflow.entities.Run:
    return mlflow.search_runs(output_format="list", max_results=1)[0]


def test_a_queue_without_room_is_a_sentence(project, slurm):
    waiting = [submit(project, options=LATER) for _ in range(2)]
    with pytest.raises(BadInput, match=r"takes no more jobs now, .* of main: .*MaxJobCount.* Submit again when"):
        submit(project)
    run = newest()
    assert run.info.status == "FAILED" and run.data.tags[names.TAG_EXIT_CODE] == "2"
    assert "takes no more jobs" in run.data.tags[names.TAG_REASON] and jobs.ID not in run.data.tags
    assert len(slurm.run("squeue", "--noheader").splitlines()) == 2
    for job in waiting:
        slurm.run("scancel", job.job_id)
    until(lambda: "JobId=" not in slurm.run("scontrol", "show", "job", "--oneliner"))  # until then they count
    assert ended(submit(project)) == "FINISHED"


@pytest.mark.parametrize(
    "last",
    [
        pytest.param("exec sleep 60", marks=pytest.mark.long),
        "echo 'Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1",
    ],
)
def test_a_job_that_slurm_took_although_sbatch_did_not_say_so_is_kept(last, project, sbatch, monkeypatch):
    monkeypatch.setattr(driven, "_SUBMIT_S", 10)  # on a busy machine the real sbatch can take more than five
    sbatch(f'"$sbatch" "$@" >&2; {last}')
    job = submit(project, options={"options": {"begin": "now+20"}})  # this Slurm forgets a job 2 s after its end
    assert int(job.job_id) and tags(job)[jobs.ID] == job.job_id
    assert ended(job) == "FINISHED"


def test_a_job_that_slurm_takes_after_sbatch_was_given_up_does_nothing(project, sbatch):
    sbatch('(sleep 8; exec "$sbatch" "$@") >/dev/null 2>&1 & exec sleep 60')
    with pytest.raises(driver.Unanswered, match="has not answered for 5 s"):
        submit(project)
    run = newest()
    log = Path.cwd() / ".qrl" / "jobs" / run.info.run_id / driver.LOG_FILE
    until(lambda: log.is_file() and "its job does nothing: submit it again" in log.read_text(), 60)
    after = mlflow.get_run(run.info.run_id)
    assert after.info.status == "FAILED" and after.data.tags[names.TAG_REASON] == run.data.tags[names.TAG_REASON]
    assert "begun" not in log.read_text()
