"""An engine's process: started before the version is known, watched, and stopped with all processes that it started.

It runs in a session of its own, so that Ctrl-C reaches only this process and the engine is stopped in order: SIGTERM
first, and after a grace period SIGKILL to the whole group, since vLLM keeps workers that outlive its front process.
"""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from qrl import checkpoint
from qrl.errors import QrlError
from qrl.serve import engine_bootstrap, engines
from qrl.serve.engines import ServedModel
from qrl.serve.log import EngineLog, Write
from qrl.workspace import Scratch

# From SIGTERM to SIGKILL; a running answer may finish.
GRACE_LOADING_S = 1
GRACE_SERVING_S = engines.DRAIN_S + 5


class Engine(contextlib.AbstractContextManager):
    """A serving engine; the end of its `with` block ends it in any case."""

    def __init__(
        self, engine: str, api_key: str | None = None, shares: bool = False, write: Write | None = None
    ) -> None:
        """Start the process, which imports its libraries while the caller resolves the version.

        Call it on the main thread: the engine dies with the thread that started it.

        Args:
            engine: "transformers" or "vllm".
            api_key: for clients to send; passed by the environment, since anybody may read a command line.
            shares: another engine will run on this machine at the same time.
            write: gets the lines of its output; default: stderr, once it serves.

        Raises:
            BadInput: vLLM is not installed here.
        """
        engines.check_installed(engine)
        self.engine = engine
        self.serving = False
        self._reaped = False
        self.listen: tuple[str, int] | Path | None = None  # set by `load`; a path is a Unix socket's
        self._scratch = Scratch("qrl-engine-")
        self.scratch = self._scratch.path
        self.process = subprocess.Popen(
            [sys.executable, "-P", engine_bootstrap.__file__, str(os.getpid()), engines.MODULES[engine]],
            cwd=self.scratch,  # in the user's own folder, a folder with the model's name would be loaded instead of it
            env=os.environ | engines.environment(engine, api_key, shares),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.log = EngineLog(self.process.stdout, write)
        self._times: dict[str, float] = {}  # event → its time on the monotonic clock
        self._mismatch: QrlError | None = None
        self._model: ServedModel | None = None  # set by `load`
        self._files_at_load: list[tuple] = []  # the state of its files then

    def __exit__(self, *_error: object) -> None:
        self.stop()
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):  # a second Ctrl-C ends the grace period
            self.process.wait(self.grace_s)
        self.reap()

    @property
    def grace_s(self) -> float:
        """How long it may take to end, in seconds."""
        return GRACE_SERVING_S if self.serving else GRACE_LOADING_S

    def load(self, model: ServedModel, listen: tuple[str, int] | Path) -> None:
        """Make it load a checkpoint, and verify the files meanwhile; vLLM can listen on a Unix socket's path."""
        self.listen = listen
        self._model = model
        self._files_at_load = checkpoint.state(model.path)
        self._times["load"] = time.monotonic()
        options = engines.arguments(self.engine, model, listen, self.scratch)
        with contextlib.suppress(BrokenPipeError):  # it died already: `ready` reports how
            self.process.stdin.write(json.dumps(options) + "\n")
            self.process.stdin.close()
        threading.Thread(target=self._verify, args=(model.verify,), daemon=True).start()

    def ready(self) -> bool:
        """Return whether it answers and its files are verified.

        Raises:
            QrlError: the files are not those that were evaluated, or change meanwhile; or the engine died loading them.
        """
        if self._mismatch:
            raise self._mismatch
        if self.process.poll() is not None:
            raise self.failure("died while loading the model")
        if "healthy" not in self._times and _healthy(self.listen):
            self._times["healthy"] = time.monotonic()
        if not self.serving and {"verified", "healthy"} <= self._times.keys():
            if checkpoint.state(self._model.path) != self._files_at_load:  # it may have read others than were verified
                raise QrlError(f"The files of {self._model.id} changed while they were loaded: serve it again.")
            self.serving = True
        return self.serving

    def seconds(self) -> dict[str, float]:
        """Return the times of an engine that is ready: `load`, `verify` (meanwhile), and `added` to the slower one.

        Added is the time between the end of its imports and `load`, and the time since both were done.
        """
        start = self._times["load"]
        load = self._times["healthy"] - start
        verify = self._times["verified"] - start
        waited = max(0.0, start - self.log.imported_at)
        elapsed = time.monotonic() - start
        return {"load": load, "verify": verify, "added": waited + elapsed - max(load, verify)}

    def stop(self) -> None:
        """Ask it to end; it may finish running answers for `grace_s`."""
        self.process.terminate()

    def reap(self) -> None:
        """Kill what is left of its session; a second call does nothing."""
        if self._reaped:
            return
        self._reaped = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.log.join()
        self._scratch.cleanup()

    def failure(self, what: str) -> QrlError:
        """Return an error in one sentence that quotes the engine's own first error; print its last lines to stderr."""
        reason = self.log.reason()
        code = self.process.poll()
        exit_code = "" if code is None else f" (exit code {code})"
        return QrlError(f"The serving engine {what}{exit_code}{reason}.")

    def _verify(self, verify: Callable[[], object]) -> None:
        try:
            verify()
            self._times["verified"] = time.monotonic()
        except QrlError as error:
            self._mismatch = error
        except Exception as error:  # a failing disk, say; `ready` raises it, since nobody sees this thread
            self._mismatch = QrlError(f"The files to serve cannot be read ({error}).")


def _healthy(listen: tuple[str, int] | Path) -> bool:
    """Return whether /health answers 200, bypassing any proxy; both engines listen only once the model is loaded."""
    host, port = ("localhost", 80) if isinstance(listen, Path) else listen
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    connection = http.client.HTTPConnection(address, port, timeout=5)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        if isinstance(listen, Path):
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.settimeout(connection.timeout)
            connection.sock.connect(str(listen))
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    return False
