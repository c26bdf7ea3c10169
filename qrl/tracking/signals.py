"""A process that receives a stop signal unwinds, so that its run can be ended; imports nothing heavy.

SIGINT, SIGTERM and SIGHUP become the exception `Stopped`. It would leave half a module behind where something is being
imported, and code may swallow it, as a weak reference's callback does, or wait for an engine that died. In these cases
the process ends where it stands (`end_now`): it kills its children and waits until they are gone, since freeing a GPU
takes a moment. If it has a run (`note_run`), a fresh interpreter in its place ends that, too. A step that another
command of ours launched leaves its runs to that command, which has imported MLflow already, and notes for it which
signal it was.

A process that `mlflow run` started also requests SIGTERM from the kernel for its parent's death, because MLflow dies of
a signal without passing it on.
"""

import atexit
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

import psutil

from qrl.process import adopt_orphans, die_with_parent, is_gone, swallows

LAUNCHER = "QRL_LAUNCHER"  # pid of the process of ours that launches a step, in the step's environment
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_UNWIND_S, _WAIT_S = 3, 7  # to end after a signal: of a process, and of one that waits for a step's process
_CLOSE_S = 120  # for the fresh interpreter that ends the runs: three seconds where the processor is free
_CLOSE = (
    "import sys; sys.path.insert(0, sys.argv[1]); from qrl.tracking import runs; runs.close_stopped(int(sys.argv[2]))"
)
_GONE_S = 5  # to wait for processes that were killed
_IMPORT = "<frozen importlib"  # begins the file name of the interpreter's own code that imports
_unwind_s = _UNWIND_S
_stopping = False
_launcher = 0  # pid of the process of ours that launched this one
_run_id = ""  # of the run that it opened for us
_has_run = False  # whether this process has a run, or is about to open one
_ends = False  # whether this process is one of our commands, which a signal ends; a notebook goes on after Ctrl-C
_LONGEST_BOOT = 10**9  # seconds; more are since the epoch


class Stopped(KeyboardInterrupt):
    """A stop signal; a KeyboardInterrupt, so that `mlflow.projects.run` stops its own child and waits for it."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"Stopped by {signal.Signals(signum).name}.")
        self.code = 128 + signum


def exit_code(error: KeyboardInterrupt) -> int:
    """Return 128 + the signal's number: 130 for Ctrl-C, 143 for SIGTERM."""
    return getattr(error, "code", 128 + signal.SIGINT)


def guard(*, caught: bool = True, ends: bool = False) -> None:
    """Turn stop signals into `Stopped`; call it early. It may be called again, and does nothing off the main thread.

    Unless the exception is `caught` by now, a signal ends the process where it stands. `ends` says that this process
    is a command, which has to end after a signal; any other is left to its own ways once the exception is raised.
    """
    global _ends, _launcher, _run_id  # noqa: PLW0603
    _ends = _ends or ends
    if threading.current_thread() is not threading.main_thread():
        return
    owner = os.getpid()

    def stop(signum: int, frame: FrameType | None) -> None:
        global _stopping  # noqa: PLW0603
        if os.getpid() != owner:  # a forked worker inherits the handler, but not the run
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
            return
        if not _ends:
            raise Stopped(signum)
        if _stopping:  # Ctrl-C reaches a whole process group, and MLflow then sends SIGTERM as well: unwind once
            return
        _stopping = True
        if not caught or swallows() or _imports(frame):
            end_now(signum)
        if _unwind_s:
            signal.signal(signal.SIGALRM, lambda *_: end_now(signum))
            signal.alarm(_unwind_s)
            atexit.register(signal.alarm, 0)
        raise Stopped(signum)

    for signum in _SIGNALS:
        if signal.getsignal(signum) is not signal.SIG_IGN:  # ignored on purpose, as `nohup` does
            signal.signal(signum, stop)
    if _ends:
        sys.unraisablehook = _unraisable
    if ends:  # registered first, called last: the command is done, but would die while the interpreter is torn down
        atexit.register(lambda: [signal.signal(signum, signal.SIG_IGN) for signum in _SIGNALS])
    if os.environ.get("MLFLOW_RUN_ID"):
        _run_id = os.environ["MLFLOW_RUN_ID"]
        _launcher = int(os.environ.pop(LAUNCHER, _launcher))
        die_with_parent(_launcher)


def patient(*, forever: bool = False) -> None:
    """Allow longer to unwind, since this process waits for a step's; or `forever`: a server finishes its answers."""
    global _unwind_s  # noqa: PLW0603
    _unwind_s = 0 if forever else _WAIT_S


def end_now(signum: int) -> NoReturn:
    """Kill what this process started, and exit.

    If it has a run and no launcher that ends it, a fresh interpreter in its place ends it as KILLED.
    """
    stopped = Stopped(signum)
    with suppress(OSError):
        os.write(2, f"{stopped} Run the same command again to resume.\n".encode())
    adopt_orphans()
    kill_children()
    launched = _launcher and not is_gone(_launcher)
    if launched:
        with suppress(OSError):
            _note(_run_id).write_text(str(signum))
    if launched or not (_has_run or _run_id or "MLFLOW_RUN_ID" in os.environ):
        bury_children()
        os._exit(stopped.code)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # in the fresh interpreter too
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_CLOSE_S)
    root = str(Path(__file__).parents[2])
    os.execv(sys.executable, [sys.executable, "-c", _CLOSE, root, str(signum)])


def _note(run_id: str) -> Path:
    """Return where a launched step notes the signal that ended it."""
    return Path(tempfile.gettempdir()) / f"qrl-stopped-{run_id}"


def left_by(run_id: str) -> Stopped | None:
    """Return what ended a launched step where it stood, and forget it; None if it ended otherwise."""
    try:
        signum = int(_note(run_id).read_text())
        _note(run_id).unlink()
    except (OSError, ValueError):
        return None
    return Stopped(signum)


def kill_children() -> None:
    """Kill all processes that this one started, and theirs."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            child.kill()


def bury_children() -> None:
    """Wait until all processes that this one started or adopted are gone; kill those that began meanwhile."""
    until = time.monotonic() + _GONE_S
    while (children := psutil.Process().children()) and (left := until - time.monotonic()) > 0:
        kill_children()
        psutil.wait_procs(children, timeout=left)  # none stays as a zombie


def _unraisable(lost: "sys.UnraisableHookArgs") -> None:
    if isinstance(lost.exc_value, Stopped):
        end_now(lost.exc_value.code - 128)
    sys.__unraisablehook__(lost)


def _imports(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(_IMPORT):
            return True
        frame = frame.f_back
    return False


def identity() -> str:
    """Return host:pid:start of this process, in whole seconds since the machine's: a clock that is set moves others."""
    return f"{socket.gethostname()}:{os.getpid()}:{_since_boot(psutil.Process()):.0f}"


def note_run() -> None:
    """Note that this process is about to open a run, or to work under one: a stop signal has to end it."""
    global _has_run  # noqa: PLW0603
    _has_run = True


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
