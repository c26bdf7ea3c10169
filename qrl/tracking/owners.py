"""The process that owns a run: which one it is, when it began, and whether it is gone.

A run carries its process's identity in the tag `qrl.pid`, so that a later command can end the run of one that died.
"""

import os
import socket
import time

import psutil

_TOLERANCE_S = 2  # between two readings of when a process began


def this_process() -> str:
    """Return host:pid:start of this process; the start in whole seconds since the machine's.

    It is not counted in seconds since the epoch: a clock that is set would move it.
    """
    return f"{socket.gethostname()}:{os.getpid()}:{_since_boot_s(psutil.Process()):.0f}"


def is_dead(identity: str) -> bool:
    """Return True if a process of this host is surely gone; False if it lives, is elsewhere or cannot be read."""
    host, *numbers = identity.rsplit(":", 2)
    if host != socket.gethostname() or len(numbers) != 2 or not all(number.isdigit() for number in numbers):
        return False
    pid, start = map(int, numbers)
    try:
        process = psutil.Process(pid)
        actual_start = _since_boot_s(process)
        status = process.status()
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False
    is_reused_pid = abs(actual_start - start) > _TOLERANCE_S
    return status == psutil.STATUS_ZOMBIE or is_reused_pid


def launcher_alive(run_started: float) -> bool:
    """Return whether a process of this host could have opened a run at `run_started`, in seconds since the epoch."""
    for process in psutil.process_iter(["cmdline", "create_time"]):
        words = {os.path.basename(word) for word in process.info["cmdline"] or ()}
        runs_projects = {"mlflow", "run"} <= words or "qrl" in words
        if runs_projects and (process.info["create_time"] or 0) <= run_started + _TOLERANCE_S:
            return True
    return False


def started_at() -> float:
    """Return when this process began, in seconds since the epoch, before interpreter and imports were loaded."""
    started = psutil.Process().create_time()
    if hasattr(time, "CLOCK_BOOTTIME"):  # Linux: psutil adds the boot time in whole seconds, up to one second too early
        started += time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) - psutil.boot_time()
    return started


def _since_boot_s(process: psutil.Process) -> float:
    # psutil adds the boot time to what the kernel says; both move with the clock, their difference does not.
    return process.create_time() - psutil.boot_time()
