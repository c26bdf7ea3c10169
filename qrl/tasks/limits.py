"""Functions of the user's files, called in a process of their own, which a limit of time ends whatever they do.

A signal cannot interrupt a call into C, such as one long multiplication, nor reach another thread than the main one.
The process is started afresh, so that it shares no lock and no GPU with this one; it ends with this process.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from qrl import process
from qrl.errors import BadInput, QrlError

if TYPE_CHECKING:
    from pebble import ProcessPool

LATE = object()  # in place of a result: the time was over
_lock = threading.Lock()
_pools: dict[tuple, ProcessPool] = {}  # by process id and file: a forked child has its parent's pools without threads
_progress: dict[tuple, Any] = {}  # by the same: how far the latest process has come, a number that it shares
_NOT_STARTED, _LOADING, _LOADED = range(3)


def called(path: str, source: bytes, work: Callable, arguments: Sequence[tuple], seconds: float) -> Iterator[Any]:
    """Yield what `work` returns in a file's process for the path and each tuple of arguments, in order.

    Args:
        path: of the file.
        source: its text, which the process loads.
        work: a function of this package, which raises nothing.
        arguments: N tuples, whatever pickle takes.
        seconds: wall time of one call; loading the file does not count.

    Yields:
        N results; `LATE` where the time was over, and a text that says so where the process died in a call.

    Raises:
        BadInput: the process ended while it loaded the file.
        QrlError: it ended as it started, or between two calls: nothing that it did not grade may count as wrong.
    """
    from pebble import ProcessExpired

    try:
        pool = _pool(path, source)
        futures = _scheduled(pool, [(work, (path, *each)) for each in arguments], seconds)
        for future in futures:
            try:
                yield future.result()
            except FutureTimeoutError:
                yield LATE
            except ProcessExpired as died:
                yield f"its process ended with the exit code {died.exitcode}"
    except BrokenProcessPool:  # it died while it had no call
        ended = _ended(path, source)
        close()
        raise ended from None
    except BaseException:
        close()  # a signal: nobody waits for the rest
        raise


def _scheduled(pool: ProcessPool, calls: Sequence[tuple[Callable, tuple]], seconds: float) -> list[Future]:
    try:
        return [pool.schedule(work, args=arguments, timeout=seconds) for work, arguments in calls]
    except RuntimeError as error:  # as Pebble tells that the pool broke meanwhile
        raise BrokenProcessPool(str(error)) from error


def _ended(path: str, source: bytes) -> QrlError:
    """Return why a process ended that had no call."""
    progress = _progress[_key(path, source)].value
    if progress == _LOADING:
        causes = "a call of os._exit, a crash in a library, or too little memory"
        return BadInput(f"{path}: the process that calls its functions ended while it loaded the file ({causes}).")
    when = "as it started, before it loaded the file" if progress == _NOT_STARTED else "between two calls"
    advice = "free memory if it is short, and run the same command again"
    return QrlError(f"{path}: the process that calls its functions ended {when}: {advice}.")


def _key(path: str, source: bytes) -> tuple:
    return os.getpid(), path, sha256(source).hexdigest()


def _pool(path: str, source: bytes) -> ProcessPool:
    from pebble import ProcessPool

    key = _key(path, source)
    with _lock:
        if key not in _pools or not _pools[key].active:
            context = process.context("spawn")
            _progress[key] = context.RawValue("b", _NOT_STARTED)
            given = (os.getpid(), path, source, _progress[key])
            _pools[key] = ProcessPool(1, initializer=_begin, initargs=given, context=context)
            process.at_end(close)
        return _pools[key]


def _begin(parent: int, path: str, source: bytes, progress: Any) -> None:
    """Die with the process that asked, whatever the file does, and load the file."""
    from qrl.tasks import own

    process.die_with_parent(parent, signal.SIGKILL)
    progress.value = _LOADING
    own.begin(path, source)
    progress.value = _LOADED
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # ends a call into C at once; a handler of Python's would wait for it


def close() -> None:
    """End the processes; the next call starts new ones."""
    with _lock:
        mine = [_pools.pop(key) for key in list(_pools) if key[0] == os.getpid()]
    for pool in mine:
        pool.stop()
        pool.join()
