"""What a driver of a cluster does, and the line that a job runs."""

import os
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from qrl.cluster.config import CHOSEN, Cluster, Resources
from qrl.errors import BadInput, QrlError

WAITING, RUNNING = "waiting", "running"  # of a job; the cluster's own words, in capitals, for one that ended
COMPLETED, VANISHED = "COMPLETED", "VANISHED"
SETTINGS, LOG_FILE = "cluster.json", "log.txt"  # in a job's folder
_NOT_PASSED = ("MLFLOW_RUN_ID", "QRL_LAUNCHER", "QRL_PLACE", "QRL_GPUS", CHOSEN, "CUDA_VISIBLE_DEVICES")


class Unanswered(QrlError):
    """A command of the cluster was ended because it took too long."""

    said = ""  # what it had printed to its standard error


@dataclass(frozen=True)
class Job:
    """A run of an entry point that is, or will be, a job."""

    entry: str
    folder: Path  # with the MLproject file
    parameters: dict[str, str]
    run_id: str  # "" of a job that is only shown
    place: Path  # folder for the script and the log
    cluster: Cluster

    @property
    def resources(self) -> Resources:
        """Return what it asks for."""
        return self.cluster.resources(self.entry)

    @property
    def script(self) -> Path:
        """Return the file of the script or the task."""
        return self.place / "job.sh"

    @property
    def log(self) -> Path:
        """Return the file that the job prints to."""
        return self.place / LOG_FILE


@dataclass(frozen=True)
class State:
    """How a job stands."""

    word: str
    node: str = ""
    detail: str = ""  # why it waits, or its exit code
    restarts: int = 0
    why: str = ""  # what the cluster itself says of a failure, where its log is not on this machine

    @property
    def ended(self) -> bool:
        """Return whether it will never run again."""
        return self.word not in (WAITING, RUNNING)


class Driver(Protocol):
    """A cluster's commands."""

    def name(self) -> str: ...  # "" where it cannot be asked; two clusters number their jobs alike
    def script(self, job: Job) -> str: ...  # what the cluster gets
    def submit(self, job: Job) -> str: ...  # returns the job's number; raises BadInput if the cluster refuses it
    def state(self, job_id: str) -> State | None: ...  # None where it cannot be asked
    def cancel(self, job_id: str) -> None: ...  # does nothing to a job that ended


def command(job: Job, python: str, launched: str = "") -> str:
    """Return the line that a node runs: the entry point under its run, or what has been `launched` instead."""
    words = [python, "-m", "qrl", "job", job.run_id or "RUN"]
    words += ["--gpus", str(job.resources.gpus)] if job.resources.gpus else []
    if launched:
        return f"{shlex.join(words)} -- {launched}"
    words += ["--project", str(job.folder), "--entry", job.entry]
    return shlex.join(words + [word for key, value in job.parameters.items() for word in ("-P", f"{key}={value}")])


def torchrun(job: Job, python: str, meet: str) -> str:
    """Return a node's part of a training on several: torchrun, which starts a process a GPU.

    Args:
        meet: options, ready for a shell, by which the nodes find each other.
    """
    wanted = job.resources
    words = [python, "-m", "torch.distributed.run", f"--nnodes={wanted.nodes}", f"--nproc-per-node={wanted.gpus or 1}"]
    step = ["-m", "qrl", job.entry, *(word for key, value in job.parameters.items() for word in (f"--{key}", value))]
    return f"{shlex.join(words)} --rdzv-backend=c10d {meet} {shlex.join(step)}"


def environment() -> dict[str, str]:
    """Return the variables that a job inherits: not those of the job or the run that this process belongs to."""
    kept = {"SLURM_CONF"}
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _NOT_PASSED and (name in kept or not name.startswith(("SLURM_", "SLURMD_")))
    }


def call(*words: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Run a command of the cluster and return what it printed, `timeout` seconds later at most.

    Raises:
        BadInput: it is not installed here.
        Unanswered: it does not answer.
    """
    try:
        return subprocess.run(words, env=environment(), capture_output=True, text=True, check=False, timeout=timeout)
    except FileNotFoundError:
        raise BadInput(f"`{words[0]}` is not installed here: submit from a node of the cluster that has it.") from None
    except subprocess.TimeoutExpired as late:
        error = Unanswered(f"`{words[0]}` has not answered for {timeout:.0f} s: ask whether the cluster is up.")
        error.said = (late.stderr or b"").decode(errors="replace")  # bytes, although the call asks for text
        raise error from None
