"""Where MLflow keeps its records: the address is made absolute for children, the store created once and tried first.

The default is MLflow's own: `./mlflow.db` and `./mlruns`, which a bare `mlflow ui` shows.
"""

import logging
import os
import re
import socket
import sqlite3
import stat
import tempfile
from contextlib import closing, suppress
from hashlib import sha256
from pathlib import Path
from urllib.parse import unquote, urlsplit

import mlflow
import requests
from filelock import FileLock

from qrl import workspace
from qrl.errors import BadInput
from qrl.tracking import store_errors

_SQLITE = re.compile(r"(sqlite(?:\+\w+)?:///)([^?]*)(.*)", re.DOTALL)  # dialect, path, options such as ?timeout=60
_PROBE_BYTES = 1 << 20


def prepare() -> str:
    """Make the store ready for this process and its children, and return its absolute address.

    Honours MLFLOW_TRACKING_URI and MLFLOW_REGISTRY_URI, relative addresses counted from the working directory.
    MLFLOW_TRACKING_URI then holds the absolute address.

    Raises:
        BadInput: the store cannot be reached, opened or written.
    """
    _configure_mlflow()
    address = _absolute(mlflow.get_tracking_uri())
    mlflow.set_tracking_uri(address)  # sets the environment variable too
    registry_address = os.environ.get("MLFLOW_REGISTRY_URI")
    if registry_address:
        mlflow.set_registry_uri(_absolute(registry_address))
        os.environ["MLFLOW_REGISTRY_URI"] = _absolute(registry_address)
    try:
        database = database_of(address)
        if database:
            _create(address, database)
        elif urlsplit(address).scheme in ("http", "https"):
            _check_answers(address)
        mlflow.MlflowClient().search_experiments(max_results=1)
        _check_experiment(address)
    except Exception as error:
        raise store_errors.explain(error) or store_errors.unusable(error) from error
    return address


def is_there() -> bool:
    """Return whether anything can have been recorded yet: the store has a database file, or needs none."""
    database = database_of(_absolute(mlflow.get_tracking_uri()))
    return database is None or database.is_file()


def check_there() -> None:
    """Check that something can be read, where `prepare` would make a new store.

    Raises:
        BadInput: the store has no database file.
    """
    if not is_there():
        address = _absolute(mlflow.get_tracking_uri())
        raise BadInput(f"There is no store at {address}: go to the folder of a study, or set MLFLOW_TRACKING_URI.")


def database_of(address: str) -> Path | None:
    """Return the file behind an address like sqlite:////folder/mlflow.db; None for every other store."""
    match = _SQLITE.fullmatch(address)
    return Path(unquote(match[2])) if match else None


def lock_path(address: str, name: str) -> Path:
    """Return the file of a lock that all processes of this machine share which use a store.

    It is beside the database, so that whoever may write there may lock, from whatever container or home; in the
    temporary folder if the store is remote.

    Args:
        address: of the store.
        name: of the lock, without a suffix.
    """
    database = database_of(address)
    if database is None:
        return Path(tempfile.gettempdir()) / f"qrl-{short_hash(address)}.{name}.lock"
    folder = database.parent / workspace.NAME / workspace.LOCKS
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        permissions = stat.S_IMODE(database.parent.stat().st_mode)
        for made in (folder, folder.parent):
            with suppress(OSError):  # another user's
                made.chmod(permissions)
    return folder / f"{database.name}.{name}.lock"


def short_hash(text: str) -> str:
    """Return 16 hexadecimal digits that name a text."""
    return sha256(text.encode()).hexdigest()[:16]


def _configure_mlflow() -> None:
    for logger in ("alembic", "mlflow.store.db", "mlflow.tracking", "mlflow.system_metrics"):
        logging.getLogger(logger).setLevel(logging.WARNING)
    os.environ["MLFLOW_ALLOW_PICKLE_DESERIALIZATION"] = "false"  # nothing from a checkpoint is executed
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # a bar per file, however small
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # two lines per run: `runs.step` prints one


def _check_answers(server: str) -> None:
    """Raise BadInput if a server does not answer, which MLflow's client would try for minutes."""
    try:
        requests.get(server.rstrip("/") + "/health", timeout=15)
    except requests.RequestException as error:
        raise BadInput(
            f"The store {server} does not answer {socket.gethostname()} ({type(error).__name__}): start the server, or "
            "mend the connection, and run the same command again; or set MLFLOW_TRACKING_URI to another store."
        ) from error


def _check_experiment(address: str) -> None:
    """Raise BadInput if MLFLOW_EXPERIMENT_ID names an experiment that the store does not hold."""
    experiment_id = os.environ.get("MLFLOW_EXPERIMENT_ID")
    if not experiment_id:
        return
    try:
        mlflow.MlflowClient().get_experiment(experiment_id)
    except mlflow.MlflowException as error:
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise
        raise BadInput(f"MLFLOW_EXPERIMENT_ID is '{experiment_id}', which {address} does not hold: unset it.") from None


def _absolute(address: str) -> str:
    """Return an address that means the same store in every folder.

    Raises:
        BadInput: the store is in memory, or a folder of files.
    """
    match = _SQLITE.fullmatch(address)
    is_in_memory = address == "sqlite://" or (match and match[2] in ("", ":memory:"))
    if is_in_memory:
        raise BadInput(
            f"The store {address} is in memory, where a command's records end with it: set "
            "MLFLOW_TRACKING_URI=sqlite:///FOLDER/mlflow.db."
        )
    if match:
        dialect, path, options = match.groups()
        return dialect + str(Path(path).absolute()) + options
    if urlsplit(address).scheme not in ("", "file"):
        return address
    path = Path(unquote(address.removeprefix("file://").removeprefix("file:"))).absolute()
    if not os.environ.get("MLFLOW_ALLOW_FILE_STORE"):
        raise BadInput(
            f"The store '{address}' is a folder, but MLflow keeps its records in a database: set "
            f"MLFLOW_TRACKING_URI=sqlite:///{path.parent / 'mlflow.db'} (artifacts then go to mlruns beside it)."
        )
    return path.as_uri()


def _create(address: str, database: Path) -> None:
    """Create tables and the default experiment under a lock: a race on a cold SQLite file breaks it (tried)."""
    if database.is_dir():  # MLflow would try again for minutes
        raise BadInput(f"The store {address} is a folder: set MLFLOW_TRACKING_URI to {address}/mlflow.db.")
    artifacts = database.parent / "mlruns"
    artifacts.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=artifacts) as probe:  # a full disk should fail before the work, not after it
        probe.write(bytes(_PROBE_BYTES))
    with FileLock(lock_path(address, "create"), timeout=120, mode=0o666):
        if not _is_ready(database):
            from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

            SqlAlchemyStore(address, str(artifacts))


def _is_ready(database: Path) -> bool:
    """Return whether the database has its experiments and can be written."""
    if not database.is_file() or database.stat().st_size == 0:
        return False
    with closing(sqlite3.connect(database, timeout=60)) as connection:
        if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'experiments'").fetchone():
            return False
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("CREATE TABLE qrl_write_probe (x)")  # only a real write detects a read-only file
        connection.rollback()
        (count,) = connection.execute("SELECT count(*) FROM experiments").fetchone()
        return count > 0
