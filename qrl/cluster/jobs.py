"""Runs that are jobs: submitted under a run of their own, followed, cancelled, and given their end if the job died.

A run is told by its tags which job it is. Its own process ends it, as everywhere. If that process was killed (a time
limit, a dead node, scancel), whoever looks next gives the run its status and its reason: the process that waits for
the job, `qrl jobs`, or the next command on the store from a machine that can ask the cluster.
"""

import hashlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import mlflow
from mlflow.entities import Run
from mlflow.exceptions import ExecutionException
from mlflow.projects.submitted_run import SubmittedRun

from qrl import names, process
from qrl.cluster.config import Cluster
from qrl.cluster.driver import COMPLETED, LOG_FILE, RUNNING, SETTINGS, VANISHED, WAITING, Driver, Job, State
from qrl.cluster.skypilot import SkyPilot
from qrl.cluster.slurm import Slurm
from qrl.errors import BadInput, QrlError, first_line
from qrl.tracking import contents, dead_runs, runs, store, store_errors
from qrl.workspace import WORK, written_whole

DRIVERS: dict[str, type[Driver]] = {"slurm": Slurm, "skypilot": SkyPilot}
ID = dead_runs.TAG_JOB  # tags of a run that is a job: its number; which cluster counts so; how it stands, where
CLUSTER, STATE, NODE, RESTARTS, LOG, WORK_TAG = (
    f"qrl.job.{word}" for word in ("cluster", "state", "node", "restarts", "log", "work")
)
_REFUSED = "REFUSED"  # the state of a job that was not submitted
MANAGER = "mlflow.project.env"
ARTIFACTS = "job"  # folder of the script, the cluster's settings and the log
_OPEN = f"tags.`{STATE}` LIKE '%ing' and tags.`{ID}` != ''"  # waiting, running
_EVERY_S = 30  # the log goes to the store
_KILLED = 137  # exit code in the run of a job that left none
_REASONS = {  # state → what happened, and what to do
    "TIMEOUT": "its time limit passed: raise `time` in cluster.yaml, and submit again",
    "DEADLINE": "its deadline passed: submit it earlier",
    "OUT_OF_MEMORY": "it used more memory than it had asked for: raise `memory` in cluster.yaml, and submit again",
    "CANCELLED": "it was cancelled: submit it again to resume",
    "PREEMPTED": "another job took its place: submit it again to resume",
    "NODE_FAIL": "its node failed: submit it again to resume",
    "BOOT_FAIL": "its node did not start: submit it again",
    VANISHED: "the cluster does not know it any more, and it left no report: submit it again to resume",
}
_BY_ITSELF = ("FAILED", "TIMEOUT", "DEADLINE", "OUT_OF_MEMORY")  # runs FAILED; all others were KILLED


class Submitted(SubmittedRun):
    """A job that was submitted, as MLflow waits for it and cancels it."""

    run_id = ""

    def __init__(self, run_id: str, poll: float) -> None:
        tags = mlflow.get_run(run_id).data.tags
        self.run_id, self.poll, self.job_id, self.log = run_id, poll, tags[ID], Path(tags[LOG])
        self.driver = _driver(tags)

    def wait(self) -> bool:
        """Print the log as it grows until the job has ended; return whether it went well."""
        seen, place = None, 0
        while True:
            state = self.driver.state(self.job_id)
            with suppress(OSError), self.log.open("rb") as file:  # not there yet, or on another machine
                file.seek(place)
                sys.stderr.write(file.read().decode(errors="replace"))
                place = file.tell()
            if state and state.word == WAITING and state != seen:
                print(f"      job {self.job_id} waits: {state.detail}", file=sys.stderr)
            if state and settle(mlflow.get_run(self.run_id), state):
                return state.word == COMPLETED or (state.word == VANISHED and self.get_status() == "FINISHED")
            seen = state
            time.sleep(self.poll)

    def get_status(self) -> str:
        """Return the run's status, after a question to the cluster."""
        settle(mlflow.get_run(self.run_id))
        return mlflow.get_run(self.run_id).info.status

    def cancel(self) -> None:
        """Cancel the job, and end its run if it had not begun."""
        self.driver.cancel(self.job_id)
        settle(mlflow.get_run(self.run_id))


def prepared(cluster: Cluster, folder: Path, entry: str, parameters: dict[str, str], run_id: str = "") -> Job:
    """Return a job, after a check that its nodes can reach what it needs; without a run, it is only to be shown.

    Raises:
        BadInput: the checkout, the working folder or the store is out of their reach.
    """
    store_address = mlflow.get_tracking_uri()
    address, database = urlsplit(store_address), store.database_of(store_address)
    if cluster.shared:
        seen = {"checkout": process.ROOT, "project": folder, "working folder": Path.cwd()}
        for what, path in (seen | ({"store": database.parent} if database else {})).items():
            if not path.resolve().is_relative_to(cluster.shared.resolve()):
                raise BadInput(
                    f"The nodes cannot see the {what} {path}: move it below the shared folder {cluster.shared}."
                )
    if address.hostname in ("localhost", "127.0.0.1", "::1"):
        raise BadInput(
            f"The nodes cannot reach the store {store_address}: give the server's name, not {address.hostname}."
        )
    if cluster.driver == "skypilot" and database:
        raise BadInput(f"SkyPilot's nodes cannot see the store {store_address}: set MLFLOW_TRACKING_URI to a server.")
    several = cluster.resources(entry).nodes
    if several > 1 and folder.resolve() != process.ROOT and not cluster.python:
        raise BadInput(
            f"A training on {several} nodes runs in an environment that is there already: set `python` in cluster.yaml "
            f"to the Python of the environment of {folder}."
        )
    return Job(entry, folder, parameters, run_id, Path.cwd() / WORK / "jobs" / (run_id or "RUN"), cluster)


def submit(job: Job) -> Submitted:
    """Submit a job whose run is open; the script, the settings and the job's number go into the run.

    Raises:
        BadInput: the cluster refuses it; the run is FAILED, with the sentence.
    """
    client, driver = mlflow.MlflowClient(), DRIVERS[job.cluster.driver]()
    try:
        files = {job.script: driver.script(job), job.place / SETTINGS: job.cluster.model_dump_json(indent=1)}
        for path, text in files.items():
            with written_whole(path) as file:
                file.write_text(text)
            client.log_artifact(job.run_id, str(path), ARTIFACTS)
        about = {CLUSTER: f"{job.cluster.driver}:{driver.name()}", LOG: str(job.log)}
        contents.tag_run(job.run_id, about | {STATE: WAITING, WORK_TAG: _work(job.entry, job.parameters)})
        client.update_run(job.run_id, status="SCHEDULED")  # before the job can begin
        number = driver.submit(job)
    except Exception as failure:
        error = store_errors.explain(failure) or QrlError(
            f"The job of {job.entry} was not submitted: {first_line(failure)}"
        )
        refusal = {STATE: _REFUSED, names.TAG_REASON: str(error), names.TAG_EXIT_CODE: str(error.exit_code)}
        contents.tag_run(job.run_id, refusal)
        client.set_terminated(job.run_id, "FAILED")
        raise error from None
    contents.tag_run(job.run_id, {ID: number})
    print(
        f"      {job.entry} is job {number} of {about[CLUSTER]}, run {job.run_id[:8]}; log: {job.log}", file=sys.stderr
    )
    return Submitted(job.run_id, job.cluster.poll)


def run(cluster: Cluster, folder: Path, entry: str, parameters: dict[str, str], run_id: str) -> None:
    """Submit a step of a study unless its run is a job already, and wait for it, as `mlflow.projects.run` does.

    Raises:
        ExecutionException: the job failed; its run says why.
    """
    if ID in mlflow.get_run(run_id).data.tags:
        job = Submitted(run_id, cluster.poll)
    else:
        job = submit(prepared(cluster, folder, entry, parameters, run_id))
    try:
        done = job.wait()
    except KeyboardInterrupt:
        try:
            job.cancel()
        except Exception as failure:  # the stop goes on
            print(f"Job {job.job_id} may still run: {first_line(failure)}; see `qrl jobs`.", file=sys.stderr)
        raise
    if not done:
        raise ExecutionException(f"Job {job.job_id} failed.")


def adopted(parent: str, entry: str, parameters: dict[str, str]) -> str | None:
    """Return the run of a step that a former process of the study submitted, and that still waits or runs."""
    below = f"{_OPEN} and tags.`{WORK_TAG}` = '{_work(entry, parameters)}' and tags.`{runs.PARENT}` = '{parent}'"
    return next((run.info.run_id for run in _found(below) if not settle(run)), None)


def settle(run: Run, state: State | None = None) -> bool:
    """Tag a run with its job's state; if the job ended without a report, give the run its status and reason.

    Args:
        run: of a job.
        state: as the cluster has just told; None asks it.

    Returns:
        Whether the job has ended.
    """
    tags, run_id = run.data.tags, run.info.run_id
    state = state or _driver(tags).state(tags[ID])
    if state is None:
        return False
    known = {STATE: state.word, NODE: state.node or tags.get(NODE, ""), RESTARTS: str(state.restarts)}
    contents.tag_run(run_id, {key: text for key, text in known.items() if tags.get(key, "") != text})
    is_open = run.info.status in ("RUNNING", "SCHEDULED")
    if not state.ended:
        # A process that was killed outright leaves its run RUNNING while the job waits in the queue again.
        if state.word == WAITING and state.restarts and run.info.status != "SCHEDULED":
            mlflow.MlflowClient().update_run(run_id, status="SCHEDULED")
        return False
    _log(run_id, Path(tags[LOG]))
    if state.word == COMPLETED:
        if is_open:
            mlflow.MlflowClient().set_terminated(run_id, "FINISHED")
        return True
    reported = run.info.status == "FINISHED" or int(tags.get(names.TAG_EXIT_CODE, _KILLED)) <= 128  # not by a signal
    if is_open or not reported:
        why = state.why or _REASONS.get(state.word) or f"{_last(Path(tags[LOG]))} (exit code {state.detail})"
        where = f" on {known[NODE]}" if known[NODE] else ""
        reason = f"Job {tags[ID]} ended {state.word}{where}: {why}."
        status = "FAILED" if state.word in _BY_ITSELF or state.why else "KILLED"
        for cell in contents.find_runs(f"tags.`{runs.PARENT}` = '{run_id}'"):
            if ID not in cell.data.tags:  # a study's steps are jobs of their own
                dead_runs.end_run(cell.info, reason)
        dead_runs.end_run(run.info, reason, status)
        contents.tag_run(run_id, {names.TAG_EXIT_CODE: str(_KILLED)})
    return True


def settle_all(clusters: str = "%") -> list[str]:
    """Settle the jobs that the store takes for open, if their cluster can be asked here; return those that ended.

    Args:
        clusters: driver and name, `%` for any.
    """
    found = _found(f"{_OPEN} and tags.`{CLUSTER}` LIKE '{clusters}'")
    here = {name: _is_here(name) for name in {run.data.tags[CLUSTER] for run in found}}
    return [run.info.run_id for run in found if here[run.data.tags[CLUSTER]] and settle(run)]


def listed(cancel: str | None = None, *, every: bool = False) -> list[str]:
    """Settle the jobs of the store, cancel one if wanted, and return a line for each that waits or runs, or for all.

    Raises:
        BadInput: no waiting or running job has the run `cancel`, several begin like it, or another cluster has it.
    """
    settle_all()
    if cancel:
        chosen = [run for run in _found(_OPEN) if run.info.run_id.startswith(cancel)]
        if len(chosen) != 1:
            count = f"{len(chosen)} waiting or running jobs have" if chosen else "no waiting or running job has"
            raise BadInput(f"'{cancel}' names no single job: {count} such a run. `qrl jobs` lists them.")
        if not _is_here(cluster := chosen[0].data.tags[CLUSTER]):
            where = "which this machine does not ask: run this where it was submitted"
            raise BadInput(f"Run {chosen[0].info.run_id[:8]} is a job of {cluster}, {where}.")
        below = _found(f"{_OPEN} and tags.`{runs.PARENT}` = '{chosen[0].info.run_id}'")
        for run in (*chosen, *below):  # the study first, lest it submit more
            Submitted(run.info.run_id, 1).cancel()
    shown = []
    for run in _found(f"tags.`{ID}` != ''" if every else _OPEN):
        tags = run.data.tags
        state = f"{tags[STATE]}{f' on {tags[NODE]}' if tags.get(NODE) else ''}"
        name = f"{run.info.run_id[:8]}  {run.info.run_name:<10}  job {tags[ID]:<8}"
        shown.append(f"{name} {state:<20} {tags.get(names.TAG_REASON, '')}".rstrip())
    return shown or ["No job of this store waits or runs."]


@contextmanager
def begun(run_id: str, place: Path) -> Iterator[None]:
    """Note on which node a job begins, and send its log to the store as it grows.

    Raises:
        BadInput: the node cannot write the run's artifacts; or the job was reported as not submitted.
    """
    client, node = mlflow.MlflowClient(), os.environ.get("SLURMD_NODENAME", socket.gethostname())
    known = mlflow.get_run(run_id).data.tags
    if known.get(STATE) == _REFUSED:  # the cluster took it after it had been given up, and nothing waits for it
        os.environ.pop("MLFLOW_RUN_ID", None)  # the run keeps its status and its reason
        raise BadInput(f"Run {run_id} was reported as not submitted, so its job does nothing: submit it again.")
    for name in known.keys() & {names.TAG_REASON, names.TAG_EXIT_CODE}:
        client.delete_tag(run_id, name)  # of a try before this one
    contents.tag_run(run_id, {STATE: RUNNING, NODE: node})
    client.update_run(run_id, status="RUNNING")
    try:
        client.log_text(run_id, f"{node}\n", f"{ARTIFACTS}/node.txt")
    except Exception as error:
        where = mlflow.get_run(run_id).info.artifact_uri
        raise BadInput(
            f"Node {node} cannot write the run's artifacts at {where} ({first_line(error)}): keep them on a server "
            "(mlflow server --serve-artifacts), or in a folder that all nodes see."
        ) from None
    ended, log = threading.Event(), place / LOG_FILE

    def send() -> None:
        while not ended.wait(_EVERY_S):
            _log(run_id, log)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    try:
        yield
    finally:
        ended.set()
        sender.join()
        _log(run_id, log)


def _is_here(cluster: str) -> bool:
    """Return whether this machine asks the cluster that a job's tag names: two clusters number their jobs alike."""
    driver, _, known_as = cluster.partition(":")
    return DRIVERS[driver]().name() == known_as


def _driver(tags: dict[str, str]) -> Driver:
    return DRIVERS[tags[CLUSTER].partition(":")[0]]()


def _found(query: str) -> list[Run]:
    matching = mlflow.search_runs(filter_string=query, search_all_experiments=True, output_format="list")
    return [run for run in matching if {ID, CLUSTER, STATE, LOG} <= run.data.tags.keys()]


def _work(entry: str, parameters: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps([entry, parameters], sort_keys=True).encode()).hexdigest()[:16]


def _log(run_id: str, log: Path) -> None:
    if log.is_file():
        with suppress(Exception):  # the next time, or not: the file stays where it is
            mlflow.MlflowClient().log_artifact(run_id, str(log), ARTIFACTS)


def _last(log: Path) -> str:
    """Return the last line of a log that a step or a shell printed."""
    try:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return f"its node could not write {log}, so `shared` may not be a folder that all nodes see"
    own = [line.removeprefix("qrl: ") for line in lines if line.startswith("qrl: ")]
    return (own or lines or ["it printed nothing"])[-1].strip().rstrip(".")
