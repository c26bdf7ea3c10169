"""A folder to work in, held under a lock, deleted when the work is done."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qrl.errors import BadInput

_YOUNG_S = 60  # a temporary folder may not be held yet
WORK = Path(".qrl")  # on the store's file system, as a rule, so that finished weights can be linked into it


@contextmanager
def workspace(name: str, *, keep_on_error: bool = False, shared: bool = False) -> Iterator[Path]:
    """A folder of a step's own, held under a lock and deleted afterwards.

    Args:
        name: the same for a step and its second try.
        keep_on_error: leave it for the second try to go on from, where the step ends early.
        shared: several processes may be at such work at once: each gets a folder of its own, named by its pid.

    Raises:
        BadInput: another process is at this very work, or the place to work in is a file.
    """
    from filelock import FileLock, Timeout

    path = (WORK / (f"{name}-pid{os.getpid()}" if shared else name)).resolve()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise BadInput(f"{path.parent} is a file, but a folder to work in was expected: move it away.") from None
    _sweep(path.parent)
    lock = Path(f"{path}.lock")
    try:
        with FileLock(lock, timeout=0):
            if not keep_on_error:
                shutil.rmtree(path, ignore_errors=True)
            path.mkdir(exist_ok=True)
            kept = keep_on_error
            try:
                yield path
                kept = False
            finally:
                if not kept:
                    shutil.rmtree(path, ignore_errors=True)
                elif path.is_dir() and not any(path.iterdir()):
                    path.rmdir()  # it ended before there was anything to go on from
                if not path.exists():
                    lock.unlink(missing_ok=True)
    except Timeout:
        raise BadInput(f"Another process is at this very work ({path.name}): wait for it, or stop it.") from None


def _sweep(folder: Path) -> None:
    """Deletes what processes left behind that were killed outright; what a second try goes on from has no pid in its name."""
    import psutil

    for lock in folder.glob("*-pid*.lock"):
        pid = re.search(r"-pid([0-9]+)\.lock$", lock.name)
        if pid and not psutil.pid_exists(int(pid[1])):
            shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
            lock.unlink(missing_ok=True)


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a path beside `path` to write to, and rename it to `path` when the block ends without an error.

    A reader, or a process killed half-way, sees the former file or the whole new one.

    Args:
        path: file or folder to appear; its parent folder is made if need be.

    Yields:
        A path that does not exist; deleted where the block raises.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    _delete(partial)
    try:
        yield partial
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):  # the disk may be what failed
            _delete(partial)
        raise


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


class Scratch:
    """A temporary folder, held under a lock while its process lives: of one that was killed outright, the next one of its kind deletes it."""

    def __init__(self, prefix: str) -> None:
        """Args: how the names of such folders begin, and of no others."""
        self._folder = tempfile.TemporaryDirectory(prefix=prefix)
        self.path = Path(self._folder.name)
        self._held = os.open(self.path, os.O_RDONLY)
        fcntl.flock(self._held, fcntl.LOCK_EX)
        for other in self.path.parent.glob(f"{prefix}*"):
            with contextlib.suppress(OSError):  # held, somebody else's, or gone by now
                _delete_if_dead(other)

    def cleanup(self) -> None:
        """Deletes it."""
        self._folder.cleanup()
        os.close(self._held)


def _delete_if_dead(folder: Path) -> None:
    if time.time() - folder.stat().st_mtime < _YOUNG_S:
        return
    held = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(held)
