"""A pool of worker processes that judge answers, with limits of CPU time and memory that hold against any expression.

Pebble keeps the processes: it replaces those that die, and ends those that hang. They are forked from a small server process
that has imported sympy but neither torch nor CUDA, start at the first answer that needs one, and end with this process.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING

from qrl.errors import QrlError
from qrl.tasks.grade import Verdict
from qrl.tasks.math.rule import Asked

if TYPE_CHECKING:
    from pebble import ProcessPool

CPU_S = 3.0  # for one answer; typical ones take a few milliseconds
WALL_S = 120.0  # for a batch: only a worker that does not even use its CPU time meets it
MEMORY_BYTES = 2 << 30  # address space of a worker
BATCH = 16  # answers that travel together; one of them over its limit is found by judging the batch anew, one by one
MOST_WORKERS = 16
TIMEOUT, ERROR = "timeout", "error"


def judge(asked: Sequence[Asked], progress: Callable[[int], object] = lambda n: None) -> list[Verdict]:
    """Verdicts in the order asked; one that cannot be reached is wrong and carries its `fault`.

    Args:
        asked: N answers.
        progress: called with the number of verdicts reached since.

    Raises:
        QrlError: no worker starts.
    """
    done: dict[int, Verdict] = {}
    left = [list(range(start, min(start + BATCH, len(asked)))) for start in range(0, len(asked), BATCH)]
    try:
        for careful in (False, False, True):
            for batch, found in _round(asked, left, careful):
                done |= zip(batch, found, strict=True)
                progress(len(batch))
            left = [[i] for i in range(len(asked)) if i not in done]
    except BaseException:
        close()  # a signal or a bug: nobody waits for the rest
        raise
    return [done[i] for i in range(len(asked))]


def _round(
    asked: Sequence[Asked], batches: list[list[int]], careful: bool
) -> Iterator[tuple[list[int], list[Verdict]]]:
    """Judges each batch once and yields those that came back, or that failed alone.

    Args:
        careful: one after the other, so that a break of the whole pool can be blamed on the answer at work.
    """
    scheduled = [(batch, None if careful else _schedule([asked[i] for i in batch])) for batch in batches]
    for batch, future in scheduled:
        try:
            found = (future or _schedule([asked[i] for i in batch])).result()
            yield batch, [verdict or _failed(ERROR) for verdict in found]
        except BrokenProcessPool:
            close()
            if careful:
                _check_workers()
                yield batch, [_failed(ERROR)]
            else:
                return  # the next round judges what is left
        except Exception as error:  # over its limit, or its worker died or ran out of memory
            if len(batch) == 1:
                over = isinstance(error, FutureTimeoutError) or getattr(error, "exitcode", 0) == -signal.SIGPROF
                yield batch, [_failed(TIMEOUT if over else ERROR)]


def _failed(fault: str) -> Verdict:
    return Verdict(None, False, False, fault)


def _judge(batch: list[Asked], cpu_s: float) -> list[Verdict | None]:
    from qrl.tasks.math import judge as math_judge

    return math_judge.judge(batch, cpu_s)


def _prepare(memory_bytes: int) -> None:
    from qrl.tasks.math import judge as math_judge

    math_judge.prepare(memory_bytes)


def _schedule(batch: list[Asked]) -> Future[list[Verdict | None]]:
    return _workers.pool().schedule(_judge, args=(batch, CPU_S), timeout=WALL_S)


class _Workers:
    """The pool of this process, made when it is asked for."""

    def __init__(self) -> None:
        self.lock, self.made, self.owner = threading.Lock(), None, 0

    def pool(self) -> ProcessPool:
        with self.lock:
            if (
                self.made is None or self.owner != os.getpid()
            ):  # a forked child has the pool's object, but not its threads
                from pebble import ProcessPool

                context = multiprocessing.get_context("forkserver")
                context.set_forkserver_preload(["qrl.tasks.math.judge"])
                count = min(len(os.sched_getaffinity(0)), MOST_WORKERS)
                limits = (MEMORY_BYTES,)
                self.made = ProcessPool(count, initializer=_prepare, initargs=limits, context=context)
                self.owner = os.getpid()
                with _environment():
                    self.made.schedule(_judge, args=([], CPU_S))  # starts the server and the workers
            return self.made

    def close(self) -> None:
        with self.lock:
            pool, self.made = self.made, None
        if pool is not None and self.owner == os.getpid():
            pool.stop()
            pool.join()


_workers = _Workers()


@atexit.register
def close() -> None:
    """Ends the workers; the next answer that needs one starts new ones."""
    _workers.close()


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """What the server process starts with: this package and no other of the working directory, and one order of sets."""
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH"))))
    wanted = {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "PYTHONHASHSEED": "0"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _check_workers() -> None:
    try:
        _schedule([]).result()
    except BrokenProcessPool:
        close()
        raise QrlError(
            "The processes that grade mathematics end as they start: a script of your own that grades needs "
            "`if __name__ == '__main__':` around what it runs, and a machine needs room for "
            f"{MEMORY_BYTES >> 30} GiB of address space a process."
        ) from None
