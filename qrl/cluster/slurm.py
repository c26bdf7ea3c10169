"""Slurm: a job is a script for sbatch; scontrol says how it stands, or sacct where there is accounting."""

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

_WAITS = {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
_RUNS = {"RUNNING", "COMPLETING", "CONFIGURING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED"}
_UNKNOWN = "Invalid job id"  # of a job that ended longer than MinJobAge ago, by default five minutes
_FULL = re.compile("unable to accept job|job queue full")  # sbatch then tries again for two minutes
_AWAY = re.compile("Could not establish a configuration source|Unable to contact slurm controller")
_LOST = "timed out"  # sbatch's own patience with the controller, which may take the job all the same
_SUBMIT_S = 60  # for sbatch to answer
_BLIND = r"""  [ -e "$needed" ] && continue
  echo "qrl: node $(hostname) does not see $needed: \`shared\` in cluster.yaml must name a folder that all nodes" \
    "mount." >&2
  exit 2"""
_PORT = 29500  # torchrun's own; a job adds its number, since two may share a node


class Slurm:
    """Slurm's commands."""

    def name(self) -> str:
        """Return ClusterName of Slurm's configuration."""
        if not shutil.which("scontrol"):
            return ""
        with suppress(QrlError):
            match = re.search(r"^ClusterName\s*=\s*(\S+)", call("scontrol", "show", "config").stdout, re.MULTILINE)
            return match[1] if match else ""
        return ""

    def script(self, job: Job) -> str:
        """Return the script for sbatch."""
        wanted, cluster = job.resources, job.cluster
        flags = {
            "job-name": _named(job),
            "output": str(job.log),
            "open-mode": "append",  # one log for all tries of a job that is requeued
            "requeue": "",
            "partition": wanted.partition,
            "account": wanted.account,
            "qos": wanted.qos,
            "nodes": str(wanted.nodes),
            "gres": f"gpu:{f'{wanted.gpu}:' if wanted.gpu else ''}{wanted.gpus}" if wanted.gpus else None,
            "ntasks-per-node": "1",
            "cpus-per-task": wanted.cpus and str(wanted.cpus),
            "mem": wanted.memory,
            "time": wanted.time,
            **wanted.options,
        }
        lines = [
            f"#SBATCH --{key}{f'={_quoted(text)}' if text else ''}" for key, text in flags.items() if text is not None
        ]
        needed = [job.script, process.ROOT / "qrl" / "__main__.py", job.folder / "MLproject"]
        if database := store.database_of(mlflow.get_tracking_uri()):
            needed.append(database.absolute())  # else the node would make a store of its own there
        begin = [f"for needed in {shlex.join(map(str, needed))}; do", _BLIND, "done"]
        begin += ["set -e", *cluster.setup, *wanted.setup]
        begin += [f"export {process.FOLDER}={shlex.quote(str(Path.cwd()))}"]  # relative paths count from there
        begin += [f"export {CHOSEN}={shlex.quote(str(job.place / SETTINGS))}"] if cluster.submits(job.entry) else []
        begin += [f"cd {shlex.quote(str(process.ROOT))}"]
        python, launched = cluster.python or sys.executable, ""
        if wanted.nodes > 1:
            place = f'"$(hostname):$(({_PORT} + SLURM_JOB_ID % 1000))"'  # the script runs on the first node
            meet = f'--rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint={place}'
            count = f"--nodes={wanted.nodes} --ntasks={wanted.nodes} --ntasks-per-node=1"
            launched = f"srun --kill-on-bad-exit=1 {count} {torchrun(job, python, meet)}"
        return "\n".join(["#!/bin/bash", *lines, *begin, f"exec {command(job, python, launched)}", ""])

    def submit(self, job: Job) -> str:
        """Hand a script to sbatch, and return the job's number.

        Raises:
            BadInput: Slurm refuses the job, or has as many as it takes.
            Unanswered: Slurm does not answer.
        """
        late = None
        try:
            done = call("sbatch", "--parsable", str(job.script), timeout=_SUBMIT_S)
            if not done.returncode:
                return done.stdout.strip().partition(";")[0]  # number;cluster
            said = done.stderr
        except Unanswered as error:
            said, late = error.said, error
        if (late or _LOST in said) and (number := _queued(job)):  # Slurm took it; a refused job is listed, too
            return number
        if _FULL.search(said):
            raise BadInput(
                f"Slurm takes no more jobs now, so it did not take that of {job.entry}: the cluster's limit of jobs "
                "(MaxJobCount) is reached. Submit again when some have ended, or ask its administrators to raise it."
            )
        if late:
            raise late
        refusal = first_line(QrlError(said)).removeprefix("sbatch: error: ")
        if _AWAY.search(said):
            raise BadInput(
                f"Slurm cannot be reached from here ({refusal}): submit from a node of the cluster, while its "
                "controller runs."
            )
        raise BadInput(f"Slurm refuses the job of {job.entry} ({refusal}): correct cluster.yaml, and submit again.")

    def state(self, job_id: str) -> State | None:
        """Return how a job stands, from the controller's memory or else from accounting."""
        with suppress(QrlError):
            done = call("scontrol", "show", "job", "--oneliner", job_id)
            if not done.returncode:
                return _parsed(done.stdout)
            if _UNKNOWN in done.stderr:
                return _accounted(job_id)
        return None

    def cancel(self, job_id: str) -> None:
        """Cancel a job."""
        call("scancel", job_id)


def _named(job: Job) -> str:
    return f"qrl-{job.entry}"


def _queued(job: Job) -> str:
    """Return the number of a job that Slurm took although sbatch did not say so; empty if it has none such."""
    with suppress(QrlError):
        done = call("squeue", "--noheader", "--states=all", f"--name={_named(job)}", "--format=%i %o")
        rows = (line.strip().partition(" ") for line in done.stdout.splitlines())
        return next((number for number, _, script in rows if script == str(job.script)), "")
    return ""


def _quoted(text: str) -> str:
    return shlex.quote(text) if re.search(r"\s", text) else text


def _parsed(line: str) -> State:
    """Return the state in a line of `scontrol show job --oneliner`."""
    values = dict(re.findall(r"(?:^|\s)([\w/:]+)=(\S*)", line))
    node = values.get("NodeList", "").replace("(null)", "")
    word, restarts = values.get("JobState", ""), int(values.get("Restarts", "0"))
    if word in _WAITS:
        reason = values.get("Reason", "None")
        return State(WAITING, "", "to be scheduled" if reason == "None" else reason, restarts)
    if word in _RUNS:
        return State(RUNNING, node, "", restarts)
    return State(word, node, values.get("ExitCode", ""), restarts)


def _accounted(job_id: str) -> State:
    """Return the state that sacct gives; VANISHED where there is no accounting, or it does not know the job."""
    if not shutil.which("sacct"):
        return State(VANISHED)
    done = call(
        "sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job_id}", "--format=State,ExitCode,NodeList"
    )
    if done.returncode or not done.stdout.strip():
        return State(VANISHED)
    word, code, node = done.stdout.strip().splitlines()[-1].split("|")
    word = word.split()[0]  # `CANCELLED by 1000`
    return State({**dict.fromkeys(_WAITS, WAITING), **dict.fromkeys(_RUNS, RUNNING)}.get(word, word), node, code)
