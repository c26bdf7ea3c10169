"""A step's cells answered in several processes at once, where that is faster than one process with all threads.

Threads that share the small matrices of a small model wait for one another: on two cores of an AMD EPYC two processes
needed 15 % less CPU time than two threads for the same answers, and less wall time on a machine that had other work to
do; on 2 and on 16 cores of an idle Xeon they took as long as threads (tests/benchmarks/results/study.md). The processes
are forked, so they import nothing again, and have one thread each. They only compute; the step logs.
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
_answer_counts: Any = None  # finished answers of each cell, shared by the processes; set in each of them


def processes(cells: int, largest_bytes: int) -> int:
    """Return how many processes answer cells fastest on a CPU; `largest_bytes` is the size of the largest weights."""
    import torch

    if largest_bytes > SMALL:
        return 1
    return min(cells, torch.get_num_threads())


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
    answer_counts = fork.Array("q", len(cells))
    executor = concurrent.futures.ProcessPoolExecutor(count, fork, _begin, (answer_counts,))
    try:
        futures = [executor.submit(_ask_in_process, ask, index, cell) for index, cell in enumerate(cells)]

        def wait(cell: Any, progress: Progress) -> Any:
            index = next(i for i, candidate in enumerate(cells) if candidate is cell)
            reported = 0
            is_done = False
            while not is_done:
                is_done = bool(concurrent.futures.wait([futures[index]], timeout=_POLL_S).done)
                progress(answer_counts[index] - reported)
                reported = answer_counts[index]
            try:
                return futures[index].result()
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


def _begin(answer_counts: Any) -> None:
    """Prepare a forked process."""
    import torch

    global _answer_counts  # noqa: PLW0603
    _answer_counts = answer_counts
    signals.die_with_parent()
    torch.set_num_threads(1)  # more could wait forever for threads that a fork does not copy


def _ask_in_process(ask: Ask, index: int, cell: Any) -> Any:
    """Ask one cell in a forked process."""

    def progress(n: int) -> None:
        _answer_counts[index] += n

    return ask(cell, progress)
