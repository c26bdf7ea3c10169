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


def grade_many(completions: Sequence[str], answers: Sequence[str], progress: Callable[[int], object]) -> list[Verdict]:
    """Return a verdict on each completion; it depends neither on their order nor on the other completions.

    Most answers are graded here, by comparing texts, the rest by algebra in the workers.

    Raises:
        BadInput: a gold answer is empty or too long.
        QrlError: the worker processes do not start.
    """
    claims = [claim(*pair) for pair in zip(completions, answers, strict=True)]
    verdicts = {each: by_text(each) for each in dict.fromkeys(claims)}  # completions often repeat a claim
    hard = [each for each, verdict in verdicts.items() if verdict is None]
    progress(len(claims) - len(hard))
    if hard:
        verdicts |= zip(hard, _grade(hard, progress), strict=True)
    return [verdicts[each] for each in claims]


def _grade(claims: Sequence[Claim], progress: Callable[[int], object]) -> list[Verdict]:
    """Return a verdict on each claim; where the grader failed, it is wrong and has a `fault`."""
    done: dict[int, Verdict] = {}
    left = [list(range(start, min(start + BATCH, len(claims)))) for start in range(0, len(claims), BATCH)]
    try:
        for one_by_one in (False, False, True):
            for batch, verdicts in _round(claims, left, one_by_one):
                done |= zip(batch, verdicts, strict=True)
                progress(len(batch))
            left = [[i] for i in range(len(claims)) if i not in done]
    except BaseException:
        close()  # a signal or a bug: nobody waits for the rest
        raise
    return [done[i] for i in range(len(claims))]


def _round(claims: Sequence[Claim], batches: list[list[int]], one_by_one: bool) -> Iterator[tuple[list, list[Verdict]]]:
    """Grade each batch once; yield those that came back, or that failed alone.

    One by one, a crash of the whole pool can be attributed to the answer at work.
    """
    try:
        scheduled = [(batch, None if one_by_one else _schedule([claims[i] for i in batch])) for batch in batches]
    except BrokenProcessPool:  # the next round grades all; one by one nothing is sent above
        return close()
    for batch, future in scheduled:
        try:
            yield batch, _result(future or _schedule([claims[i] for i in batch]))
        except BrokenProcessPool:
            close()
            if not one_by_one:
                return  # the next round grades the rest
            _check_workers()
            yield batch, [replace(FAILED[ERROR], fault_cause="its process ended")]
        except Exception as error:  # it exceeded its limit, or its worker died or ran out of memory
            if len(batch) == 1:
                timed_out = isinstance(error, FutureTimeoutError) or getattr(error, "exitcode", 0) == -signal.SIGPROF
                cause = f"took longer than {CPU_S:g} s" if timed_out else f"{type(error).__name__}: {first_line(error)}"
                yield batch, [replace(FAILED[TIMEOUT if timed_out else ERROR], fault_cause=cause)]


def _in_worker(function: str, *args: object) -> object:
    return getattr(importlib.import_module(WORKER), function)(*args)


def _schedule(batch: list[Claim]) -> Future[list[Verdict]]:
    """Send a batch to a worker.

    Raises:
        BrokenProcessPool: the pool broke while this was sent, also where Pebble says so in another way.
    """
    if (pool := _pools.get(os.getpid())) is not None and not pool.active:  # e.g. a worker was killed while idle
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
            count, limits = min(len(os.sched_getaffinity(0)), MOST_WORKERS), ("prepare", MEMORY_BYTES)
            pool = ProcessPool(count, initializer=_in_worker, initargs=limits, context=context)
            # The server process gets this package, nothing from the working folder, and a fixed hash seed.
            path = os.pathsep.join(filter(None, (str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH"))))
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
