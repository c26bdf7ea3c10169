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
Load = Callable[[str, bytes], object]  # loads a file, given its path and its text; a function of this package
_lock = threading.Lock()
_pools: dict[tuple, ProcessPool] = {}  # by process id and file: a forked child has its parent's pools without threads
_progress: dict[tuple, Any] = {}  # by the same: how far the latest process has come, a number that it shares
_NOT_STARTED, _LOADING, _LOADED = range(3)


def call_in_process(
    path: str, source: bytes, load: Load, work: Callable, arguments: Sequence[tuple], seconds: float
) -> Iterator[Any]:
    """Yield what `work` returns in a file's process for the path and each tuple of arguments, in order.

    Args:
        path: of the file.
        source: its text.
        load: called once in the process, with the path and the text; it raises nothing.
        work: a function of this package, which raises nothing.
        arguments: N tuples of values that pickle can send.
        seconds: wall time of one call; loading the file does not count.

    Yields:
        N results; `LATE` where the time was over, and a text that says so where the process died in a call.

    Raises:
        BadInput: the process ended while it loaded the file.
        QrlError: it ended as it started, or between two calls: nothing that it did not grade may count as wrong.
    """
    from pebble import ProcessExpired

    key = _key(path, source)
    try:
        pool = _pool(key, path, source, load)
        futures = _scheduled(pool, work, [(path, *values) for values in arguments], seconds)
        for future in futures:
            try:
                yield future.result()
            except FutureTimeoutError:
                yield LATE
            except ProcessExpired as death:
                yield f"its process ended with the exit code {death.exitcode}"
    except BrokenProcessPool:  # it died while it had no call
        error = _death_without_call(path, _progress[key].value)
        close()
        raise error from None
    except GeneratorExit:  # the caller needs no more; it may be collected late, when others use the process
        for future in futures:
            future.cancel()
        raise
    except BaseException:
        close()  # a signal: nobody waits for the rest
        raise


def _scheduled(pool: ProcessPool, work: Callable, arguments: Sequence[tuple], seconds: float) -> list[Future]:
    try:
        return [pool.schedule(work, args=values, timeout=seconds) for values in arguments]
    except RuntimeError as error:  # Pebble's, where the pool broke meanwhile
        raise BrokenProcessPool(str(error)) from error


def _death_without_call(path: str, progress: int) -> QrlError:
    """Return the error for a process that ended while it had no call."""
    if progress == _LOADING:
        causes = "a call of os._exit, a crash in a library, or too little memory"
        return BadInput(f"{path}: the process that calls its functions ended while it loaded the file ({causes}).")
    moment = "as it started, before it loaded the file" if progress == _NOT_STARTED else "between two calls"
    advice = "free memory if it is short, and run the same command again"
    return QrlError(f"{path}: the process that calls its functions ended {moment}: {advice}.")


def _key(path: str, source: bytes) -> tuple:
    return os.getpid(), path, sha256(source).hexdigest()


def _pool(key: tuple, path: str, source: bytes, load: Load) -> ProcessPool:
    """Return the pool of one process for a file, created on first use and again after it broke."""
    from pebble import ProcessPool

    with _lock:
        if key not in _pools or not _pools[key].active:
            context = process.context("spawn")
            _progress[key] = context.RawValue("b", _NOT_STARTED)
            initial = (os.getpid(), path, source, load, _progress[key])
            _pools[key] = ProcessPool(1, initializer=_begin, initargs=initial, context=context)
            process.at_end(close)
        return _pools[key]


def _begin(parent: int, path: str, source: bytes, load: Load, progress: Any) -> None:
    """Prepare a new process: let it die with its parent, whatever the file does, and load the file."""
    process.die_with_parent(parent, signal.SIGKILL)
    progress.value = _LOADING
    load(path, source)
    progress.value = _LOADED
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # ends a call into C at once; a handler of Python's would wait for it


def close() -> None:
    """End the processes; the next call starts new ones."""
    with _lock:
        keys = [key for key in _pools if key[0] == os.getpid()]
        pools = [_pools.pop(key) for key in keys]
    for pool in pools:
        pool.stop()
        pool.join()
