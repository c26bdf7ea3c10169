"""Jobs that the controller has forgotten: slurmdbd still knows how they ended."""

import mlflow
import pytest

from qrl import names
from qrl.cluster import jobs
from tests.cluster import one_machine
from tests.cluster.test_jobs import begun, die, project, status, submit, tags, until

__all__ = ["project"]  # a fixture, used by its name

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(one_machine.missing(accounting=True)), reason=one_machine.missing(accounting=True) or "slurmdbd is here"
    ),
]


@pytest.fixture(scope="module")
def slurm():
    cluster = one_machine.Slurm(keep=2, accounting=True)
    yield cluster
    cluster.stop()


def test_jobs_that_ended_unseen_get_their_status_from_accounting(project, slurm):
    cancelled = submit(project, options={"options": {"begin": "now+600"}})
    killed, well = submit(project, seconds="300"), submit(project)
    slurm.run("scancel", cancelled.job_id)
    until(lambda: begun(killed))
    die(killed)
    until(lambda: not slurm.run("scontrol", "show", "job", "--oneliner").strip().count("JobId="))
    jobs.settle_all("slurm:%")
    assert status(cancelled) == "KILLED" and "CANCELLED" in tags(cancelled)[names.TAG_REASON]
    assert status(killed) == "FAILED" and "ended FAILED on n" in tags(killed)[names.TAG_REASON]
    assert status(well) == "FINISHED" and tags(well)[jobs.STATE] == "COMPLETED"
    assert not [run for run in mlflow.search_runs(output_format="list") if run.info.status == "RUNNING"]
