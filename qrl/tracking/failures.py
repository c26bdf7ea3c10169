"""Errors of a full disk or an unusable store, as one sentence that says what to do."""

import errno
import os
import re
from pathlib import Path

import mlflow

from qrl.errors import BadInput, QrlError, first_line
from qrl.workspace import WORK

_FULL_OR_READ_ONLY = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG}
_RUST_ERROR = re.compile(r"\(os error (\d+)\)")  # safetensors' errors are no OSError
_DATABASE_ERRORS = (
    *("readonly database", "database or disk is full", "unable to open database", "disk I/O error", "not a database"),
)


def sentence(error: BaseException) -> QrlError | None:
    """Return BadInput for an error that means a full disk or a store that cannot be written; None for any other."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, QrlError):
            return cause
        rust = _RUST_ERROR.search(str(cause))
        number = cause.errno if isinstance(cause, OSError) else int(rust[1]) if rust else None
        if number in _FULL_OR_READ_ONLY:  # of a copy, the second file was written
            return _unwritable(number, getattr(cause, "filename2", None) or getattr(cause, "filename", None))
        if any(words in str(cause) for words in _DATABASE_ERRORS):
            return unusable(cause)
        cause = cause.__cause__ or cause.__context__
    return None


def unusable(error: BaseException) -> BadInput:
    """Return the error of a store that cannot be opened or written."""
    reason = first_line(error) if str(error).strip() else type(error).__name__
    return BadInput(
        f"The store {mlflow.get_tracking_uri()} cannot be used ({reason}): set MLFLOW_TRACKING_URI to one that can be "
        "opened and written, e.g. sqlite:///FOLDER/mlflow.db."
    )


def _unwritable(number: int, path: str | None) -> BadInput:
    where = f" at {path}" if path else ""
    in_work = path and WORK.name in Path(path).parts  # work in progress, which no tracking URI moves
    remedy = "start qrl from a folder on another disk" if in_work else "set MLFLOW_TRACKING_URI"
    return BadInput(f"Nothing can be written{where} ({os.strerror(number)}): free the disk, or {remedy}.")
