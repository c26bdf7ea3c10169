"""Slurm: a job is a script for sbatch; scontrol reports its state, or sacct if the site keeps accounts.

A submission can fail in a way that leaves open whether Slurm has the job: sbatch may give up on a controller that is
busy and takes the job all the same. So the queue is searched for the job's script before a failure is reported.
"""

import re
import shlex
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import mlflow

from qrl import process
from qrl.cluster.config import CHOSEN
from qrl.cluster.driver import RUNNING, SETTINGS, VANISHED, WAITING, Job, State, Unanswered, call, command, torchrun
from qrl.errors import BadInput, QrlError, first_line
from qrl.tracking import store

_WAITING_WORDS = {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
_RUNNING_WORDS = {
    *("RUNNING", "COMPLETING", "CONFIGURING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED")
}
_UNKNOWN_JOB = "Invalid job id"  # it ended longer than MinJobAge ago, by default five minutes
_QUEUE_FULL = re.compile("unable to accept job|job queue full")  # sbatch then tries again for two minutes
_UNREACHABLE = re.compile("Could not establish a configuration source|Unable to contact slurm controller")
_TIMED_OUT = "timed out"  # sbatch gave up on the controller, which may take the job all the same
_SUBMIT_S = 60  # for sbatch to answer
_TORCHRUN_PORT = 29500  # torchrun's own; a job adds its number, since two may share a node
# The body of a loop over the paths that a job needs: without it, a node that lacks the shared folder would fail later
# with an error that does not name the cause.
_CHECK_PATH = r"""  [ -e "$needed" ] && continue
  echo "qrl: node $(hostname) does not see $needed: \`shared\` in cluster.yaml must name a folder that all nodes" \
    "mount." >&2
  exit 2"""


class Slurm:
    """Slurm's commands."""

    def name(self) -> str:
        """Return ClusterName of Slurm's configuration; empty if Slurm cannot be asked here."""
        if not shutil.which("scontrol"):
            return ""
        with suppress(QrlError):
            configuration = call("scontrol", "show", "config").stdout
            match = re.search(r"^ClusterName\s*=\s*(\S+)", configuration, re.MULTILINE)
            return match[1] if match else ""
        return ""

    def script(self, job: Job) -> str:
        """Return the script for sbatch."""
        requested = job.resources
        container = job.cluster.container(job.entry)
        own_python = "python" if container else sys.executable  # of the image, or the one that submits
        python = job.cluster.python or own_python
        lines = ["#!/bin/bash", *_sbatch_lines(job)]

        paths = " ".join(shlex.quote(str(path)) for path in _needed_paths(job))
        lines += [f"for needed in {paths}; do", _CHECK_PATH, "done"]
        lines += ["set -e", *job.cluster.setup, *requested.setup]
        lines.append(f"export {process.FOLDER}={shlex.quote(str(Path.cwd()))}")  # relative paths count from there
        if job.cluster.submits(job.entry):
            lines.append(f"export {CHOSEN}={shlex.quote(str(job.folder / SETTINGS))}")
        lines.append(f"cd {shlex.quote(str(process.ROOT))}")

        if requested.nodes == 1:
            return "\n".join([*lines, f"exec {_within(job, 1)}{command(job, python)}", ""])
        first_node = f'"$(hostname):$(({_TORCHRUN_PORT} + SLURM_JOB_ID % 1000))"'  # where the script runs
        rendezvous = f'--rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint={first_node}'
        launched = _within(job, requested.nodes) + torchrun(job, python, rendezvous)
        # The command that starts the others needs srun, which an image does not have.
        outer_python = (job.cluster.python if not container else None) or sys.executable
        return "\n".join([*lines, f"exec {command(job, outer_python, launched)}", ""])

    def submit(self, job: Job) -> str:
        """Hand a script to sbatch, and return the job's number.

        Raises:
            BadInput: Slurm refuses the job, or has as many as it takes.
            Unanswered: Slurm does not answer.
        """
        timeout = None
        try:
            result = call("sbatch", "--parsable", str(job.script), timeout=_SUBMIT_S)
            if not result.returncode:
                return result.stdout.strip().partition(";")[0]  # number;cluster
            message = result.stderr
        except Unanswered as error:
            timeout = error
            message = error.stderr

        if timeout or _TIMED_OUT in message:
            number = _queued(job)  # not after a refusal: the queue lists refused jobs, too
            if number:
                return number
        if _QUEUE_FULL.search(message):
            raise BadInput(
                f"Slurm takes no more jobs now, so it did not take that of {job.entry}: the cluster's limit of jobs "
                "(MaxJobCount) is reached. Submit again when some have ended, or ask its administrators to raise it."
            )
        if timeout:
            raise timeout
        refusal = first_line(QrlError(message)).removeprefix("sbatch: error: ")
        if _UNREACHABLE.search(message):
            raise BadInput(
                f"Slurm cannot be reached from here ({refusal}): submit from a node of the cluster, while its "
                "controller runs."
            )
        raise BadInput(f"Slurm refuses the job of {job.entry} ({refusal}): correct cluster.yaml, and submit again.")

    def state(self, job_id: str) -> State | None:
        """Return a job's state, from the controller's memory or else from accounting; None if Slurm does not answer."""
        with suppress(QrlError):
            result = call("scontrol", "show", "job", "--oneliner", job_id)
            if not result.returncode:
                return _parsed(result.stdout)
            if _UNKNOWN_JOB in result.stderr:
                return _accounted(job_id)
        return None

    def cancel(self, job_id: str) -> None:
        """Cancel a job."""
        call("scancel", job_id)


def _within(job: Job, nodes: int) -> str:
    """Return what stands before a command of a job: srun where several nodes or a plugin of Slurm's run it, an image.

    Source: the options of NVIDIA's Pyxis and of `apptainer exec`, from their manuals.
    """
    requested = job.resources
    container = job.cluster.container(job.entry)
    words: list[str] = []
    if nodes > 1 or (container and container.runtime == "pyxis"):
        words += ["srun", "--kill-on-bad-exit=1", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
        if requested.cpus:  # srun does not inherit it from sbatch
            words.append(f"--cpus-per-task={requested.cpus}")
    if container:
        # The checkout and the working folder are below `shared`.
        mounts = [_both_sides(str(job.cluster.shared)), *map(_both_sides, container.mounts)]
        if container.runtime == "pyxis":
            words += [f"--container-image={container.image}", f"--container-mounts={','.join(mounts)}"]
            words.append(f"--container-workdir={process.ROOT}")
        else:
            words += ["apptainer", "exec", *(["--nv"] if requested.gpus else [])]
            words += ["--bind", ",".join(mounts), "--pwd", str(process.ROOT), container.image]
    return f"{shlex.join(words)} " if words else ""


def _both_sides(mount: str) -> str:
    """Return a mount as HOST:CONTAINER: the same path on both sides where only one is given."""
    return mount if ":" in mount else f"{mount}:{mount}"


def _sbatch_lines(job: Job) -> list[str]:
    """Return the comments of the script that sbatch reads its options from."""
    requested = job.resources
    gres = None
    if requested.gpus:
        gres = f"gpu:{requested.gpu}:{requested.gpus}" if requested.gpu else f"gpu:{requested.gpus}"
    options = {  # None: left out; empty: a flag
        "job-name": _job_name(job),
        "output": str(job.log),
        "open-mode": "append",  # one log for all tries of a job that is requeued
        "requeue": "",
        "partition": requested.partition,
        "account": requested.account,
        "qos": requested.qos,
        "nodes": str(requested.nodes),
        "gres": gres,
        "ntasks-per-node": "1",
        "cpus-per-task": str(requested.cpus) if requested.cpus else None,
        "mem": requested.memory,
        "time": requested.time,
        **requested.options,
    }
    lines = []
    for name, value in options.items():
        if value is not None:
            lines.append(f"#SBATCH --{name}={_quoted(value)}" if value else f"#SBATCH --{name}")
    return lines


def _needed_paths(job: Job) -> list[Path]:
    """Return the files that a node must see before it runs the job."""
    paths = [job.script, process.ROOT / "qrl" / "__main__.py", job.project / "MLproject"]
    database = store.database_of(mlflow.get_tracking_uri())
    if database:
        paths.append(database.absolute())  # otherwise the node would make a store of its own there
    return paths


def _job_name(job: Job) -> str:
    return f"qrl-{job.entry}"


def _queued(job: Job) -> str:
    """Return the number of a job that Slurm took although sbatch did not report it; empty if there is none."""
    with suppress(QrlError):
        result = call("squeue", "--noheader", "--states=all", f"--name={_job_name(job)}", "--format=%i %o")
        for line in result.stdout.splitlines():
            number, _, script = line.strip().partition(" ")
            if script == str(job.script):
                return number
    return ""


def _quoted(text: str) -> str:
    return shlex.quote(text) if re.search(r"\s", text) else text


def _parsed(line: str) -> State:
    """Return the state in a line of `scontrol show job --oneliner`."""
    values = dict(re.findall(r"(?:^|\s)([\w/:]+)=(\S*)", line))
    node = values.get("NodeList", "").replace("(null)", "")
    word = values.get("JobState", "")
    restarts = int(values.get("Restarts", "0"))
    if word in _WAITING_WORDS:
        reason = values.get("Reason", "None")
        return State(WAITING, "", "to be scheduled" if reason == "None" else reason, restarts)
    if word in _RUNNING_WORDS:
        return State(RUNNING, node, "", restarts)
    return State(word, node, values.get("ExitCode", ""), restarts)


def _accounted(job_id: str) -> State:
    """Return the state that sacct gives; VANISHED if there is no accounting, or it does not know the job."""
    if not shutil.which("sacct"):
        return State(VANISHED)
    result = call(
        "sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job_id}", "--format=State,ExitCode,NodeList"
    )
    if result.returncode or not result.stdout.strip():
        return State(VANISHED)
    last_row = result.stdout.strip().splitlines()[-1]
    state, exit_code, node = last_row.split("|")
    word = state.split()[0]  # `CANCELLED by 1000`
    if word in _WAITING_WORDS:
        return State(WAITING, node, exit_code)
    if word in _RUNNING_WORDS:
        return State(RUNNING, node, exit_code)
    return State(word, node, exit_code)
