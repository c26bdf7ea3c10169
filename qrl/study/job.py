"""What a job of a cluster runs on its node: an entry point under the run that was opened for it."""

import os
import subprocess
from pathlib import Path

import mlflow

from qrl import process
from qrl.engine import device
from qrl.errors import QrlError
from qrl.study.launch import launch
from qrl.tracking import projects, store
from qrl.workspace import WORK


def run(
    run_id: str, project: str, entry: str, parameters: dict[str, str], words: tuple[str, ...], *, gpus: int = 0
) -> None:
    """Run an entry point, or the `words` of a command that starts its processes itself, and send the log to the store.

    Args:
        run_id: of the job.
        project: folder with the MLproject file.
        entry: its entry point.
        parameters: as `-P` takes them.
        words: of the command; empty for the entry point.
        gpus: that cluster.yaml requests; the step compares them with what its own environment sees.

    Raises:
        BadInput: the node cannot reach the store or its artifacts.
        QrlError: the step failed; the sentence and the exit code are its own.
    """
    from qrl.cluster import jobs

    process.die_with_parent()  # Slurm's daemon of the step: without it, a requeued job would run twice
    os.environ["MLFLOW_RUN_ID"] = run_id  # which the command's end closes after an error
    os.environ[device.GPUS_VARIABLE] = str(gpus)
    try:
        store.prepare()
    except QrlError:
        # `jobs.settle` will read the reason from the log. The client of a server that is down would try for eight
        # minutes to write it into the run.
        if not store.database_of(mlflow.get_tracking_uri()):
            del os.environ["MLFLOW_RUN_ID"]
        raise
    with jobs.begun(run_id, Path.cwd() / WORK / "jobs" / run_id):
        if words:
            _run_command(words)
        else:
            launch(Path(project), entry, parameters, run_id=os.environ.pop("MLFLOW_RUN_ID"))


def _run_command(words: tuple[str, ...]) -> None:
    """Run a command whose processes train together, under the run of MLFLOW_RUN_ID."""
    with process.variables(**{process.FOLDER: os.getcwd(), process.CALLER: process.caller()}):
        command_exit_code = subprocess.run(words, cwd=process.ROOT, check=False).returncode
    if command_exit_code:
        reason, step_exit_code = projects.failure(os.environ.pop("MLFLOW_RUN_ID"))
        error = QrlError(f"A process of the training ended with exit code {command_exit_code}: {reason}")
        error.exit_code = step_exit_code or 1
        raise error
