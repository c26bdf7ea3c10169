"""The active run and its experiment."""

import mlflow
from mlflow.tracking.fluent import _get_experiment_id


def run() -> mlflow.ActiveRun:
    """Return the active run; raise RuntimeError if there is none."""
    if active := mlflow.active_run():
        return active
    raise RuntimeError("No run is active: call this inside a step.")


def run_id() -> str:
    """Return the id of the active run."""
    return run().info.run_id


def experiment() -> str:
    """Return the id of the active run's experiment, or of the one that a new run would be in."""
    active = mlflow.active_run()
    return str(active.info.experiment_id if active else _get_experiment_id())
