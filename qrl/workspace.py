"""Folders to work in, held under a lock and deleted afterwards; files and folders that appear whole or not at all."""

import contextlib
import fcntl
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from qrl import names, process
from qrl.errors import BadInput

DYING_S = 10  # how long a process that was told to stop may hold a folder: a study that was killed leaves such steps
_YOUNG_S = 60  # a younger temporary folder may not be locked yet
NAME = ".qrl"  # of the folder that is ours, in a working folder or beside a database
# In the working folder, which is normally on the store's file system, so that finished weights can be linked there.
# `process.prepare_process` sets the variable where the working folder is a temporary one.
WORK = Path(os.environ.get(process.WORK) or NAME)
LOCKS = "locks"  # the folder beside a database in which are the locks of its store
OTHER_DISK = f"set {process.WORK}, or start qrl from a folder on another disk"


@contextmanager
def workspace(name: str, *, keep_on_error: bool = False, shared: bool = False) -> Iterator[Path]:
    """Yield a folder for one step, held under a lock and deleted afterwards.

    Args:
        name: the same for a step and its retry.
        keep_on_error: keep the folder if the step fails, for a retry to resume from.
        shared: several processes may do such work at once; each gets a folder of its own.

    Raises:
        BadInput: another process does this very work, or the folder to work in is a file.
    """
    from filelock import FileLock, Timeout

    path = (WORK / (f"{name}-by-{_writer()}" if shared else name)).resolve()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise BadInput(f"{path.parent} is a file, but a folder to work in was expected: move it away.") from None
    _delete_leftovers(path.parent)
    lock = Path(f"{path}.lock")
    try:
        with FileLock(lock, timeout=DYING_S, poll_interval=0.2):
            if not keep_on_error:
                shutil.rmtree(path, ignore_errors=True)
            path.mkdir(exist_ok=True)
            succeeded = False
            try:
                yield path
                succeeded = True
            finally:
                has_files = path.is_dir() and any(path.iterdir())  # an empty folder has nothing to resume from
                if succeeded or not keep_on_error or not has_files:
                    shutil.rmtree(path, ignore_errors=True)
                if not path.exists():
                    lock.unlink(missing_ok=True)
    except Timeout:
        raise BadInput(f"Another process is doing this very work ({path.name}): wait for it, or stop it.") from None


def _delete_leftovers(folder: Path) -> None:
    """Delete what killed processes left; a folder that is kept for a retry has no process in its name."""
    for lock in folder.glob("*-by-*.lock"):
        if _is_gone(lock.stem.rpartition("-by-")[2]):
            shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
            lock.unlink(missing_ok=True)


def _writer() -> str:
    """Return a name of this process that is unique among the hosts that share the folder."""
    return f"{sha256(socket.gethostname().encode()).hexdigest()[:8]}-{os.getpid()}"


def _is_gone(writer: str) -> bool:
    """Return whether a `_writer` was a process of this host and has ended."""
    import psutil

    host, _, pid = writer.partition("-")
    this_host, _, _ = _writer().partition("-")
    return host == this_host and pid.isdecimal() and not psutil.pid_exists(int(pid))


def free_bytes(folder: Path) -> int:
    """Return the free space, in bytes, of the disk that holds a folder or will hold it."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def check_space(folder: Path, size: int, what: str) -> None:
    """Raise BadInput if a folder's disk lacks the space for `size` bytes, which `what` is about to write there."""
    free = free_bytes(folder)
    if free < size:
        raise BadInput(
            f"{what} needs {size / 1e9:.2g} GB, but {folder.absolute()} has {free / 1e9:.2g} GB free: free the disk, "
            f"{OTHER_DISK}."
        )


@contextmanager
def write_atomically(path: Path) -> Iterator[Path]:
    """Yield a path in the same folder to write to, and rename it to `path` when the block ends without an error.

    A reader sees the previous file or the whole new one, also if this process is killed half-way.

    Args:
        path: file or folder to appear; its parent folder is made if need be.

    Yields:
        A path that does not exist; deleted if the block raises.

    Raises:
        BadInput: `path` is a device or a pipe.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise BadInput(f"{path} is a device or a pipe, and would be replaced by a file: give another path.")
    path.parent.mkdir(parents=True, exist_ok=True)
    # The writer's name keeps two writers apart; the file of the later one stays.
    partial = path.with_name(f".{path.name}.{_writer()}.partial")
    _delete(partial)
    try:
        for leftover in partials(path):
            writer = leftover.name.split(".")[-2]
            if _is_gone(writer):
                _delete(leftover)
        yield partial
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):  # the disk may be what failed
            _delete(partial)
        raise


def partials(path: Path) -> list[Path]:
    """Return the partial files of `write_atomically` for a path: those being written, and those of killed processes."""
    if not path.parent.is_dir():
        return []
    pattern = re.compile(re.escape(f".{path.name}.") + r"[0-9a-f]{8}-\d+\.partial")
    return [sibling for sibling in path.parent.iterdir() if pattern.fullmatch(sibling.name)]


@contextmanager
def written(out: Path, what: str, texts: dict[str, str]) -> Iterator[Path]:
    """Write each text to its file, whole or not at all; yield the folder for figures.

    Raises:
        BadInput: the file system refuses to write.
    """
    try:
        (out / names.FIGURES).mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            with write_atomically(out / name) as path:
                path.write_text(text, encoding="utf-8")
        yield out / names.FIGURES
    except OSError as error:
        raise BadInput(
            f"The {what} cannot be written to {out} ({error.strerror or error}): "
            "give a folder that is writable and has space."
        ) from None


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


class Scratch:
    """A temporary folder, locked while its process lives; the next of its kind deletes what killed processes left."""

    def __init__(self, prefix: str) -> None:
        """Make the folder; `prefix` starts the names of this kind of folder, and of no other."""
        self._folder = tempfile.TemporaryDirectory(prefix=prefix)
        self.path = Path(self._folder.name)
        self._lock = os.open(self.path, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        for folder in self.path.parent.glob(f"{prefix}*"):
            with contextlib.suppress(OSError):  # locked, another user's, or gone by now
                _delete_if_dead(folder)

    def cleanup(self) -> None:
        """Delete the folder."""
        self._folder.cleanup()
        os.close(self._lock)


def _delete_if_dead(folder: Path) -> None:
    if time.time() - folder.stat().st_mtime < _YOUNG_S:
        return
    lock = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
