"""A walk through the matrices of checkpoints in blocks of rows, on as many threads as torch would use.

Each thread works on rows of its own with operations that are not split further: a block fits into a processor's cache,
and an operation on one ends before a second thread could be woken for it.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import groupby
from pathlib import Path
from typing import TypeVar

import torch

from qrl.checkpoint.header import Entry
from qrl.checkpoint.stream import Rows

T = TypeVar("T")
Sources = Sequence[tuple[Path | str, Entry]]  # the same matrix in one or more checkpoints
BLOCK = {"cpu": 1 << 20, "cuda": 1 << 24}  # weights processed together
PIECE = 1 << 23  # weights, at most, in one thread's share
GPU_READERS = 4  # threads that feed a GPU


def sweep(
    matrices: Sequence[tuple[str, Sources]],
    start: Callable[[str], T],
    add: Callable[..., object],
    *,
    device: str = "cpu",
) -> Iterator[tuple[str, T]]:
    """Feed every matrix, block by block, into an accumulator with a method `merge`.

    Do not nest two sweeps: the inner one has one thread.

    Args:
        matrices: name and, for each checkpoint, folder and entry of the matrix (O, I).
        start: makes an empty accumulator for a name.
        add: called with an accumulator, the number of the first row, and the rows (R, I) from each checkpoint, as
            stored.
        device: where the rows are to be.

    Yields:
        Each name with its complete accumulator, in the order of `matrices`.
    """
    pieces = []
    for name, sources in matrices:
        _, entry = sources[0]
        pieces += [(name, sources, rows) for rows in _pieces(entry, BLOCK[device])]
    with _pool(device) as (run, reader, stream):

        def work(piece: tuple[str, Sources, range]) -> tuple[str, T]:
            name, sources, rows = piece
            accumulator = start(name)
            with stream():
                for first in rows:
                    last = min(first + rows.step, rows.stop)
                    blocks = [reader(i, folder).read(entry, first, last) for i, (folder, entry) in enumerate(sources)]
                    add(accumulator, first, *blocks)
            return name, accumulator

        # `map` keeps the order, so the parts of a matrix follow each other, whichever thread was first.
        for name, parts in groupby(run(work, pieces), key=lambda part: part[0]):
            total = start(name)
            for _, part in parts:
                total.merge(part)
            yield name, total


def _pieces(entry: Entry, block: int) -> Iterator[range]:
    """Yield each thread's share as a range of rows, in steps of a block's rows."""
    rows, width = entry.shape
    step = max(1, block // max(width, 1))
    share = step * max(1, PIECE // max(step * width, 1))
    for first in range(0, rows, share):
        yield range(first, min(first + share, rows), step)


@contextmanager
def _pool(device: str) -> Iterator[tuple[Callable, Callable, Callable]]:
    """Yield a `map` over all threads, and each thread's own reader of a folder and queue on a GPU."""
    of_thread = threading.local()
    all_readers: list[Rows] = []

    def reader(source: int, folder: Path | str) -> Rows:
        # A reader has one buffer, which its next read overwrites: each thread has its own for each source.
        readers = of_thread.__dict__.setdefault("readers", {})
        if (source, folder) not in readers:
            readers[source, folder] = Rows(folder, device)
            all_readers.append(readers[source, folder])
        return readers[source, folder]

    def stream() -> AbstractContextManager:
        """Let one thread's block be measured while another's is read."""
        if device == "cpu":
            return nullcontext()
        if "stream" not in of_thread.__dict__:
            of_thread.stream = torch.cuda.Stream()
        return torch.cuda.stream(of_thread.stream)

    torch_threads = torch.get_num_threads()
    threads = GPU_READERS if device == "cuda" else torch_threads
    torch.set_num_threads(1)  # here too: a second thread of torch's would occupy a core that a reader could use
    executor = None
    if threads > 1:
        executor = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield (executor.map if executor else map), reader, stream
    finally:
        if executor:
            executor.shutdown(cancel_futures=True)
        torch.set_num_threads(torch_threads)
        for rows in all_readers:
            rows.close()
