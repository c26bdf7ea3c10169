"""SkyPilot: a job is a managed task, on Kubernetes, in a cloud, or wherever else the site has it."""

import os
import re
import socket
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from qrl import process
from qrl.cluster.driver import COMPLETED, RUNNING, VANISHED, WAITING, Job, State, call, command, environment, torchrun
from qrl.errors import BadInput, QrlError
from qrl.files import reading

_STATES = {
    **dict.fromkeys(("PENDING", "SUBMITTED", "STARTING", "RECOVERING"), WAITING),
    **dict.fromkeys(("RUNNING", "WINDING_DOWN", "CANCELLING"), RUNNING),
    "SUCCEEDED": COMPLETED,
}
_PASSED = ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI", "MLFLOW_TRACKING_USERNAME", "MLFLOW_EXPERIMENT_NAME")
_SECRET = ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
_HERE = ("127.0.0.1", "localhost", "0.0.0.0")  # each machine can have an API server of its own
_NUMBER = re.compile(r"Job (?:submitted, )?ID: (\d+)")


class SkyPilot:
    """The commands of `sky jobs`, whose controller restarts a job that loses its machine."""

    def name(self) -> str:
        """Return the host of the API server, which numbers the managed jobs of all its users."""
        with suppress(QrlError, ValueError, KeyError, TypeError):
            about = reading.parsed(call("sky", "api", "info", "--output", "json").stdout)
            host = urlsplit(about["server"]["url"]).hostname
            return socket.gethostname() if host in _HERE else host or ""
        return ""

    def script(self, job: Job) -> str:
        """Return the task as YAML; of secrets it holds the names."""
        wanted, cluster, inherited = job.resources, job.cluster, environment()
        if wanted.gpus and not wanted.gpu:
            raise BadInput(
                f"cluster.yaml: {job.entry} has `gpus` without `gpu`: SkyPilot needs the type, such as H100."
            )
        resources = {
            "infra": wanted.infra,
            "accelerators": f"{wanted.gpu}:{wanted.gpus}" if wanted.gpus else None,
            "cpus": wanted.cpus and f"{wanted.cpus}+",
            "memory": wanted.memory and f"{_gigabytes(wanted.memory)}+",
        }
        python = cluster.python or "python"
        run = command(replace(job, folder=Path(os.path.relpath(job.folder, process.ROOT))), python)  # below `workdir`
        if wanted.nodes > 1:  # the task runs on every node
            meet = '--node-rank="$SKYPILOT_NODE_RANK" --rdzv-endpoint="$(echo "$SKYPILOT_NODE_IPS" | head -n 1):29500"'
            run = f"MLFLOW_RUN_ID={job.run_id} {torchrun(job, python, meet)}"
        task = {
            "name": f"qrl-{job.entry}",
            "resources": {key: value for key, value in resources.items() if value is not None},
            "num_nodes": wanted.nodes,
            "workdir": str(process.ROOT),
            "envs": {key: inherited[key] for key in _PASSED if key in inherited},
            "secrets": {key: None for key in _SECRET if key in inherited},
            "setup": "\n".join((*cluster.setup, *wanted.setup)),
            "run": run,
        }
        return yaml.safe_dump({key: value for key, value in task.items() if value}, sort_keys=False, width=10_000)

    def submit(self, job: Job) -> str:
        """Launch the task as a managed job, and return its number."""
        secrets = [word for key in _SECRET if key in environment() for word in ("--secret", key)]
        done = call("sky", "jobs", "launch", "--yes", "--detach-run", *secrets, str(job.script), timeout=1800)
        number = _NUMBER.search(done.stdout)
        if done.returncode or not number:
            printed = (done.stderr or done.stdout).strip().splitlines() or ["it says nothing"]
            raise BadInput(
                f"SkyPilot refuses the job of {job.entry} ({printed[-1]}): correct cluster.yaml, and submit again."
            )
        return number[1]

    def state(self, job_id: str) -> State | None:
        """Return how a job stands, from its controller."""
        with suppress(QrlError, ValueError):
            # Without --verbose it leaves out where a job runs and why it failed.
            done = call("sky", "jobs", "queue", "--all", "--all-users", "--verbose", "--output", "json")
            if done.returncode:
                return None
            rows = reading.parsed(done.stdout[done.stdout.index("[") :])
            row = next((row for row in rows if str(row.get("job_id")) == job_id), None)
            return State(VANISHED) if row is None else _stands(row, job_id)
        return None

    def cancel(self, job_id: str) -> None:
        """Cancel a job."""
        call("sky", "jobs", "cancel", "--yes", job_id)


def _stands(row: dict, job_id: str) -> State | None:
    """Return the state in a row of the queue; None where it has none."""
    if not row.get("status"):
        return None
    word, told = str(row["status"]), str(row.get("failure_reason") or "")
    state = State(_STATES.get(word, word), str(row.get("region") or ""), "", int(row.get("recovery_count") or 0))
    if state.word == WAITING:
        return replace(state, detail=told or word.lower())
    if word.startswith("FAILED"):
        why = f"{told.rstrip('.') or 'SkyPilot gives no reason'}; `sky jobs logs {job_id}` shows what it printed"
        return replace(state, why=why)
    return state


def _gigabytes(memory: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([KMGT]?)", memory).groups()
    return max(1, round(int(number) * {"K": 2**-20, "": 2**-10, "M": 2**-10, "G": 1, "T": 2**10}[unit]))
