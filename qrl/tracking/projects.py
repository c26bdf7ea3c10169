"""MLflow Projects: runs opened for steps that are about to be launched, and what they said of themselves."""

from __future__ import annotations

from pathlib import Path

from qrl import names
from qrl.tracking import runs, signals

_PARENT = "mlflow.parentRunId"
_MANAGER = "mlflow.project.env"


def open_child(parent: str, name: str) -> str:
    """A run for a step to join, below the parent; its id is known before the step begins, and so is its fate.

    Args:
        parent: id of the study's run; empty for none.
        name: what the UI shows.
    """
    import mlflow
    from mlflow.tracking.fluent import _get_experiment_id

    client = mlflow.MlflowClient()
    experiment = client.get_run(parent).info.experiment_id if parent else _get_experiment_id()
    tags = {names.TAG_PID: signals.identity()} | ({_PARENT: parent} if parent else {})
    return client.create_run(experiment, tags=tags, run_name=name).info.run_id


def env_manager(run_id: str | None) -> str:
    """The environment manager that a run was started under; `local` where `mlflow run` did not start it."""
    return runs.opened(run_id).data.tags.get(_MANAGER, "local") if run_id else "local"


def mark_stopped(run_id: str, error: KeyboardInterrupt) -> bool:
    """Gives a launched run its true end after a signal: MLflow calls every run FAILED that it interrupted.

    Returns:
        Whether its step finished all the same, as a server does that is told to stop; else it was KILLED.
    """
    import mlflow

    client = mlflow.MlflowClient()
    run = client.get_run(run_id)
    finished = names.SECONDS in run.data.metrics
    if not finished and names.TAG_REASON not in run.data.tags:  # the signal came before it could say so itself
        client.set_tag(run_id, names.TAG_REASON, str(error) or "Stopped by Ctrl-C.")
    elif not finished and int(run.data.tags.get(names.TAG_EXIT_CODE, 1)) <= 128:
        return False  # it had failed by itself
    client.set_terminated(run_id, "FINISHED" if finished else "KILLED")
    return finished


def told(run_id: str) -> tuple[str, int]:
    """The reason that a failed step left in its run, and its exit code; empty and 1 where it left none."""
    import mlflow

    tags = mlflow.get_run(run_id).data.tags
    return tags.get(names.TAG_REASON, ""), int(tags.get(names.TAG_EXIT_CODE, 1))


def experiment_id(run_id: str) -> str:
    """The experiment of a run."""
    import mlflow

    return mlflow.get_run(run_id).info.experiment_id


def artifact_place(run_id: str) -> str:
    """Where a run's artifacts lie: a path where the store is local, else an address."""
    import mlflow
    from mlflow.utils.file_utils import local_file_uri_to_path
    from mlflow.utils.uri import is_local_uri

    uri = mlflow.get_run(run_id).info.artifact_uri
    if not is_local_uri(uri):
        return uri
    path = Path(local_file_uri_to_path(uri))
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
