"""Errors of the store in one sentence that says what to do: a full disk, a refusal of the server, a deleted run."""

import errno
import os
import re
from pathlib import Path

import mlflow

from qrl.errors import BadInput, QrlError, first_line
from qrl.workspace import LOCKS, OTHER_DISK, WORK

_REQUEST = re.compile(r"/api/2\.0/mlflow(?:-artifacts)?/([\w/-]+)")  # in MLflow's and requests' errors
_FULL_OR_READ_ONLY = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG}
_FREE_FIRST = {
    errno.ENOSPC: "free the disk, or ",
    errno.EDQUOT: "free the disk, or ",
    errno.EFBIG: "raise `ulimit -f`, or ",
}
_RUST_ERROR = re.compile(r"\(os error (\d+)\)")  # safetensors' errors are no OSError
_DELETED = re.compile(r"The (experiment|run) (\S+) must be in the 'active' state")
_DATABASE_ERRORS = (
    "readonly database",
    "database or disk is full",
    "unable to open database",
    "disk I/O error",
    "not a database",
)


def explain(error: BaseException) -> QrlError | None:
    """Return BadInput for a full disk, a store that cannot be written or what was deleted there; None for any other.

    Libraries wrap errors of the store in their own, so the causes of an error are looked at too.
    """
    cause: BaseException | None = error
    while cause is not None:
        explained = _explain_one(cause)
        if explained:
            return explained
        cause = cause.__cause__ or cause.__context__
    return None


def unusable(error: BaseException) -> BadInput:
    """Return the error of a store that cannot be opened or written."""
    reason = _database_error(error)
    if reason is None:
        reason = first_line(error) if str(error).strip() else type(error).__name__
    remedy = "free the disk, or set" if "full" in reason or "I/O" in reason else "set"
    return BadInput(
        f"The store {mlflow.get_tracking_uri()} cannot be used ({reason}): {remedy} MLFLOW_TRACKING_URI to one that "
        "can be opened and written, e.g. sqlite:///FOLDER/mlflow.db."
    )


def _explain_one(error: BaseException) -> QrlError | None:
    """Return the sentence for an error itself, whatever its cause."""
    if isinstance(error, QrlError):
        return error
    rejected = _rejected(error)
    if rejected:
        return rejected
    number = _errno(error)
    if number in _FULL_OR_READ_ONLY:
        target = getattr(error, "filename2", None)  # of a copy
        return _unwritable(number, target or getattr(error, "filename", None))
    if _database_error(error):
        return unusable(error)
    deleted = _DELETED.search(str(error))
    if deleted:
        kind, name = deleted.groups()
        return BadInput(
            f"The {kind} {name} of {mlflow.get_tracking_uri()} was deleted: restore it with `mlflow {kind}s restore "
            f"--{kind}-id {name}`, or set MLFLOW_EXPERIMENT_NAME to another one."
        )
    return None


def _errno(error: BaseException) -> int | None:
    """Return the number of the operating system's error; None if there is none."""
    if isinstance(error, OSError):
        return error.errno
    match = _RUST_ERROR.search(str(error))
    return int(match[1]) if match else None


def _database_error(error: BaseException) -> str | None:
    """Return the database's own words for what is wrong, which are not always in the first line; None without them."""
    message = str(error)
    return next((words for words in _DATABASE_ERRORS if words in message), None)


def _rejected(error: BaseException) -> BadInput | None:
    """Return the error of a server that does not know the user or gives them no right; None for any other error."""
    status = None
    if isinstance(error, mlflow.MlflowException):
        status = error.get_http_status_code()
    status = getattr(getattr(error, "response", None), "status_code", status)
    server = mlflow.get_tracking_uri()
    user = os.environ.get("MLFLOW_TRACKING_USERNAME", "")
    if status == 401:
        rejected = f"the password of {user}" if user else "requests without a user"
        return BadInput(
            f"The server {server} does not accept {rejected}: set MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN."
        )
    if status != 403:
        return None

    match = _REQUEST.search(str(error))
    request = f"the request {match[1]}" if match else "a request"
    if match and match[1].startswith(("registered-models", "model-versions")):
        kind = "registered model"
        remedy = "--registered_name NAME"
    else:
        kind = "experiment"
        remedy = "MLFLOW_EXPERIMENT_NAME=NAME"
    return BadInput(
        f"The server {server} denies {user or 'this user'} {request}: ask for a permission on the {kind} (READ to "
        f"load, EDIT to write), or use one of your own ({remedy})."
    )


def _unwritable(number: int, path: str | None) -> BadInput:
    location = f" at {path}" if path else ""
    remedy = "set MLFLOW_TRACKING_URI"
    if path and _is_in_work(Path(path)):  # work in progress, which no tracking URI moves
        remedy = OTHER_DISK
    return BadInput(f"Nothing can be written{location} ({os.strerror(number)}): {_FREE_FIRST.get(number, '')}{remedy}.")


def _is_in_work(path: Path) -> bool:
    work = WORK.resolve()
    path = path.resolve()
    return path.is_relative_to(work) and not path.is_relative_to(work / LOCKS)
