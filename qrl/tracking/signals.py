"""A process that receives a stop signal unwinds, so that its run can be ended; imports nothing heavy.

SIGINT, SIGTERM and SIGHUP become the exception `Stopped`. A process that `mlflow run` started also requests SIGTERM
from the kernel for its parent's death, because MLflow dies of a signal without passing it on.
"""

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from types import FrameType

import psutil

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_LONGEST_BOOT = 10**9  # seconds; more are since the epoch


class Stopped(KeyboardInterrupt):
    """A stop signal; a KeyboardInterrupt, so that `mlflow.projects.run` stops its own child and waits for it."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"Stopped by {signal.Signals(signum).name}.")
        self.code = 128 + signum


def exit_code(error: KeyboardInterrupt) -> int:
    """Return 128 + the signal's number: 130 for Ctrl-C, 143 for SIGTERM."""
    return getattr(error, "code", 128 + signal.SIGINT)


def guard() -> None:
    """Turn stop signals into `Stopped`; call it early. It may be called again, and does nothing off the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return
    owner, stopping = os.getpid(), False

    def stop(signum: int, _frame: FrameType | None) -> None:
        nonlocal stopping
        if os.getpid() != owner:  # a forked worker inherits the handler, but not the run
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
            return
        # Ctrl-C reaches a whole process group, and MLflow then sends SIGTERM as well: unwind once, undisturbed. The
        # second signal may arrive during this handler, since `signal.signal` runs the handlers of pending signals.
        if stopping:
            return
        stopping = True
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(signum)

    for signum in _SIGNALS:
        if signal.getsignal(signum) is not signal.SIG_IGN:  # ignored on purpose, as `nohup` does
            signal.signal(signum, stop)
    if os.environ.get("MLFLOW_RUN_ID"):
        die_with_parent()


def import_mlflow() -> None:
    """Import MLflow with stop signals blocked: a half-imported MLflow could not end the run that waits for us."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        import mlflow  # noqa: F401
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def die_with_parent() -> None:
    """Ask the kernel for SIGTERM at the parent's death, however it dies; on Linux alone."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before the request
        os.kill(os.getpid(), signal.SIGTERM)


def identity() -> str:
    """Return host:pid:start of this process, in whole seconds since the machine's: a clock that is set moves others."""
    return f"{socket.gethostname()}:{os.getpid()}:{_since_boot(psutil.Process()):.0f}"


def _since_boot(process: psutil.Process) -> float:
    return process.create_time() - psutil.boot_time()  # which psutil adds; both move with the clock


def started() -> float:
    """Return when this process began, in seconds since the epoch, before interpreter and imports were loaded."""
    began = psutil.Process().create_time()
    if hasattr(time, "CLOCK_BOOTTIME"):  # Linux: psutil adds the boot time in whole seconds, up to one second too early
        began += time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) - psutil.boot_time()
    return began


def is_dead(identity: str) -> bool:
    """Return True if a process of this host is surely gone; False if it lives, is elsewhere or cannot be read."""
    host, *numbers = identity.rsplit(":", 2)
    if host != socket.gethostname() or len(numbers) != 2 or not all(number.isdigit() for number in numbers):
        return False
    pid, start = map(int, numbers)
    try:
        process = psutil.Process(pid)
        started = process.create_time() if start > _LONGEST_BOOT else _since_boot(process)  # of a former store
        status = process.status()
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False
    return status == psutil.STATUS_ZOMBIE or abs(started - start) > 2  # pids are reused


def launcher_alive(started: float) -> bool:
    """Return whether a process of this host could have opened a run at `started` (seconds since the epoch)."""
    for process in psutil.process_iter(["cmdline", "create_time"]):
        words = {os.path.basename(word) for word in process.info["cmdline"] or ()}
        runs_projects = {"mlflow", "run"} <= words or "qrl" in words
        if runs_projects and (process.info["create_time"] or 0) <= started + 2:
            return True
    return False
