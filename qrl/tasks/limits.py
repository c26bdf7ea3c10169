"""Functions of the user's files, called in a process of their own, which a limit of time ends whatever they do.

A signal cannot interrupt a call into C, such as one long multiplication, nor reach another thread than the main one.
The process is started afresh, so that it shares no lock and no GPU with this one; it ends with this process.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from qrl import process

if TYPE_CHECKING:
    from pebble import ProcessPool

LATE = object()  # in place of a result: the time was over
_lock = threading.Lock()
_pools: dict[tuple, ProcessPool] = {}  # by process id and file: a forked child has its parent's pools without threads


def called(path: str, source: bytes, work: Callable, arguments: Sequence[tuple], seconds: float) -> Iterator[Any]:
    """Yield what `work` returns in a file's process for the path and each tuple of arguments, in order.

    Args:
        path: of the file.
        source: its text, which the process loads.
        work: a function of this package, which raises nothing.
        arguments: N tuples, whatever pickle takes.
        seconds: wall time of one call; loading the file does not count.

    Yields:
        N results; `LATE` where the time was over, and a text that says so where the process died.
    """
    from pebble import ProcessExpired

    pool = _pool(path, source)
    futures = [pool.schedule(work, args=(path, *each), timeout=seconds) for each in arguments]
    try:
        for future in futures:
            try:
                yield future.result()
            except FutureTimeoutError:
                yield LATE
            except ProcessExpired as died:
                yield f"its process ended with the exit code {died.exitcode}"
            except BrokenProcessPool:  # it died before it took the call, while it loaded the file
                yield "its process ended before it was called"
    except BaseException:
        close()  # a signal: nobody waits for the rest
        raise


def _pool(path: str, source: bytes) -> ProcessPool:
    from pebble import ProcessPool

    key = (os.getpid(), path, sha256(source).hexdigest())
    with _lock:
        if key not in _pools or not _pools[key].active:
            context = multiprocessing.get_context("spawn")
            _pools[key] = ProcessPool(1, initializer=_begin, initargs=(os.getpid(), path, source), context=context)
            process.at_end(close)
        return _pools[key]


def _begin(parent: int, path: str, source: bytes) -> None:
    """Die with the process that asked, whatever the file does, and load the file."""
    from qrl.tasks import own

    process.die_with_parent(parent, signal.SIGKILL)
    own.begin(path, source)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # ends a call into C at once; a handler of Python's would wait for it


def close() -> None:
    """End the processes; the next call starts new ones."""
    with _lock:
        mine = [_pools.pop(key) for key in list(_pools) if key[0] == os.getpid()]
    for pool in mine:
        pool.stop()
        pool.join()
