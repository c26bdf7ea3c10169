"""Runs that are jobs: submitted under a run of their own, followed, cancelled, and ended if their process died.

A run's tags name its job. The job's own process ends the run, as everywhere. If that process was killed (a time limit,
a dead node, scancel), whoever looks next gives the run its status and its reason: the process that waits for the job,
`qrl jobs`, or the next command on the store from a machine that can ask the cluster.

    SCHEDULED ──── begun ───► RUNNING ──── the step ends ───► FINISHED, FAILED
        ▲                        │ killed
        └─── requeued ───────────┴─── settle ───► FAILED or KILLED, with the cluster's reason
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
from qrl.cluster.slurm import Slurm
from qrl.errors import BadInput, QrlError, first_line
from qrl.tracking import contents, dead_runs, runs, store, store_errors
from qrl.workspace import WORK, write_atomically

DRIVERS: dict[str, type[Driver]] = {"slurm": Slurm}
# Tags of a run that is a job.
ID = dead_runs.TAG_JOB  # its number
CLUSTER = "qrl.job.cluster"  # driver and name of the cluster that counts so, as `slurm:lab`
STATE = "qrl.job.state"
NODE = "qrl.job.node"
RESTARTS = "qrl.job.restarts"
LOG = "qrl.job.log"
WORK_DIGEST = "qrl.job.work"  # of the entry point and its parameters, to find the job again
MANAGER = "mlflow.project.env"
ARTIFACTS = "job"  # folder of the script, the cluster's settings and the log
_REFUSED = "REFUSED"  # the state of a job that was not submitted
_OPEN = f"tags.`{STATE}` LIKE '%ing' and tags.`{ID}` != ''"  # waiting, running
_LOG_INTERVAL_S = 30  # between two uploads of the log
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
_OWN_FAULT = ("FAILED", "TIMEOUT", "DEADLINE", "OUT_OF_MEMORY")  # the run is FAILED; after all others, KILLED


class Submitted(SubmittedRun):
    """A job that was submitted, as MLflow waits for it and cancels it."""

    run_id = ""

    def __init__(self, run_id: str, poll_s: float) -> None:
        tags = mlflow.get_run(run_id).data.tags
        self.run_id = run_id
        self.poll_s = poll_s
        self.job_id = tags[ID]
        self.log = Path(tags[LOG])
        self.driver = _driver(tags)

    def wait(self) -> bool:
        """Print the log as it grows until the job has ended; return whether it succeeded."""
        last_state = None
        printed_bytes = 0
        while True:
            state = self.driver.state(self.job_id)
            with suppress(OSError), self.log.open("rb") as file:  # not there yet, or on another machine
                file.seek(printed_bytes)
                sys.stderr.write(file.read().decode(errors="replace"))
                printed_bytes = file.tell()
            if state and state.word == WAITING and state != last_state:
                print(f"      job {self.job_id} waits: {state.detail}", file=sys.stderr)
            if state and settle(mlflow.get_run(self.run_id), state):
                if state.word == VANISHED:  # the cluster has forgotten how it ended, but the step may have said so
                    return self.get_status() == "FINISHED"
                return state.word == COMPLETED
            last_state = state
            time.sleep(self.poll_s)

    def get_status(self) -> str:
        """Return the run's status, after asking the cluster."""
        settle(mlflow.get_run(self.run_id))
        return mlflow.get_run(self.run_id).info.status

    def cancel(self) -> None:
        """Cancel the job, and end its run if it had not begun."""
        self.driver.cancel(self.job_id)
        settle(mlflow.get_run(self.run_id))


def prepared(
    cluster: Cluster, project: Path, entry: str, parameters: dict[str, str], run_id: str = "", manager: str = ""
) -> Job:
    """Return a job, after a check that its nodes can reach what it needs; without a run, it is only to be shown.

    Args:
        cluster: where it is submitted.
        project: folder with an MLproject file.
        entry: its entry point.
        parameters: as `-P` takes them.
        run_id: of the job.
        manager: of environments; under `local` every step runs in the one that submits.

    Raises:
        BadInput: the checkout, the working folder or the store is out of their reach.
    """
    store_address = mlflow.get_tracking_uri()
    database = store.database_of(store_address)
    if cluster.shared:
        paths = {"checkout": process.ROOT, "project": project, "working folder": Path.cwd()}
        if database:
            paths["store"] = database.parent
        for description, path in paths.items():
            if not path.resolve().is_relative_to(cluster.shared.resolve()):
                raise BadInput(
                    f"The nodes cannot see the {description} {path}: move it below the shared folder {cluster.shared}."
                )
    hostname = urlsplit(store_address).hostname
    if hostname in ("localhost", "127.0.0.1", "::1"):
        raise BadInput(f"The nodes cannot reach the store {store_address}: give the server's name, not {hostname}.")
    requested = cluster.resources(entry)
    nodes = requested.nodes
    needs_python = project.resolve() != process.ROOT and manager != "local" and not requested.container
    if nodes > 1 and needs_python and not cluster.python:
        raise BadInput(
            f"A training on {nodes} nodes runs in an environment that is there already: set `python` in cluster.yaml "
            f"to the Python of the environment of {project}."
        )
    folder = Path.cwd() / WORK / "jobs" / (run_id or "RUN")
    return Job(entry, project, parameters, run_id, folder, cluster)


def submit(job: Job) -> Submitted:
    """Submit a job whose run is open; the script, the settings and the job's number go into the run.

    Raises:
        BadInput: the cluster refuses it; the run is FAILED, with the sentence.
    """
    client = mlflow.MlflowClient()
    driver = DRIVERS[job.cluster.driver]()
    try:
        files = {job.script: driver.script(job), job.folder / SETTINGS: job.cluster.model_dump_json(indent=1)}
        for path, text in files.items():
            with write_atomically(path) as partial_path:
                partial_path.write_text(text)
            client.log_artifact(job.run_id, str(path), ARTIFACTS)
        cluster_name = f"{job.cluster.driver}:{driver.name()}"
        tags = {
            CLUSTER: cluster_name,
            LOG: str(job.log),
            STATE: WAITING,
            WORK_DIGEST: _work_digest(job.entry, job.parameters),
        }
        contents.tag_run(job.run_id, tags)
        client.update_run(job.run_id, status="SCHEDULED")  # before the job can begin
        job_id = driver.submit(job)
    except Exception as failure:
        error = store_errors.explain(failure) or QrlError(
            f"The job of {job.entry} was not submitted: {first_line(failure)}"
        )
        refusal = {STATE: _REFUSED, names.TAG_REASON: str(error), names.TAG_EXIT_CODE: str(error.exit_code)}
        contents.tag_run(job.run_id, refusal)
        client.set_terminated(job.run_id, "FAILED")
        raise error from None
    contents.tag_run(job.run_id, {ID: job_id})
    print(f"      {job.entry} is job {job_id} of {cluster_name}, run {job.run_id[:8]}; log: {job.log}", file=sys.stderr)
    return Submitted(job.run_id, job.cluster.poll)


def run(cluster: Cluster, project: Path, entry: str, parameters: dict[str, str], run_id: str) -> None:
    """Submit a step of a study unless its run is a job already, and wait for it, as `mlflow.projects.run` does.

    Raises:
        ExecutionException: the job failed; its run says why.
    """
    if ID in mlflow.get_run(run_id).data.tags:
        job = Submitted(run_id, cluster.poll)
    else:
        manager = mlflow.get_run(run_id).data.tags.get(MANAGER, "")
        job = submit(prepared(cluster, project, entry, parameters, run_id, manager))
    try:
        succeeded = job.wait()
    except KeyboardInterrupt:
        try:
            job.cancel()
        except Exception as failure:  # this process stops all the same
            print(f"Job {job.job_id} may still run: {first_line(failure)}; see `qrl jobs`.", file=sys.stderr)
        raise
    if not succeeded:
        raise ExecutionException(f"Job {job.job_id} failed.")


def adopted(parent: str, entry: str, parameters: dict[str, str]) -> str | None:
    """Return the run of a step that a former process of the study submitted, and that still waits or runs."""
    digest = _work_digest(entry, parameters)
    query = f"{_OPEN} and tags.`{WORK_DIGEST}` = '{digest}' and tags.`{runs.PARENT}` = '{parent}'"
    for job_run in _search(query):
        if not settle(job_run):
            return job_run.info.run_id
    return None


def settle(run: Run, state: State | None = None) -> bool:
    """Tag a run with its job's state; if the job ended without a report, give the run its status and reason.

    Args:
        run: of a job.
        state: as the cluster has just reported it; None: the cluster is asked.

    Returns:
        Whether the job has ended.
    """
    tags = run.data.tags
    run_id = run.info.run_id
    if state is None:
        state = _driver(tags).state(tags[ID])
    if state is None:
        return False
    node = state.node or tags.get(NODE, "")
    state_tags = {STATE: state.word, NODE: node, RESTARTS: str(state.restarts)}
    contents.tag_run(run_id, {key: text for key, text in state_tags.items() if tags.get(key, "") != text})

    if not state.ended:
        # A process that was killed outright leaves its run RUNNING while the job waits in the queue again.
        if state.word == WAITING and state.restarts and run.info.status != "SCHEDULED":
            mlflow.MlflowClient().update_run(run_id, status="SCHEDULED")
        return False

    _upload_log(run_id, Path(tags[LOG]))
    is_open = run.info.status in ("RUNNING", "SCHEDULED")
    if state.word == COMPLETED:
        if is_open:
            mlflow.MlflowClient().set_terminated(run_id, "FINISHED")
        return True
    # Above 128, a signal ended the process, and the cluster knows why it sent one.
    exit_code = int(tags.get(names.TAG_EXIT_CODE, _KILLED))
    is_reported = run.info.status == "FINISHED" or exit_code <= 128
    if is_open or not is_reported:
        _end_run(run, state, node)
    return True


def _end_run(run: Run, state: State, node: str) -> None:
    """Give the run of a job that ended without a report its status and its reason, and end the cells below it."""
    tags = run.data.tags
    run_id = run.info.run_id
    cause = _REASONS.get(state.word) or f"{_last_line(Path(tags[LOG]))} (exit code {state.detail})"
    on_node = f" on {node}" if node else ""
    reason = f"Job {tags[ID]} ended {state.word}{on_node}: {cause}."
    for child in contents.find_runs(f"tags.`{runs.PARENT}` = '{run_id}'"):
        if ID not in child.data.tags:  # a study's steps are jobs of their own
            dead_runs.end_run(child.info, reason)
    dead_runs.end_run(run.info, reason, "FAILED" if state.word in _OWN_FAULT else "KILLED")
    contents.tag_run(run_id, {names.TAG_EXIT_CODE: str(_KILLED)})


def settle_all(clusters: str = "%") -> list[str]:
    """Settle the jobs that the store takes for open, if their cluster can be asked here; return those that ended.

    Args:
        clusters: driver and name, `%` for any.
    """
    open_runs = _search(f"{_OPEN} and tags.`{CLUSTER}` LIKE '{clusters}'")
    cluster_names = {run.data.tags[CLUSTER] for run in open_runs}
    here = {cluster_name for cluster_name in cluster_names if _is_here(cluster_name)}
    return [run.info.run_id for run in open_runs if run.data.tags[CLUSTER] in here and settle(run)]


def listed(cancel: str | None = None, *, include_ended: bool = False) -> list[str]:
    """Settle the jobs of the store, cancel one if wanted, and return a line for each that waits or runs, or for all.

    Raises:
        BadInput: no waiting or running job has the run `cancel`, several begin like it, or another cluster has it.
    """
    settle_all()
    if cancel:
        _cancel(cancel)
    lines = [_line(run) for run in _search(f"tags.`{ID}` != ''" if include_ended else _OPEN)]
    return lines or ["No job of this store waits or runs."]


def _cancel(run_prefix: str) -> None:
    """Cancel the job of the run that begins so; for a study, its steps' jobs too."""
    matching = [run for run in _search(_OPEN) if run.info.run_id.startswith(run_prefix)]
    if len(matching) != 1:
        count = f"{len(matching)} waiting or running jobs have" if matching else "no waiting or running job has"
        raise BadInput(f"'{run_prefix}' names no single job: {count} such a run. `qrl jobs` lists them.")
    (run,) = matching
    run_id = run.info.run_id
    cluster_name = run.data.tags[CLUSTER]
    if not _is_here(cluster_name):
        raise BadInput(
            f"Run {run_id[:8]} is a job of {cluster_name}, which this machine does not ask: run this where it was "
            "submitted."
        )
    steps = _search(f"{_OPEN} and tags.`{runs.PARENT}` = '{run_id}'")
    for job_run in (run, *steps):  # the study first, lest it submit more
        Submitted(job_run.info.run_id, 1).cancel()


def _line(run: Run) -> str:
    """Return what `qrl jobs` shows of a job."""
    tags = run.data.tags
    state = f"{tags[STATE]} on {tags[NODE]}" if tags.get(NODE) else tags[STATE]
    name = f"{run.info.run_id[:8]}  {run.info.run_name:<10}  job {tags[ID]:<8}"
    return f"{name} {state:<20} {tags.get(names.TAG_REASON, '')}".rstrip()


@contextmanager
def begun(run_id: str, folder: Path) -> Iterator[None]:
    """Note on which node a job begins, and send the log in its `folder` to the store as it grows.

    Raises:
        BadInput: the node cannot write the run's artifacts; or the job was reported as not submitted.
    """
    client = mlflow.MlflowClient()
    node = os.environ.get("SLURMD_NODENAME", socket.gethostname())
    tags = mlflow.get_run(run_id).data.tags
    if tags.get(STATE) == _REFUSED:  # the cluster took it after it had been given up, and nothing waits for it
        os.environ.pop("MLFLOW_RUN_ID", None)  # the run keeps its status and its reason
        raise BadInput(f"Run {run_id} was reported as not submitted, so its job does nothing: submit it again.")
    for name in (names.TAG_REASON, names.TAG_EXIT_CODE):
        if name in tags:
            client.delete_tag(run_id, name)  # of an earlier try
    contents.tag_run(run_id, {STATE: RUNNING, NODE: node})
    client.update_run(run_id, status="RUNNING")
    try:
        client.log_text(run_id, f"{node}\n", f"{ARTIFACTS}/node.txt")
    except Exception as error:
        address = mlflow.get_run(run_id).info.artifact_uri
        raise BadInput(
            f"Node {node} cannot write the run's artifacts at {address} ({first_line(error)}): keep them on a server "
            "(mlflow server --serve-artifacts), or in a folder that all nodes see."
        ) from None

    log = folder / LOG_FILE
    ended = threading.Event()

    def upload_regularly() -> None:
        while not ended.wait(_LOG_INTERVAL_S):
            _upload_log(run_id, log)

    uploader = threading.Thread(target=upload_regularly, daemon=True)
    uploader.start()
    try:
        yield
    finally:
        ended.set()
        uploader.join()
        _upload_log(run_id, log)


def _is_here(cluster_name: str) -> bool:
    """Return whether this machine asks the cluster in a job's tag: two clusters number their jobs alike."""
    driver, _, name = cluster_name.partition(":")
    return driver in DRIVERS and DRIVERS[driver]().name() == name  # a store can have jobs of a driver that is gone


def _driver(tags: dict[str, str]) -> Driver:
    driver = tags[CLUSTER].partition(":")[0]
    return DRIVERS[driver]()


def _search(query: str) -> list[Run]:
    """Return the runs that are jobs and match a query."""
    matching = mlflow.search_runs(filter_string=query, search_all_experiments=True, output_format="list")
    return [run for run in matching if {ID, CLUSTER, STATE, LOG} <= run.data.tags.keys()]


def _work_digest(entry: str, parameters: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps([entry, parameters], sort_keys=True).encode()).hexdigest()[:16]


def _upload_log(run_id: str, log: Path) -> None:
    if log.is_file():
        with suppress(Exception):  # it is tried again, and the file stays where it is
            mlflow.MlflowClient().log_artifact(run_id, str(log), ARTIFACTS)


def _last_line(log: Path) -> str:
    """Return the last line of a log: of those that a step printed, or else of those of the shell."""
    try:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return f"its node could not write {log}, so `shared` may not be a folder that all nodes see"
    step_lines = [line.removeprefix("qrl: ") for line in lines if line.startswith("qrl: ")]
    candidates = step_lines or lines or ["it printed nothing"]
    return candidates[-1].strip().rstrip(".")
