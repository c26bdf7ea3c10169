"""Runs as jobs of a real Slurm on this machine: every way in which a job ends becomes a status and a reason."""

import os
import subprocess
import sys
import time
from pathlib import Path

import mlflow
import psutil
import pytest

import qrl
from qrl import names
from qrl.cluster import backend, config, jobs
from qrl.engine import device
from qrl.errors import BadInput
from tests.cluster import one_machine

pytestmark = [
    pytest.mark.slow,  # a scheduler takes seconds to start, end and requeue each job
    pytest.mark.skipif(bool(one_machine.missing()), reason=one_machine.missing() or "Slurm is here"),
]

ROOT = Path(qrl.__file__).parents[1]
PROJECT = """
name: toy
entry_points:
  main:
    parameters:
      seconds: {type: string, default: "0"}
      code: {type: string, default: "0"}
    command: "echo begun; sleep {seconds}; echo the last line; exit {code}"
  train:
    parameters:
      until: {type: string, default: "/"}
    command: "echo begun; while [ ! -e {until} ]; do sleep 0.2; done"
  evaluate:
    command: "PYTHON choose.py"
  sweep:
    command: "PYTHON study.py"
""".replace("PYTHON", sys.executable)
STUDY = """
from pathlib import Path
from qrl.study.launch import launch
from qrl.tracking import runs, signals, store

signals.guard(ends=True)
store.prepare()
with runs.step("sweep") as run:
    here = Path(__file__).parent
    launch(here, "train", {"until": str(here / "go")}, parent=run.info.run_id)
"""  # what a study does with each of its steps
CLUSTER = {"driver": "slurm", "shared": "/", "poll": 0.5, "defaults": {"partition": "cpu", "cpus": 1, "time": 10}}


@pytest.fixture
def project(slurm, store, tmp_path, monkeypatch) -> Path:
    """A project of two entry points, in a store of its own, on a cluster without jobs."""
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)
    for node in one_machine.NODES:
        slurm.run("scontrol", "update", f"nodename={node}", "state=resume")
    folder = tmp_path / "toy"
    folder.mkdir()
    (folder / "MLproject").write_text(PROJECT)
    (folder / "study.py").write_text(STUDY)
    (folder / "choose.py").write_text("from qrl.engine import device; print(device.choose('auto'))")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield folder
    print(slurm.report())  # pytest shows it of a test that failed
    for log in (Path.cwd() / ".qrl").rglob("log.txt"):
        print(log, log.read_text()[-2000:], sep="\n")
    slurm.run("scancel", "--user=root")
    until(lambda: not slurm.run("squeue", "-h").strip())


def submit(project: Path, *, entry: str = "main", options: dict | None = None, **parameters: str) -> jobs.Submitted:
    cluster = config.load(CLUSTER | {"steps": {entry: options or {}}})
    return backend.start(cluster, project, entry, parameters, "local")


def until(done, seconds: float = 600) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "it took longer than expected"
        time.sleep(0.2)


def ended(job: jobs.Submitted) -> str:
    """Wait for a job as somebody who looks now and then, and return its run's status."""
    until(lambda: jobs.settle(mlflow.get_run(job.run_id)))
    return status(job)


def start_again(slurm: one_machine.Slurm, job: jobs.Submitted) -> None:
    """Have a requeued job begin at once, not in two minutes; Slurm forgets the wish while the old try is ending."""
    until(lambda: job.driver.state(job.job_id).restarts == 1)
    time.sleep(2)  # a node revokes what was allotted in the second of the requeue, the new try's credential too

    def begins() -> bool:
        slurm.run("scontrol", "update", f"job={job.job_id}", "starttime=now")
        again = slurm.run("squeue", "--noheader", f"--jobs={job.job_id}", "--states=running")
        return bool(again.strip()) or job.driver.state(job.job_id).ended

    until(begins)


def tags(job: jobs.Submitted) -> dict[str, str]:
    return mlflow.get_run(job.run_id).data.tags


def status(job: jobs.Submitted) -> str:
    return mlflow.get_run(job.run_id).info.status


def begun(job: jobs.Submitted) -> bool:
    return job.log.is_file() and "begun" in job.log.read_text()


def artifacts(job: jobs.Submitted) -> set[str]:
    return {each.path for each in mlflow.MlflowClient().list_artifacts(job.run_id, jobs.ARTIFACTS)}


def test_a_job_ends_well_and_its_run_holds_what_ran_where(project, capfd):
    job = submit(project, options={"gpus": 1, "partition": "gpu"})
    assert job.wait()
    assert status(job) == "FINISHED" and tags(job)[jobs.STATE] == "COMPLETED"
    assert tags(job)[jobs.ID] == job.job_id and tags(job)[jobs.NODE] in one_machine.NODES
    assert artifacts(job) == {"job/job.sh", "job/cluster.json", "job/log.txt", "job/node.txt"}
    assert "--gres=gpu:1" in mlflow.artifacts.load_text(f"runs:/{job.run_id}/job/job.sh")
    assert "the last line" in mlflow.artifacts.load_text(f"runs:/{job.run_id}/job/log.txt")
    assert "the last line" in capfd.readouterr().err  # as it was waited for


@pytest.mark.skipif(device.gpus("cuda") > 0, reason="a GPU is here, so the node shows what the step asks for")
def test_a_node_that_shows_fewer_gpus_than_the_step_asks_for(project):
    job = submit(project, entry="evaluate", options={"gpus": 1, "partition": "gpu"})
    assert ended(job) == "FAILED"
    assert "cluster.yaml asks for 1 GPU, but torch sees 0 on node" in job.log.read_text()
    assert ended(submit(project, entry="evaluate")) == "FINISHED"  # without one it computes on the CPU


def test_the_log_of_a_running_job_is_in_its_run(project, tmp_path):
    job = submit(project, entry="train", until=str(tmp_path / "go"))
    until(lambda: "job/log.txt" in artifacts(job), 120)  # every half minute
    assert "begun" in mlflow.artifacts.load_text(f"runs:/{job.run_id}/job/log.txt")
    assert status(job) == "RUNNING"
    (tmp_path / "go").touch()
    assert ended(job) == "FINISHED"


def test_a_job_that_fails_leaves_its_last_line(project):
    job = submit(project, code="3")
    assert ended(job) == "FAILED" and "ended FAILED" in tags(job)[names.TAG_REASON]


def test_a_running_job_that_is_cancelled(project):
    job = submit(project, seconds="300")
    until(lambda: begun(job))
    jobs.listed(job.run_id[:8])
    assert ended(job) == "KILLED" and "CANCELLED" in tags(job)[names.TAG_REASON]


def test_a_full_queue_says_so_and_a_waiting_job_can_be_cancelled(project, slurm, capsys):
    full = [submit(project, seconds="300", options={"options": {"exclusive": True}}) for _ in one_machine.NODES]
    until(lambda: all(map(begun, full)))
    job = submit(project)
    assert status(job) == "SCHEDULED"
    assert any(job.run_id[:8] in line and "waiting" in line for line in jobs.listed())
    assert job.driver.state(job.job_id).detail in ("Resources", "Priority")
    slurm.run("scancel", job.job_id)
    jobs.settle_all("slurm:%")  # as the next command does
    assert status(job) == "KILLED" and "CANCELLED" in tags(job)[names.TAG_REASON]


def test_a_drained_node_finishes_its_job(project, slurm):
    job = submit(project, seconds="3")
    until(lambda: begun(job))
    node = tags(job)[jobs.NODE]
    slurm.run("scontrol", "update", f"nodename={node}", "state=drain", "reason=test")
    assert ended(job) == "FINISHED"


def test_a_node_that_dies_requeues_its_job(project, slurm):
    job = submit(project, seconds="4")
    until(lambda: begun(job))
    slurm.run("scontrol", "update", f"nodename={tags(job)[jobs.NODE]}", "state=down", "reason=test")
    until(lambda: job.driver.state(job.job_id).restarts == 1)
    until(lambda: not jobs.settle(mlflow.get_run(job.run_id)) and status(job) == "SCHEDULED")
    start_again(slurm, job)
    assert ended(job) == "FINISHED"
    assert tags(job)[jobs.RESTARTS] == "1" and job.log.read_text().count("begun") == 2
    assert names.TAG_REASON not in tags(job)


def test_a_node_that_dies_under_a_job_that_may_not_requeue(project, slurm):
    job = submit(project, seconds="300")
    until(lambda: begun(job))
    slurm.run("scontrol", "update", f"job={job.job_id}", "requeue=0")
    slurm.run("scontrol", "update", f"nodename={tags(job)[jobs.NODE]}", "state=down", "reason=test")
    assert ended(job) == "KILLED" and "NODE_FAIL" in tags(job)[names.TAG_REASON]


def test_a_preempted_job_starts_again(project, slurm):
    node = one_machine.NODES[0]
    job = submit(project, seconds="5", options={"options": {"nodelist": node, "exclusive": True}})
    until(lambda: begun(job))
    urgent = submit(project, options={"partition": "gpu", "options": {"nodelist": node, "exclusive": True}})
    assert ended(urgent) == "FINISHED"
    start_again(slurm, job)
    assert ended(job) == "FINISHED" and tags(job)[jobs.RESTARTS] == "1"


def test_a_preempted_job_that_may_not_requeue(project, slurm):
    node = one_machine.NODES[0]
    job = submit(project, seconds="300", options={"options": {"nodelist": node, "exclusive": True}})
    until(lambda: begun(job))
    slurm.run("scontrol", "update", f"job={job.job_id}", "requeue=0")
    urgent = submit(project, options={"partition": "gpu", "options": {"nodelist": node, "exclusive": True}})
    assert ended(job) == "KILLED" and tags(job)[jobs.STATE] == "PREEMPTED"
    assert f"ended PREEMPTED on {node}: another job took its place" in tags(job)[names.TAG_REASON]
    assert ended(urgent) == "FINISHED"


def test_a_cluster_that_refuses_the_job(project):
    with pytest.raises(BadInput, match=r"refuses the job of main .*partition"):
        submit(project, options={"partition": "nowhere"})
    (run,) = mlflow.search_runs(output_format="list")
    assert run.info.status == "FAILED" and "partition" in run.data.tags[names.TAG_REASON]


def test_a_step_that_asks_for_more_gpus_than_any_node_has(project):
    with pytest.raises(BadInput, match=r"refuses the job of main \(.*not available") as refused:
        submit(project, options={"gpus": 4, "partition": "gpu"})
    (run,) = mlflow.search_runs(output_format="list")
    assert refused.value.exit_code == 2 and run.data.tags[names.TAG_EXIT_CODE] == "2"
    assert run.info.status == "FAILED" and "not available" in run.data.tags[names.TAG_REASON]


@pytest.mark.parametrize("lost", ["folder", "script"])
def test_a_folder_that_the_node_does_not_see(project, slurm, lost):
    """One machine has one file system: the folder is gone, or empty, when the job begins."""
    job = submit(project, options={"options": {"begin": "now+60"}})
    job.log.with_name("job.sh").unlink()
    if lost == "folder":
        job.log.parent.rename(job.log.parent.with_name("moved"))
    slurm.run("scontrol", "update", f"job={job.job_id}", "starttime=now")
    assert ended(job) == "FAILED" and "`shared`" in tags(job)[names.TAG_REASON]


def test_an_artifact_store_that_the_node_cannot_reach(project, slurm):
    job = submit(project, options={"options": {"begin": "now+60"}})
    place = Path(mlflow.get_run(job.run_id).info.artifact_uri) / "job"
    place.rename(place.with_name("moved"))
    place.write_text("no folder")  # root may write into every folder
    slurm.run("scontrol", "update", f"job={job.job_id}", "starttime=now")
    assert ended(job) == "FAILED" and "cannot write the run's artifacts" in tags(job)[names.TAG_REASON]
    assert tags(job)[names.TAG_EXIT_CODE] == "2"


def test_a_job_that_slurm_has_forgotten(project):
    job = submit(project, seconds="300")
    until(lambda: begun(job))
    mlflow.MlflowClient().set_tag(job.run_id, jobs.ID, "999999")
    jobs.settle_all("slurm:%")
    assert status(job) == "KILLED" and "does not know it" in tags(job)[names.TAG_REASON]


def test_a_job_of_another_cluster_is_left_alone(project, slurm):
    job = submit(project, seconds="300")
    until(lambda: begun(job))
    client = mlflow.MlflowClient()
    client.set_tag(job.run_id, jobs.ID, "999999")
    client.set_tag(job.run_id, jobs.CLUSTER, "slurm:elsewhere")
    jobs.settle_all("slurm:%")
    assert status(job) == "RUNNING"


def test_mlflow_run_submits_and_returns(project, store, tmp_path):
    """The plugin is found as an installed package announces it."""
    (announced := tmp_path / "site" / "qrl-0.dist-info").mkdir(parents=True)
    (announced / "METADATA").write_text("Metadata-Version: 2.1\nName: qrl\nVersion: 0\n")
    (announced / "entry_points.txt").write_text("[mlflow.project_backend]\nqrl = qrl.cluster.backend:QrlBackend\n")
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{announced.parent}"}
    Path("cluster.yaml").write_text("driver: slurm\nshared: /\ndefaults: {partition: cpu, time: 0:10:00}\n")

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "mlflow", "run", str(project), "--backend", "qrl", *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    done = call("--env-manager", "local", "-P", "seconds=0")
    assert done.returncode == 0, done.stderr
    (run,) = mlflow.search_runs(output_format="list")
    assert run.data.tags["mlflow.project.backend"] == "qrl"
    step = call("-e", "train", "--env-manager", "local", "-P", f"until={tmp_path}")
    assert step.returncode == 0, step.stderr
    runs = mlflow.search_runs(output_format="list")
    assert {run.info.run_name for run in runs} == {"main", "train"}
    assert {ended(jobs.Submitted(run.info.run_id, 0.5)) for run in runs} == {"FINISHED"}
    shown = call("--backend-config", '{"dry_run": true, "file": "cluster.yaml"}')
    assert shown.returncode == 0 and "#SBATCH --time=0:10:00" in shown.stdout
    wrong = call("--backend-config", '{"driver": "slurm", "shraed": "/"}')
    assert wrong.returncode == 2 and "'shraed' is unknown" in wrong.stderr and "Traceback" not in wrong.stderr
    assert len(mlflow.search_runs(output_format="list")) == len(runs)


def step_of(study: jobs.Submitted) -> jobs.Submitted:
    """Wait for the job of a study's step."""

    def found() -> list:
        return mlflow.search_runs(filter_string=f"tags.mlflow.parentRunId = '{study.run_id}'", output_format="list")

    until(lambda: any(jobs.ID in run.data.tags for run in found()))
    (run,) = found()
    return jobs.Submitted(run.info.run_id, 0.5)


def die(job: jobs.Submitted) -> None:
    """Kill all processes of a job at one stroke, as a node dies: none learns that another has died."""
    every = psutil.process_iter(["environ"])
    own = [process for process in every if (process.info["environ"] or {}).get("SLURM_JOB_ID") == job.job_id]
    for process in own:
        process.suspend()
    for process in own:
        process.kill()


def test_a_step_of_a_study_is_a_job_that_outlives_the_studys_node(project, slurm):
    study = submit(project, entry="sweep")
    step = step_of(study)
    until(lambda: begun(step))
    die(study)
    shown = len(study.log.read_text())
    slurm.run("scontrol", "requeue", study.job_id)
    start_again(slurm, study)
    until(lambda: "begun" in study.log.read_text()[shown:])  # it shows the step's log again, as it waits for it
    (project / "go").touch()
    assert ended(study) == "FINISHED" and ended(step) == "FINISHED"
    assert step_of(study).job_id == step.job_id  # the only one


def test_a_study_that_is_cancelled_cancels_its_step(project):
    study = submit(project, entry="sweep")
    step = step_of(study)
    until(lambda: begun(step))
    study.cancel()
    assert ended(study) == "KILLED" and ended(step) == "KILLED"


def test_a_time_limit(project):
    job = submit(project, seconds="300", options={"time": 1})
    assert ended(job) == "FAILED" and "TIMEOUT" in tags(job)[names.TAG_REASON]
