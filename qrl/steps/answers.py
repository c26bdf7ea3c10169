"""A step's cells answered in several processes at once, where that is faster than one process.

On a CPU, threads that share the small matrices of a small model wait for one another: on two cores of an AMD EPYC two
processes needed 15 % less CPU time than two threads for the same answers, and less wall time on a machine that had
other work to do; on 2 and on 16 cores of an idle Xeon they took as long as threads
(tests/benchmarks/results/study.md). The processes are forked, so they import nothing again, and have one thread each.
They only compute; the step logs.

On a GPU each process holds a vLLM engine (`evaluate/lanes.py`). The step itself must not use the GPU, since a process
that has cannot fork.
"""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from typing import Any

from qrl.errors import QrlError
from qrl.tasks import limits
from qrl.tasks.math import pool
from qrl.tracking import signals

SMALL = 100 << 20  # bytes of weight files, up to which a model is small
_POLL_S = 0.3  # between two looks at a cell's progress

Progress = Callable[[int], object]  # called with the number of answers since the last call
Ask = Callable[[Any, Progress], Any]


def processes(cells: int, largest_bytes: int) -> int:
    """Return how many processes answer cells fastest on a CPU; `largest_bytes` is the size of the largest weights."""
    import torch

    if largest_bytes > SMALL:
        return 1
    return min(cells, torch.get_num_threads())


@contextmanager
def in_processes(ask: Ask, lanes: Sequence[Sequence], count: int = 1) -> Iterator[Ask]:
    """Yield `ask`, or a function like it that waits for a cell's answers while processes ask all cells.

    Args:
        ask: a module's function of a cell and its progress; called in forked processes, or in this one.
        lanes: what may be asked, each cell once; the cells of a lane are asked in order.
        count: number of processes of each lane. One lane with one process is this process.
    """
    if len(lanes) < 2 and count < 2:
        yield ask
        return
    for grader in (pool, limits):  # their threads would not be copied, and a lock that one holds would never open
        grader.close()
    asked = _Asked(ask, lanes, count)
    try:
        yield asked.wait
    finally:
        asked.end()


class _Asked:
    """Cells that forked processes ask, and the answers that have come so far."""

    def __init__(self, ask: Ask, lanes: Sequence[Sequence], count: int) -> None:
        self._cells = [cell for lane in lanes for cell in lane]
        self._answers: dict[int, Any] = {}  # number of a cell → its answers, or the error that they ended in
        self._processes: dict[Connection, Any] = {}  # by the connection to each
        self._connections: list[Connection] = []  # to processes that may send more answers
        self._is_broken = False
        fork = multiprocessing.get_context("fork")
        self._counts = fork.Array("q", len(self._cells))  # answers so far, by cell
        first = 0
        for lane in lanes:
            next_cell = fork.Value("q", first)
            first += len(lane)
            for _ in range(count):
                ours, theirs = fork.Pipe(duplex=False)
                arguments = (ask, self._cells, self._counts, next_cell, first, theirs)
                process = fork.Process(target=_ask_lane, args=arguments, daemon=False)
                process.start()
                theirs.close()  # so that the pipe ends with the process
                self._processes[ours] = process
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
                process = self._processes[connection]
                process.join()
                self._is_broken |= process.exitcode != 0
                self._connections.remove(connection)
            else:
                self._answers[number] = answers

    def end(self) -> None:
        """End all processes."""
        for process in self._processes.values():
            process.kill()  # Python drops a SIGTERM that reaches a process between its fork and its first line
        for process in self._processes.values():
            process.join()


def in_fork(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function returns in a forked process, such as one that uses the GPU, after which none can fork.

    Raises:
        Exception: whatever the function raised.
        BrokenProcessPool: the process was killed.
    """
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, fork, signals.die_with_parent) as executor:
        return executor.submit(function, *arguments).result()


def _ask_lane(ask: Ask, cells: Sequence, counts: Any, next_cell: Any, end: int, connection: Connection) -> None:
    """Ask cells in a forked process until none is left of its lane, and send the answers of each, or its error.

    Args:
        ask: as for `in_processes`.
        cells: of all lanes.
        counts: answers so far, by cell.
        next_cell: number of the lane's next cell, shared by its processes.
        end: the number after the lane's last cell.
        connection: to send pairs of a cell's number and its answers.
    """
    import torch

    signals.die_with_parent()
    torch.set_num_threads(1)  # more could wait forever for threads that a fork does not copy
    while True:
        with next_cell.get_lock():
            number = next_cell.value
            next_cell.value += 1
        if number >= end:
            return

        def progress(n: int, number: int = number) -> None:
            counts[number] += n

        try:
            answers = ask(cells[number], progress)
        except Exception as error:  # raised in the step's process
            answers = error
        connection.send((number, answers))
