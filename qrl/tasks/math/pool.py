"""A pool of worker processes that grade answers, with limits of CPU time and memory that no expression can evade.

Pebble manages the processes: it replaces those that die and ends those that hang. They are forked from a small server
process that has imported sympy but neither torch nor CUDA. They start at the first answer that needs one, and end with
this process.
"""

from __future__ import annotations

import importlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from qrl import process
from qrl.errors import QrlError, first_line
from qrl.tasks.math.verdict import Claim, by_text, claim
from qrl.tasks.question import Verdict
from qrl.tasks.thinking import TAGS, Tags

if TYPE_CHECKING:
    from pebble import ProcessPool

WORKER = "qrl.tasks.math.worker"  # imported in the workers only
CPU_S = 3.0  # for one answer; typical ones need a few milliseconds
WALL_S = 120.0  # for a batch; reached only by a worker that does not even use its CPU time
MEMORY_BYTES = 2 << 30  # address space of a worker
BATCH = 16  # answers sent together; if one exceeds its limit, the batch is graded again one by one to find it
MOST_WORKERS = 16
TIMEOUT, ERROR = "timeout", "error"
FAILED = {fault: Verdict(None, False, False, fault) for fault in (TIMEOUT, ERROR)}

_lock = threading.Lock()
_pools: dict[int, ProcessPool] = {}  # by process id: a forked child has its parent's pool object, but not its threads


def grade_many(
    completions: Sequence[str], answers: Sequence[str], progress: Callable[[int], object], tags: Tags = TAGS
) -> list[Verdict]:
    """Return a verdict on each completion; it depends neither on their order nor on the other completions.

    Most answers are graded here, by comparing texts, the rest by algebra in the workers.

    Raises:
        BadInput: a gold answer is empty or too long.
        QrlError: the worker processes do not start.
    """
    claims = [claim(completion, answer, tags) for completion, answer in zip(completions, answers, strict=True)]
    verdicts = {distinct: by_text(distinct) for distinct in dict.fromkeys(claims)}  # completions often repeat a claim
    undecided = [distinct for distinct, verdict in verdicts.items() if verdict is None]
    progress(len(claims) - len(undecided))
    if undecided:
        verdicts |= zip(undecided, _grade(undecided, progress), strict=True)
    return [verdicts[stated] for stated in claims]


def _grade(claims: Sequence[Claim], progress: Callable[[int], object]) -> list[Verdict]:
    """Return a verdict on each claim; where the grader failed, it is wrong and has a `fault`.

    A batch that fails does not say which of its claims is to blame. So the first round grades batches, the second those
    claims that are left, each in a batch of its own, and the last one the rest, one after the other: by then, a pool
    that breaks was broken by the one claim that it had.
    """
    verdicts: dict[int, Verdict] = {}
    batches = [list(range(start, min(start + BATCH, len(claims)))) for start in range(0, len(claims), BATCH)]
    try:
        for one_by_one in (False, False, True):
            for batch, batch_verdicts in _round(claims, batches, one_by_one):
                verdicts |= zip(batch, batch_verdicts, strict=True)
                progress(len(batch))
            batches = [[index] for index in range(len(claims)) if index not in verdicts]
    except BaseException:
        close()  # a signal or a bug: nobody waits for the rest
        raise
    return [verdicts[index] for index in range(len(claims))]


def _round(
    claims: Sequence[Claim], batches: list[list[int]], one_by_one: bool
) -> Iterator[tuple[list[int], list[Verdict]]]:
    """Grade each batch once; yield those that came back, or that failed alone.

    One by one, a crash of the whole pool can be attributed to the answer at work.
    """
    futures: list[Future | None] = [None] * len(batches)
    if not one_by_one:
        try:
            futures = [_schedule([claims[index] for index in batch]) for batch in batches]
        except BrokenProcessPool:
            close()
            return  # the next round grades all
    for batch, future in zip(batches, futures, strict=True):
        try:
            yield batch, _result(future or _schedule([claims[index] for index in batch]))
        except BrokenProcessPool:
            close()
            if not one_by_one:
                return  # the next round grades the rest
            _check_workers()
            yield batch, [replace(FAILED[ERROR], fault_cause="its process ended")]
        except Exception as error:  # it exceeded its limit, or its worker died or ran out of memory
            if len(batch) == 1:
                yield batch, [_fault(error)]


def _fault(error: Exception) -> Verdict:
    """Return the verdict on an answer that ended its worker: it took too long, or raised an error."""
    if isinstance(error, FutureTimeoutError) or getattr(error, "exitcode", 0) == -signal.SIGPROF:
        return replace(FAILED[TIMEOUT], fault_cause=f"took longer than {CPU_S:g} s")
    return replace(FAILED[ERROR], fault_cause=f"{type(error).__name__}: {first_line(error)}")


def _in_worker(function: str, *args: object) -> object:
    return getattr(importlib.import_module(WORKER), function)(*args)


def _schedule(batch: list[Claim]) -> Future[list[Verdict]]:
    """Send a batch to a worker.

    Raises:
        BrokenProcessPool: the pool broke while this was sent, also where Pebble says so in another way.
    """
    existing_pool = _pools.get(os.getpid())
    if existing_pool is not None and not existing_pool.active:  # e.g. a worker was killed while idle
        close()
    pool = _pool()  # outside of `try`: what keeps the server process from starting must end this one
    try:
        return pool.schedule(_in_worker, args=("grade", batch, CPU_S), timeout=WALL_S)
    except RuntimeError as error:
        raise BrokenProcessPool(str(error)) from error


def _result(future: Future[list[Verdict]]) -> list[Verdict]:
    """Wait for a batch; a pool that breaks may forget what it was about to send, so it is looked at every second.

    Raises:
        BrokenProcessPool: the pool broke.
        Exception: Pebble's, where the batch exceeded a limit or its worker died.
    """
    while True:
        try:
            return future.result(timeout=1)
        except FutureTimeoutError:
            if future.done():  # just now, or with the batch's own limit
                return future.result()
            pool = _pools.get(os.getpid())
            if pool is None or not pool.active:
                raise BrokenProcessPool("The pool of workers broke while a batch was sent.") from None


def _pool() -> ProcessPool:
    """Return this process's pool, created on first use."""
    with _lock:
        if os.getpid() not in _pools:
            from pebble import ProcessPool

            context = process.context("forkserver")
            context.set_forkserver_preload([WORKER])
            workers = min(len(os.sched_getaffinity(0)), MOST_WORKERS)
            pool = ProcessPool(workers, initializer=_in_worker, initargs=("prepare", MEMORY_BYTES), context=context)
            # The server process gets this package, nothing from the working folder, and a fixed hash seed.
            package_root = str(Path(__file__).parents[3])
            path = os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))
            with process.variables(PYTHONPATH=path, PYTHONSAFEPATH="1", PYTHONHASHSEED="0"):
                pool.schedule(_in_worker, args=("grade", [], CPU_S))  # starts the server and the workers
            _pools[os.getpid()] = pool
            process.at_end(close)
        return _pools[os.getpid()]


def close() -> None:
    """End the workers; the next answer that needs one starts new ones."""
    with _lock:
        pool = _pools.pop(os.getpid(), None)
    if pool is not None:
        pool.stop()
        pool.join()


def _check_workers() -> None:
    try:
        _result(_schedule([]))
    except BrokenProcessPool:
        close()
        raise QrlError(
            "The processes that grade mathematics end as they start: each of them needs "
            f"{MEMORY_BYTES >> 30} GiB of address space, which `ulimit -v` or a container may forbid."
        ) from None
