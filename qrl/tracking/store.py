"""Where MLflow keeps its records: made absolute for children, created once, tried before work begins.

The default is MLflow's own, untouched: `./mlflow.db` and `./mlruns`, which a bare `mlflow ui` shows.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path
from urllib.parse import unquote, urlsplit

from qrl import names
from qrl.errors import BadInput, QrlError
from qrl.tracking import models, signals
from qrl.workspace import WORK

_SQLITE = "sqlite:///"
_EXPERIMENT_KIND = "mlflow.experimentKind"
_FULL_OR_READ_ONLY = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG}
_RUST_SAYS = re.compile(r"\(os error (\d+)\)")  # safetensors' errors are no OSError
_DATABASE_SAYS = (
    "readonly database",
    "database or disk is full",
    "unable to open database",
    "disk I/O error",
    "not a database",
)


def prepare() -> str:
    """Make the store ready for this process and its children.

    Honours MLFLOW_TRACKING_URI and MLFLOW_REGISTRY_URI, relative addresses counted from the working directory.

    Returns:
        The store's absolute address, which MLFLOW_TRACKING_URI now holds too.

    Raises:
        BadInput: the store cannot be reached, opened or written.
    """
    import mlflow

    _quiet()
    os.environ["MLFLOW_ALLOW_PICKLE_DESERIALIZATION"] = "false"  # nothing from a checkpoint is executed
    address = _absolute(mlflow.get_tracking_uri())
    mlflow.set_tracking_uri(address)  # sets the environment variable too
    if registry := os.environ.get("MLFLOW_REGISTRY_URI"):
        mlflow.set_registry_uri(_absolute(registry))
        os.environ["MLFLOW_REGISTRY_URI"] = _absolute(registry)
    try:
        if database := database_of(address):
            os.environ.setdefault(
                "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false"
            )  # nothing is downloaded from a folder
            _create(address, database)
        elif urlsplit(address).scheme in ("http", "https"):
            _reach(address)
        mlflow.MlflowClient().search_experiments(max_results=1)
    except Exception as error:
        raise sentence(error) or _unusable(error) from error
    return address


def is_there() -> bool:
    """Whether anything can have been recorded yet: the store's database is a file, or the store is no such file."""
    import mlflow

    database = database_of(_absolute(mlflow.get_tracking_uri()))
    return database is None or database.is_file()


def database_of(address: str) -> Path | None:
    """The file behind an address like sqlite:////folder/mlflow.db; None for every other store."""
    return Path(unquote(address.removeprefix(_SQLITE))) if address.startswith(_SQLITE) else None


def sweep() -> list[str]:
    """End as KILLED what still counts as RUNNING although its process on this host is dead.

    Returns:
        Ids of the runs that were ended.
    """
    import mlflow

    client = mlflow.MlflowClient()
    running = mlflow.search_runs(
        filter_string="attributes.status = 'RUNNING'", search_all_experiments=True, output_format="list"
    )
    ended = []
    for run in running:
        if _is_abandoned(run):
            client.set_tag(
                run.info.run_id, names.TAG_REASON, "Its process died without a word; the next command ended it."
            )
            client.set_terminated(run.info.run_id, "KILLED")
            models.abandon(run.info.experiment_id, run.info.run_id)
            ended.append(run.info.run_id)
    return ended


def mark_experiment(experiment_id: str) -> None:
    """Tell the UI that this is model development, where nobody has said what it is."""
    import mlflow

    client = mlflow.MlflowClient()
    if _EXPERIMENT_KIND not in client.get_experiment(experiment_id).tags:
        client.set_experiment_tag(experiment_id, _EXPERIMENT_KIND, "custom_model_development")


def _number(error: BaseException) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    return int(found[1]) if (found := _RUST_SAYS.search(str(error))) else None


def _unwritable(number: int, path: str | None) -> BadInput:
    where = f" at {path}" if path else ""
    here = path and WORK.name in Path(path).parts  # work in progress, which no tracking URI moves
    help_ = "start qrl from a folder on another disk" if here else "set MLFLOW_TRACKING_URI"
    return BadInput(f"Nothing can be written{where} ({os.strerror(number)}): free the disk, or {help_}.")


def sentence(error: BaseException) -> QrlError | None:
    """BadInput for an error that means a full disk or a store that cannot be written; None for any other."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, QrlError):
            return cause
        if (number := _number(cause)) in _FULL_OR_READ_ONLY:
            return _unwritable(
                number, getattr(cause, "filename2", None) or getattr(cause, "filename", None)
            )  # of a copy, the second was written
        if any(words in str(cause) for words in _DATABASE_SAYS):
            return _unusable(cause)
        cause = cause.__cause__ or cause.__context__
    return None


def _absolute(address: str) -> str:
    if address.startswith(_SQLITE):
        path, _, query = address.removeprefix(_SQLITE).partition("?")
        return _SQLITE + str(Path(path).absolute()) + (f"?{query}" if query else "")
    scheme = urlsplit(address).scheme
    if scheme in ("", "file"):
        path = Path(unquote(address.removeprefix("file://").removeprefix("file:"))).absolute()
        if not os.environ.get("MLFLOW_ALLOW_FILE_STORE"):
            raise BadInput(
                f"The store '{address}' is a folder, but MLflow keeps its records in a database: set "
                f"MLFLOW_TRACKING_URI=sqlite:///{path.parent / 'mlflow.db'} (artifacts then lie in mlruns beside it)."
            )
        return path.as_uri()
    return address


def _create(address: str, database: Path) -> None:
    """Create tables and the default experiment under a lock: racing on a cold SQLite file breaks it (ran)."""
    from filelock import FileLock

    artifacts = database.parent / "mlruns"
    artifacts.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=artifacts) as probe:  # a full disk should speak before the work, not after it
        probe.write(bytes(1 << 20))
    with FileLock(f"{database}.lock", timeout=120):
        if not _is_made(database):
            from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

            SqlAlchemyStore(address, str(artifacts))


def _is_made(database: Path) -> bool:
    """True where the database has its experiments and takes a write."""
    if not database.is_file() or database.stat().st_size == 0:
        return False
    with closing(sqlite3.connect(database, timeout=60)) as connection:
        try:
            made = connection.execute("SELECT count(*) FROM experiments").fetchone()[0] > 0
        except sqlite3.OperationalError as error:
            if "no such table" in str(error):
                return False
            raise
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("CREATE TABLE qrl_write_probe (x)")  # rolled back: only a real write finds a read-only file
        connection.rollback()
    return made


def _reach(address: str) -> None:
    """One short try: MLflow's client itself would go on for minutes."""
    import requests

    requests.get(address.rstrip("/") + "/health", timeout=15)


def _unusable(error: BaseException) -> BadInput:
    import mlflow

    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return BadInput(
        f"The store {mlflow.get_tracking_uri()} cannot be used ({first_line}): set MLFLOW_TRACKING_URI to one that can be "
        "opened and written, sqlite:///FOLDER/mlflow.db for example."
    )


def _is_abandoned(run) -> bool:
    from qrl import __file__ as package

    tags = run.data.tags
    if owner := tags.get(names.TAG_PID):
        return signals.is_dead(owner)
    # Opened by `mlflow run` on this project, and never reached by us: it may be building an environment still.
    source = tags.get("mlflow.source.name", "").replace("#", "/").removeprefix("file://")
    ours = source == (root := str(Path(package).parents[1])) or source.startswith(root + os.sep)
    return ours and "mlflow.project.entryPoint" in tags and not signals.launcher_alive(run.info.start_time / 1000)


def _quiet() -> None:
    for name in ("alembic", "mlflow.store.db", "mlflow.tracking", "mlflow.system_metrics"):
        logging.getLogger(name).setLevel(logging.WARNING)
