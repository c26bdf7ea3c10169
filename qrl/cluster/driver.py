"""What the driver of a cluster does, and the line that a job runs.

A driver knows the commands of one kind of cluster; `jobs` knows runs. Two kinds of words meet in a `State`: `waiting`
and `running` are ours, and a job that ended has the cluster's own word, in capitals.
"""

import os
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from qrl.cluster.config import CHOSEN, Cluster, Resources
from qrl.errors import BadInput, QrlError

WAITING = "waiting"
RUNNING = "running"
COMPLETED = "COMPLETED"
VANISHED = "VANISHED"  # the cluster does not know the job any more
SETTINGS = "cluster.json"  # in a job's folder
LOG_FILE = "log.txt"  # there too
_NOT_PASSED = ("MLFLOW_RUN_ID", "QRL_LAUNCHER", "QRL_PLACE", "QRL_GPUS", "QRL_WARM", CHOSEN, "CUDA_VISIBLE_DEVICES")


class Unanswered(QrlError):
    """A command of the cluster was ended because it took too long."""

    def __init__(self, sentence: str, stderr: str = "") -> None:
        """Keep the sentence, and what the command had printed to its standard error."""
        super().__init__(sentence)
        self.stderr = stderr


@dataclass(frozen=True)
class Job:
    """A run of an entry point that is, or will be, a job."""

    entry: str
    project: Path  # folder with the MLproject file
    parameters: dict[str, str]
    run_id: str  # empty for a job that is only shown
    folder: Path  # for the script and the log
    cluster: Cluster

    @property
    def resources(self) -> Resources:
        """Return what it requests."""
        return self.cluster.resources(self.entry)

    @property
    def script(self) -> Path:
        """Return the file that the cluster gets."""
        return self.folder / "job.sh"

    @property
    def log(self) -> Path:
        """Return the file that the job prints to."""
        return self.folder / LOG_FILE


@dataclass(frozen=True)
class State:
    """Whether a job waits, runs or has ended, as the cluster reports it."""

    word: str
    node: str = ""
    detail: str = ""  # why it waits, or its exit code
    restarts: int = 0

    @property
    def ended(self) -> bool:
        """Return whether it will never run again."""
        return self.word not in (WAITING, RUNNING)


class Driver(Protocol):
    """A cluster's commands."""

    def name(self) -> str: ...  # "" if it cannot be asked; two clusters number their jobs alike
    def script(self, job: Job) -> str: ...  # what the cluster gets
    def submit(self, job: Job) -> str: ...  # returns the job's number; raises BadInput if the cluster refuses it
    def state(self, job_id: str) -> State | None: ...  # None if it cannot be asked
    def cancel(self, job_id: str) -> None: ...  # does nothing to a job that ended


def command(job: Job, python: str, launched: str = "") -> str:
    """Return the line that a node runs: the entry point under its run, or the command `launched` in its place."""
    words = [python, "-m", "qrl", "job", job.run_id or "RUN"]
    if job.resources.gpus:
        words += ["--gpus", str(job.resources.gpus)]
    if launched:
        return f"{shlex.join(words)} -- {launched}"
    words += ["--project", str(job.project), "--entry", job.entry]
    for key, value in job.parameters.items():
        words += ["-P", f"{key}={value}"]
    return shlex.join(words)


def torchrun(job: Job, python: str, rendezvous: str) -> str:
    """Return a node's part of a training on several: torchrun, which starts a process a GPU.

    Args:
        job: the training.
        python: on the nodes.
        rendezvous: options, ready for a shell, by which the nodes find each other.
    """
    requested = job.resources
    launcher = [
        *(python, "-m", "torch.distributed.run"),
        f"--nnodes={requested.nodes}",
        f"--nproc-per-node={requested.gpus or 1}",
    ]
    step = ["-m", "qrl", job.entry]
    for key, value in job.parameters.items():
        step += [f"--{key}", value]
    return f"{shlex.join(launcher)} --rdzv-backend=c10d {rendezvous} {shlex.join(step)}"


def environment() -> dict[str, str]:
    """Return the variables that a job inherits: not those of the job or the run that this process belongs to."""
    inherited = {}
    for name, value in os.environ.items():
        is_of_this_job = name.startswith(("SLURM_", "SLURMD_")) and name != "SLURM_CONF"
        if name not in _NOT_PASSED and not is_of_this_job:
            inherited[name] = value
    return inherited


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
    except subprocess.TimeoutExpired as expired:
        stderr = (expired.stderr or b"").decode(errors="replace")  # bytes, although the call asks for text
        sentence = f"`{words[0]}` has not answered for {timeout:.0f} s: ask whether the cluster is up."
        raise Unanswered(sentence, stderr) from None
