"""Where MLflow keeps its records: the address is made absolute for children, the store created once and tried first.

The default is MLflow's own: `./mlflow.db` and `./mlruns`, which a bare `mlflow ui` shows. Errors of a full disk or an
unusable store become one sentence that says what to do.
"""

import errno
import logging
import os
import re
import shutil
import socket
import sqlite3
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from urllib.parse import unquote, urlsplit

import mlflow
import requests
from filelock import FileLock, Timeout
from mlflow.entities import Run, RunInfo

from qrl import names
from qrl.errors import BadInput, QrlError, first_line
from qrl.tracking import contents, keys, models, signals
from qrl.workspace import WORK

TAG_JOB = "qrl.job.id"  # of a run that is a job of a cluster, see qrl/cluster
DIED = "Its process died without a report: it was killed, or memory ran out."
_SQLITE = re.compile(r"(sqlite(?:\+\w+)?:///)([^?]*)(.*)", re.DOTALL)  # dialect, path, options such as ?timeout=60
_REQUEST = re.compile(r"/api/2\.0/mlflow(?:-artifacts)?/([\w/-]+)")  # in MLflow's and requests' errors
_FULL_OR_READ_ONLY = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG}
_RUST_ERROR = re.compile(r"\(os error (\d+)\)")  # safetensors' errors are no OSError
_DELETED = re.compile(r"The (experiment|run) (\S+) must be in the 'active' state")
_DATABASE_ERRORS = (
    *("readonly database", "database or disk is full", "unable to open database", "disk I/O error", "not a database"),
)


def prepare() -> str:
    """Make the store ready for this process and its children, and return its absolute address.

    Honours MLFLOW_TRACKING_URI and MLFLOW_REGISTRY_URI, relative addresses counted from the working directory.
    MLFLOW_TRACKING_URI then holds the absolute address.

    Raises:
        BadInput: the store cannot be reached, opened or written.
    """
    for logger in ("alembic", "mlflow.store.db", "mlflow.tracking", "mlflow.system_metrics"):
        logging.getLogger(logger).setLevel(logging.WARNING)
    os.environ["MLFLOW_ALLOW_PICKLE_DESERIALIZATION"] = "false"  # nothing from a checkpoint is executed
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # a bar per file, however small
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # two lines per run: `runs.step` prints one
    address = _absolute(mlflow.get_tracking_uri())
    mlflow.set_tracking_uri(address)  # sets the environment variable too
    if registry := os.environ.get("MLFLOW_REGISTRY_URI"):
        mlflow.set_registry_uri(_absolute(registry))
        os.environ["MLFLOW_REGISTRY_URI"] = _absolute(registry)
    try:
        if database := database_of(address):
            _create(address, database)
        elif urlsplit(address).scheme in ("http", "https"):
            _ask(address)
        mlflow.MlflowClient().search_experiments(max_results=1)
        _check_experiment(address)
    except Exception as error:
        raise sentence(error) or unusable(error) from error
    return address


def _ask(server: str) -> None:
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
    if number := os.environ.get("MLFLOW_EXPERIMENT_ID"):
        try:
            mlflow.MlflowClient().get_experiment(number)
        except mlflow.MlflowException as error:
            if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                raise
            raise BadInput(f"MLFLOW_EXPERIMENT_ID is '{number}', which {address} does not hold: unset it.") from None


def sentence(error: BaseException) -> QrlError | None:
    """Return BadInput for a full disk, a store that cannot be written or what was deleted there; None for any other."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, QrlError):
            return cause
        if rejected := _rejected(cause):
            return rejected
        rust = _RUST_ERROR.search(str(cause))
        number = cause.errno if isinstance(cause, OSError) else int(rust[1]) if rust else None
        if number in _FULL_OR_READ_ONLY:  # of a copy, the second file was written
            return _unwritable(number, getattr(cause, "filename2", None) or getattr(cause, "filename", None))
        if any(words in str(cause) for words in _DATABASE_ERRORS):
            return unusable(cause)
        if deleted := _DELETED.search(str(cause)):
            return BadInput(
                f"The {deleted[1]} {deleted[2]} of {mlflow.get_tracking_uri()} was deleted: restore it with `mlflow "
                f"{deleted[1]}s restore --{deleted[1]}-id {deleted[2]}`, or set MLFLOW_EXPERIMENT_NAME to another one."
            )
        cause = cause.__cause__ or cause.__context__
    return None


def unusable(error: BaseException) -> BadInput:
    """Return the error of a store that cannot be opened or written."""
    known = next((words for words in _DATABASE_ERRORS if words in str(error)), None)  # not in the first line always
    reason = known or (first_line(error) if str(error).strip() else type(error).__name__)
    remedy = "free the disk, or set" if "full" in reason or "I/O" in reason else "set"
    return BadInput(
        f"The store {mlflow.get_tracking_uri()} cannot be used ({reason}): {remedy} MLFLOW_TRACKING_URI to one that "
        "can be opened and written, e.g. sqlite:///FOLDER/mlflow.db."
    )


def _rejected(error: BaseException) -> BadInput | None:
    """Return the error of a server that does not know the user or gives them no right; None for any other error."""
    response, server = getattr(error, "response", None), mlflow.get_tracking_uri()
    status = error.get_http_status_code() if isinstance(error, mlflow.MlflowException) else None
    status = getattr(response, "status_code", status)
    user = os.environ.get("MLFLOW_TRACKING_USERNAME", "")
    if status == 401:
        return BadInput(
            f"The server {server} does not accept {f'the password of {user}' if user else 'requests without a user'}: "
            "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN."
        )
    if status != 403:
        return None
    request = _REQUEST.search(str(error))
    registry = request and request[1].startswith(("registered-models", "model-versions"))
    what = "registered model" if registry else "experiment"
    own = "--registered_name NAME" if registry else "MLFLOW_EXPERIMENT_NAME=NAME"
    asked = f"the request {request[1]}" if request else "a request"
    return BadInput(
        f"The server {server} denies {user or 'this user'} {asked}: ask for a permission on the {what} (READ to load, "
        f"EDIT to write), or use one of your own ({own})."
    )


def _unwritable(number: int, path: str | None) -> BadInput:
    where = f" at {path}" if path else ""
    in_work = path and WORK.name in Path(path).parts  # work in progress, which no tracking URI moves
    elsewhere = "start qrl from a folder on another disk" if in_work else "set MLFLOW_TRACKING_URI"
    first = {
        errno.ENOSPC: "free the disk, or ",
        errno.EDQUOT: "free the disk, or ",
        errno.EFBIG: "raise `ulimit -f`, or ",
    }
    return BadInput(f"Nothing can be written{where} ({os.strerror(number)}): {first.get(number, '')}{elsewhere}.")


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
    parts = _SQLITE.fullmatch(address)
    return Path(unquote(parts[2])) if parts else None


def sweep() -> list[str]:
    """Give every run whose process on this host died its end, KILLED, and its reason; return the ended runs.

    Such a run still counts as RUNNING, or `mlflow run` called it FAILED without a reason. It also calls FAILED whatever
    a signal ended, a server that had done its work or a study that had ended its run as KILLED: these are put right.
    """
    ours = f" and tags.`{names.TAG_PID}` != ''"
    untold = running(f"{ours} and tags.`{names.TAG_REASON}` IS NULL", status="FAILED")
    stopped = running(f"{ours} and tags.`{names.TAG_EXIT_CODE}` LIKE '1__'", status="FAILED")  # 130, 143: by a signal
    ended = []
    if shutil.which("scontrol"):
        from qrl.cluster import jobs  # which imports this file

        ended = jobs.settle_all("slurm:%")
    for run in filter(_is_abandoned, [*running(), *untold, *stopped]):
        with suppress(mlflow.MlflowException):  # another user's, on a server that does not let us end it
            done, told = names.SECONDS in run.data.metrics, names.TAG_EXIT_CODE in run.data.tags
            if run.info.status == "FAILED" and (done or told):
                status = "FINISHED" if done else "KILLED"
                mlflow.MlflowClient().set_terminated(run.info.run_id, status, run.info.end_time)
            else:
                end_dead(run.info)
                ended.append(run.info.run_id)
    return ended


def running(more: str = "", status: str = "RUNNING") -> list[Run]:
    """Return the runs of all experiments that have a status, and whatever `more` of a query asks for."""
    query = f"attributes.status = '{status}'{more}"
    return mlflow.search_runs(filter_string=query, search_all_experiments=True, output_format="list")


@contextmanager
def claimed(work: Iterable[str], waiting: Callable[[], object]) -> Iterator[None]:
    """Hold the right to do pieces of work in this store; wait while other processes of this host hold one.

    Args:
        work: a name for each; all are held in one order, so that two processes never wait for each other.
        waiting: called once, before the first wait.
    """
    address = mlflow.get_tracking_uri()
    place = str(
        database_of(address) or Path(tempfile.gettempdir()) / f"qrl-{sha256(address.encode()).hexdigest()[:16]}"
    )
    with ExitStack() as held:
        for name in sorted(set(work)):
            path = f"{place}.{sha256(name.encode()).hexdigest()[:16]}.lock"
            lock = FileLock(path, mode=0o666)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                waiting()
                waiting = lambda: None  # noqa: E731
                lock.acquire()
            held.callback(lock.release)
            held.callback(_unlink, Path(path))  # before the release: who waits for it opens a new file
        yield


def _unlink(path: Path) -> None:
    with suppress(OSError):  # another user's, in a folder where only they may delete it
        path.unlink()


def end_dead(run: RunInfo, reason: str = DIED, status: str = "KILLED") -> None:
    """End a run whose process died, and discard the models that it left half-made."""
    contents.tag_run(run.run_id, {names.TAG_REASON: reason})
    mlflow.MlflowClient().set_terminated(run.run_id, status)
    models.abandon(run.run_id)


def _absolute(address: str) -> str:
    if address == "sqlite://" or ((parts := _SQLITE.fullmatch(address)) and parts[2] in ("", ":memory:")):
        raise BadInput(
            f"The store {address} is in memory, where a command's records end with it: set "
            "MLFLOW_TRACKING_URI=sqlite:///FOLDER/mlflow.db."
        )
    if parts:
        return parts[1] + str(Path(parts[2]).absolute()) + parts[3]
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
        probe.write(bytes(1 << 20))
    with FileLock(f"{database}.lock", timeout=120):
        if not _is_ready(database):
            from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

            SqlAlchemyStore(address, str(artifacts))


def _is_ready(database: Path) -> bool:
    """Whether the database has its experiments and can be written."""
    if not database.is_file() or database.stat().st_size == 0:
        return False
    with closing(sqlite3.connect(database, timeout=60)) as connection:
        if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'experiments'").fetchone():
            return False
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("CREATE TABLE qrl_write_probe (x)")  # only a real write detects a read-only file
        connection.rollback()
        return connection.execute("SELECT count(*) FROM experiments").fetchone()[0] > 0


def _is_abandoned(run: Run) -> bool:
    tags = run.data.tags
    if TAG_JOB in tags:  # the cluster knows
        return False
    if owner := tags.get(names.TAG_PID):
        return signals.is_dead(owner)
    # `mlflow run` opened it for this project, and no step has joined it: the environment may still be being built.
    source = tags.get("mlflow.source.name", "").replace("#", "/").removeprefix("file://")
    ours = Path(source).is_relative_to(keys.ROOT)
    return ours and "mlflow.project.entryPoint" in tags and not signals.launcher_alive(run.info.start_time / 1000)
