"""Claims on pieces of work: of several commands of this machine that need the same step, one runs it.

A claim is a lock on a file of the store (`store.lock_path`).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import mlflow
from filelock import FileLock, Timeout

from qrl.tracking import store


@contextmanager
def claimed(work: Iterable[str], say_waiting: Callable[[], object]) -> Iterator[None]:
    """Hold the right to do pieces of work in this store; wait while other processes of this host hold one.

    Args:
        work: a name for each; all are held in one order, so that two processes never wait for each other.
        say_waiting: called once, before the first wait.
    """
    address = mlflow.get_tracking_uri()
    has_waited = False
    with ExitStack() as claims:
        for name in sorted(set(work)):
            path = store.lock_path(address, store.short_hash(name))
            lock = FileLock(path, mode=0o666)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                if not has_waited:
                    say_waiting()
                has_waited = True
                lock.acquire()
            claims.callback(lock.release)
            claims.callback(_unlink, path)  # runs before the release: whoever waits for it opens a new file
        yield


def _unlink(path: Path) -> None:
    with suppress(OSError):  # another user's, in a folder where only they may delete it
        path.unlink()
