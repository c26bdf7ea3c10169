"""A folder to work in, held under a lock, deleted when the work is done."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qrl.errors import BadInput

WORK = Path(".qrl")  # on the store's file system, as a rule, so that finished weights can be linked into it


@contextmanager
def workspace(name: str, *, keep_on_error: bool = False) -> Iterator[Path]:
    """A folder of a step's own, held under a lock and deleted afterwards.

    Args:
        name: the same for a step and its second try.
        keep_on_error: leave it for the second try to go on from, where the step ends early.

    Raises:
        BadInput: another process is at this very work.
    """
    from filelock import FileLock, Timeout

    path = (WORK / name).resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(f"{path}.lock", timeout=0):
            if not keep_on_error:
                shutil.rmtree(path, ignore_errors=True)
            path.mkdir(exist_ok=True)
            try:
                yield path
            except BaseException:
                if not keep_on_error:
                    shutil.rmtree(path, ignore_errors=True)
                raise
            shutil.rmtree(path, ignore_errors=True)
        Path(f"{path}.lock").unlink(missing_ok=True)
    except Timeout:
        raise BadInput(f"Another process is at this very work ({path.name}): wait for it, or stop it.") from None
