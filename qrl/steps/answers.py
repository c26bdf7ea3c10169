"""A step's cells answered in several processes at once, where that is faster than one process.

On a CPU, threads that share the small matrices of a small model wait for one another: on two cores of an AMD EPYC two
processes needed 15 % less CPU time than two threads for the same answers, and less wall time on a machine that had
other work to do; on 2 and on 16 cores of an idle Xeon they took as long as threads
(tests/benchmarks/results/study.md). The processes are forked, so they import nothing again, and have one thread each.
They only compute; the step logs.

On a GPU each cell has a process of its own, with a vLLM engine (`evaluate/engines.py`). The step itself must not use
the GPU, since a process that has cannot fork.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from typing import Any

from qrl import process
from qrl.errors import QrlError
from qrl.tasks import limits
from qrl.tasks.math import pool

SMALL = 100 << 20  # bytes of weight files, up to which a model is small
_POLL_S = 0.3  # between two looks at a cell's progress
_FORK = multiprocessing.get_context("fork")

Progress = Callable[[int], object]  # called with the number of answers since the last call
Ask = Callable[[Any, Progress], Any]


def processes(cells: int, largest_bytes: int) -> int:
    """Return how many processes answer cells fastest on a CPU; `largest_bytes` is the size of the largest weights."""
    import torch

    if largest_bytes > SMALL:
        return 1
    return min(cells, torch.get_num_threads())


@contextmanager
def in_processes(ask: Ask, cells: Sequence, count: int, *, fresh: bool = False) -> Iterator[Ask]:
    """Yield `ask`, or a function like it that waits for a cell's answers while processes ask all cells in order.

    Args:
        ask: a function of a cell and its progress; called in `count` forked processes, or in this one.
        cells: what may be asked, each once.
        count: number of processes; 1 is this one.
        fresh: ask each cell in a process of its own, `count` of them at a time.
    """
    if count < 2:
        yield ask
        return
    for grader in (pool, limits):  # their threads would not be copied, and a lock that one holds would never open
        grader.close()
    asked = _Asked(ask, cells, count, fresh=fresh)
    try:
        yield asked.wait
    finally:
        asked.end()


class _Asked:
    """Cells that forked processes ask, and the answers that have come so far."""

    def __init__(self, ask: Ask, cells: Sequence, count: int, *, fresh: bool) -> None:
        self._cells = cells
        self._answers: dict[int, Any] = {}  # number of a cell → its answers, or the error that they ended in
        self._children: dict[Connection, Any] = {}  # by the connection to each
        self._connections: list[Connection] = []  # to processes that may send more answers
        self._is_broken = False
        self._counts = _FORK.Array("q", len(cells))  # answers so far, by cell
        next_cell = _FORK.Value("q", 0)
        for _ in range(count):
            ours, theirs = _FORK.Pipe(duplex=False)
            work = _Work(ask, cells, self._counts, next_cell, theirs)
            child = _FORK.Process(target=work.ask_each if fresh else work.ask_all)
            child.start()
            theirs.close()  # so that the pipe ends with the process
            self._children[ours] = child
            self._connections.append(ours)

    def wait(self, cell: Any, progress: Progress) -> Any:
        """Wait for a cell's answers, and return them or raise the error that they ended in."""
        number = next(number for number, candidate in enumerate(self._cells) if candidate is cell)
        reported = 0
        while number not in self._answers:
            if self._is_broken or not self._connections:
                raise QrlError(
                    "A process that answered cells was ended from outside, as the system does where memory is short: "
                    "free some, or set OMP_NUM_THREADS=1 for one process, and run the same command again."
                )
            self._receive()
            progress(self._counts[number] - reported)
            reported = self._counts[number]
        progress(self._counts[number] - reported)  # they may have come while another cell was waited for
        answers = self._answers.pop(number)
        if isinstance(answers, BaseException):
            raise answers
        return answers

    def _receive(self) -> None:
        """Take what processes send within a moment."""
        for connection in wait_for(self._connections, timeout=_POLL_S):
            try:
                number, answers = connection.recv()
            except EOFError:  # the process is done, or dead
                child = self._children[connection]
                child.join()
                self._is_broken |= child.exitcode != 0
                self._connections.remove(connection)
            else:
                self._answers[number] = answers

    def end(self) -> None:
        """End all processes."""
        for child in self._children.values():
            child.kill()  # Python drops a SIGTERM that reaches a process between its fork and its first line
        for child in self._children.values():
            child.join()


def in_fork(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function returns in a forked process, such as one that uses the GPU, after which none can fork.

    Raises:
        Exception: whatever the function raised.
        BrokenProcessPool: the process was killed.
    """
    with ProcessPoolExecutor(1, _FORK, process.die_with_parent) as executor:
        return executor.submit(function, *arguments).result()


@dataclass(frozen=True)
class _Work:
    """What a forked process does: it asks the next cell until none is left, and sends the answers of each."""

    ask: Ask
    cells: Sequence
    counts: Any  # answers so far, by cell
    next_cell: Any  # number of the next cell, shared by all processes
    connection: Connection  # to send pairs: a cell's number, and its answers or the error that they ended in

    def ask_all(self) -> None:
        """Ask cells in this process."""
        _begin()
        for number in self._numbers():
            self._ask(number)

    def ask_each(self) -> None:
        """Ask each cell in a fresh process, which takes along what it has allocated, on a GPU too."""
        _begin()
        for number in self._numbers():
            child = _FORK.Process(target=self._ask_and_exit, args=(number,))
            child.start()
            child.join()
            if child.exitcode:
                sys.exit(1)

    def _numbers(self) -> Iterator[int]:
        while True:
            with self.next_cell.get_lock():
                number = self.next_cell.value
                self.next_cell.value += 1
            if number >= len(self.cells):
                return
            yield number

    def _ask_and_exit(self, number: int) -> None:
        _begin(signal.SIGKILL)  # an engine may be in a long call when the step ends
        self._ask(number)
        os._exit(0)  # an engine that goes with its process needs no end of its own

    def _ask(self, number: int) -> None:
        def progress(n: int) -> None:
            self.counts[number] += n

        try:
            answers = self.ask(self.cells[number], progress)
        except Exception as error:  # raised in the step's process
            answers = error
        self.connection.send((number, answers))


def _begin(at_end: signal.Signals = signal.SIGTERM) -> None:
    """Prepare a forked process, which gets a signal when its parent ends."""
    import torch

    parent = multiprocessing.parent_process()
    process.die_with_parent(parent.pid if parent and parent.pid else 0, at_end)
    process.hush_transformers()
    torch.set_num_threads(1)  # more could wait forever for threads that a fork does not copy
