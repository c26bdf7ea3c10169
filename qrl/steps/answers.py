"""A step's cells answered in several processes at once, where that is faster than one process with all threads.

Threads that share the small matrices of a small model wait for one another: on two cores of an AMD EPYC two processes
needed 15 % less CPU time than two threads for the same answers, and less wall time still beside other work; on 2 and on
16 cores of an idle Xeon they took as long as threads (tests/benchmarks/results/study.md). The processes are forked, so
they import nothing anew, and have one thread each. They compute alone; the step logs.
"""

import concurrent.futures
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

from qrl.errors import QrlError
from qrl.tasks import limits
from qrl.tasks.math import pool
from qrl.tracking import signals

SMALL = 100 << 20  # bytes of weight files, up to which a model is small
_POLL_S = 0.3  # between two looks at a cell's progress

Progress = Callable[[int], object]  # called with the number of answers since the last call
Ask = Callable[[Any, Progress], Any]
_counts: Any = None  # answers finished of each cell, shared by the processes; set in each of them


def processes(cells: int, size: int) -> int:
    """Return how many processes answer cells of a CPU fastest; `size` is in bytes, of the largest cell's weights."""
    import torch

    return min(cells, torch.get_num_threads()) if size <= SMALL else 1


@contextmanager
def in_processes(ask: Ask, cells: Sequence, count: int) -> Iterator[Ask]:
    """Yield `ask`, or a function like it that waits for a cell's answers while processes ask all cells in order.

    Args:
        ask: a module's function of a cell and its progress; called in `count` processes, or in this one.
        cells: what may be asked, each once.
        count: number of processes; 1 is this one.
    """
    if count < 2:
        yield ask
        return
    for grader in (pool, limits):  # their threads would not be copied, and a lock that one holds would never open
        grader.close()
    fork = multiprocessing.get_context("fork")
    counts = fork.Array("q", len(cells))
    executor = concurrent.futures.ProcessPoolExecutor(count, fork, _begin, (counts,))
    try:
        futures = [executor.submit(_ask_there, ask, number, cell) for number, cell in enumerate(cells)]

        def wait(cell: Any, progress: Progress) -> Any:
            number = next(i for i, one in enumerate(cells) if one is cell)
            done, seen = False, 0
            while not done:
                done = bool(concurrent.futures.wait([futures[number]], timeout=_POLL_S).done)
                progress(counts[number] - seen)
                seen = counts[number]
            try:
                return futures[number].result()
            except BrokenProcessPool:
                raise QrlError(
                    "A process that answered cells was ended from outside, as the system does where memory is short: "
                    "free some, or set OMP_NUM_THREADS=1 for one process, and run the same command again."
                ) from None

        yield wait
    finally:
        for child in multiprocessing.active_children():
            child.kill()  # Python drops a SIGTERM that reaches a process between its fork and its first line
        executor.shutdown(cancel_futures=True)


def _begin(counts: Any) -> None:
    import torch

    global _counts  # noqa: PLW0603
    _counts = counts
    signals.die_with_parent()
    torch.set_num_threads(1)  # more could wait forever for threads that a fork does not copy


def _ask_there(ask: Ask, number: int, cell: Any) -> Any:
    def progress(n: int) -> None:
        _counts[number] += n

    return ask(cell, progress)
