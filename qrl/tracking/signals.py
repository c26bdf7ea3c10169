"""A process that receives a stop signal unwinds, so that its run can be ended; imports nothing heavy.

SIGINT, SIGTERM and SIGHUP become the exception `Stopped`. It would leave half a module behind where something is being
imported, and code may swallow it, as a weak reference's callback does, or wait for an engine that died. In these cases
the process ends at once (`end_now`): it kills its children and waits until they are gone, since freeing a GPU takes a
moment. If it has a run (`note_run`), a fresh interpreter takes its place and ends that run, too.

    a signal arrives
      in a notebook or a program that is no command of ours  →  raise Stopped
      in a command of ours, for the first time
        while importing, or where Stopped would be swallowed →  end_now
        else                                                 →  raise Stopped; end_now if it still lives seconds later

    end_now: kill the children, then
      launched by another command of ours  →  note the signal for it, and exit: that command ends the run
      no run                               →  exit
      else                                 →  become a fresh interpreter that ends the runs (`runs.close_stopped`)

A process that `mlflow run` started also requests SIGTERM from the kernel for its parent's death, because MLflow dies of
a signal without passing it on.
"""

import atexit
import os
import signal
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
_UNWIND_S = 3  # to end after a signal
_UNWIND_LAUNCHER_S = 7  # the same, for a process that waits for a step's process
_CLOSE_S = 120  # for the fresh interpreter that ends the runs: three seconds where the processor is free
_CLOSE = (
    "import sys; sys.path.insert(0, sys.argv[1]); from qrl.tracking import runs; runs.close_stopped(int(sys.argv[2]))"
)
_GONE_S = 5  # to wait for processes that were killed
_IMPORT = "<frozen importlib"  # begins the file name of the interpreter's own code that imports


class Stopped(KeyboardInterrupt):
    """A stop signal; a KeyboardInterrupt, so that `mlflow.projects.run` stops its own child and waits for it."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"Stopped by {signal.Signals(signum).name}.")
        self.code = 128 + signum


class StopHandler:
    """What this process does on a stop signal, and what it has to end before it exits."""

    def __init__(self) -> None:
        self._is_command = False  # a command has to end after a signal; a notebook continues after Ctrl-C
        self._is_stopping = False
        self._unwind_s = _UNWIND_S  # 0: no limit
        self._launcher = 0  # pid of the process of ours that launched this one
        self._launched_run_id = ""  # of the run that the launcher opened for this process
        self._has_run = False  # this process has a run, or is about to open one

    def guard(self, *, caught: bool = True, ends: bool = False) -> None:
        """Turn stop signals into `Stopped`; call it early.

        It may be called again, and does nothing off the main thread.

        Args:
            caught: whether the exception is caught by now; else a signal ends the process at once.
            ends: whether this process is a command, which has to end after a signal; any other may continue once the
                exception is raised.
        """
        self._is_command = self._is_command or ends
        if threading.current_thread() is not threading.main_thread():
            return
        owner = os.getpid()

        def stop(signum: int, frame: FrameType | None) -> None:
            if os.getpid() != owner:  # a forked worker inherits the handler, but not the run
                signal.signal(signum, signal.SIG_DFL)
                os.kill(os.getpid(), signum)
                return
            self._stop(signum, frame, caught=caught)

        for signum in _SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:  # ignored on purpose, as `nohup` does
                signal.signal(signum, stop)
        if self._is_command:
            sys.unraisablehook = _end_if_unraisable
        if ends:  # registered first, called last: the command is done, but would die during the interpreter's shutdown
            atexit.register(_ignore_signals)
        if os.environ.get("MLFLOW_RUN_ID"):
            self._launched_run_id = os.environ["MLFLOW_RUN_ID"]
            self._launcher = int(os.environ.pop(LAUNCHER, self._launcher))
            die_with_parent(self._launcher)

    def allow_longer(self, *, forever: bool = False) -> None:
        """Allow longer to unwind, since this process waits for a step's.

        `forever` sets no limit: a server finishes its answers.
        """
        self._unwind_s = 0 if forever else _UNWIND_LAUNCHER_S

    def note_run(self) -> None:
        """Note that this process is about to open a run, or to work under one: a stop signal has to end it."""
        self._has_run = True

    def end_now(self, signum: int) -> NoReturn:
        """Kill what this process started, and exit.

        If it has a run and no launcher that ends it, a fresh interpreter in its place ends it as KILLED.
        """
        stopped = Stopped(signum)
        with suppress(OSError):
            os.write(2, f"{stopped} Run the same command again to resume.\n".encode())
        adopt_orphans()
        kill_children()

        launcher_lives = self._launcher and not is_gone(self._launcher)
        if launcher_lives:
            with suppress(OSError):
                _note(self._launched_run_id).write_text(str(signum))
        has_run = self._has_run or self._launched_run_id or "MLFLOW_RUN_ID" in os.environ
        if launcher_lives or not has_run:
            bury_children()
            os._exit(stopped.code)

        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # in the fresh interpreter too
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_CLOSE_S)
        root = str(Path(__file__).parents[2])
        os.execv(sys.executable, [sys.executable, "-c", _CLOSE, root, str(signum)])

    def _stop(self, signum: int, frame: FrameType | None, *, caught: bool) -> None:
        """Raise `Stopped`, or end the process at once where the exception would be lost or do damage."""
        if not self._is_command:
            raise Stopped(signum)
        if self._is_stopping:  # Ctrl-C reaches a whole process group, and MLflow then sends SIGTERM: unwind once
            return
        self._is_stopping = True
        if not caught or swallows() or _imports(frame):
            self.end_now(signum)
        if self._unwind_s:
            signal.signal(signal.SIGALRM, lambda *_: self.end_now(signum))
            signal.alarm(self._unwind_s)
            atexit.register(signal.alarm, 0)
        raise Stopped(signum)


_handler = StopHandler()  # of this process
guard = _handler.guard
allow_longer = _handler.allow_longer
note_run = _handler.note_run
end_now = _handler.end_now


def exit_code(error: KeyboardInterrupt) -> int:
    """Return 128 + the signal's number: 130 for Ctrl-C, 143 for SIGTERM."""
    return getattr(error, "code", 128 + signal.SIGINT)


def take_note(run_id: str) -> Stopped | None:
    """Return the signal at which a launched step ended at once, and forget it; None if it ended otherwise."""
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
    deadline = time.monotonic() + _GONE_S
    children = psutil.Process().children()
    while children and time.monotonic() < deadline:
        kill_children()
        psutil.wait_procs(children, timeout=max(0, deadline - time.monotonic()))  # none stays as a zombie
        children = psutil.Process().children()


def _note(run_id: str) -> Path:
    """Return where a launched step notes the signal that ended it."""
    return Path(tempfile.gettempdir()) / f"qrl-stopped-{run_id}"


def _ignore_signals() -> None:
    for signum in _SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


def _end_if_unraisable(unraisable: "sys.UnraisableHookArgs") -> None:
    """End the process if `Stopped` was raised where Python drops exceptions, as in a weak reference's callback."""
    if isinstance(unraisable.exc_value, Stopped):
        end_now(unraisable.exc_value.code - 128)
    sys.__unraisablehook__(unraisable)


def _imports(frame: FrameType | None) -> bool:
    """Return whether a module is being imported at a frame."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_IMPORT):
            return True
        frame = frame.f_back
    return False
