"""What every test shares: no run of somebody else's in the environment, and a store of its own where it wants one."""

import os
import shutil
import sqlite3
from pathlib import Path

import pytest

# Tests under `mlflow run -e test` would otherwise join the run that MLflow opened for pytest itself.
for name in ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_TRACKING_URI"):
    os.environ.pop(name, None)


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory) -> Path:
    """MLflow's database with nothing in it; it takes seconds to make, so it is made once and copied."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    folder = tmp_path_factory.mktemp("empty")
    SqlAlchemyStore(f"sqlite:///{folder}/mlflow.db", str(folder / "mlruns"))
    return folder / "mlflow.db"


@pytest.fixture
def store(empty_database, tmp_path, monkeypatch) -> str:
    """The address of a fresh store in a folder of its own, which is also the working directory."""
    import mlflow

    database = tmp_path / "store" / "mlflow.db"
    database.parent.mkdir()
    shutil.copyfile(empty_database, database)
    with sqlite3.connect(database) as connection:
        connection.execute("UPDATE experiments SET artifact_location = ?", (f"{database.parent}/mlruns/0",))
    monkeypatch.chdir(database.parent)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database}")
    mlflow.set_tracking_uri(f"sqlite:///{database}")
    yield f"sqlite:///{database}"
    while mlflow.active_run():
        mlflow.end_run("FAILED")
    mlflow.set_tracking_uri(None)
