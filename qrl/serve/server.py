"""An OpenAI-compatible server of one checkpoint: started, waited for, watched and stopped.

The engine is a child process in a session of its own, so that Ctrl-C reaches us alone and the engine is stopped in
order: SIGTERM first, and after a grace the whole group, for vLLM keeps workers that outlive its front process.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from qrl.errors import BadInput, QrlError
from qrl.serve import engines, tether

LAST_LINES = 15  # of the engine's log, shown where it fails
# From SIGTERM to SIGKILL; a running answer may be finished.
GRACE_LOADING_S, GRACE_SERVING_S = 5, engines.DRAIN_S + 5


def run(
    path: Path,
    *,
    name: str,
    version: str | int,
    on_ready: Callable[[str], None],
    engine: str = engines.TRANSFORMERS,
    host: str = "127.0.0.1",
    port: int = 8000,
    device: str = "cpu",
    dtype: str = "auto",
    api_key: str | None = None,
    ready_timeout_s: float = 900,
) -> None:
    """Serves a checkpoint until it is told to stop; Ctrl-C, or a signal that raises KeyboardInterrupt, stops it.

    Args:
        path: checkpoint folder, opened in place.
        name: registered name; clients ask for the model `engines.served_id(name, version)`.
        version: registered version.
        on_ready: called with the address, http://host:port/v1, once the engine answers.
        engine: "transformers", or "vllm" where it is installed.
        host: address to listen on; loopback unless asked.
        port: port to listen on.
        device: "cpu" or "cuda".
        dtype: "auto", "fp32", "bf16" or "fp16"; auto: with transformers, what evaluation computes in; with vLLM, the checkpoint's own.
        api_key: what clients must send, with vLLM.
        ready_timeout_s: how long loading may take, in seconds.

    Raises:
        BadInput: the port cannot be listened on, or the engine is not installed; nothing was started.
        QrlError: the engine died, or did not answer in time; with the last lines of its log.
        KeyboardInterrupt: told to stop while the model was loading; once it serves, that is a normal return.
    """
    check_port(host, port)
    served = engines.served_id(name, version)
    with tempfile.TemporaryDirectory(prefix="qrl-serve-") as scratch:
        start = engines.prepare(engine, path, served, host, port, device, dtype, Path(scratch), api_key)
        with _Engine(start) as child:
            _wait_until_ready(child, host, port, f"loading {served}", ready_timeout_s)
            child.grace_s = GRACE_SERVING_S
            child.echo = True
            try:
                on_ready(f"http://{_literal(host)}:{port}/v1")
                child.process.wait()
            except KeyboardInterrupt:
                return
            raise child.failure("stopped serving, though nobody asked it to")


class _Engine:
    """The engine's process, its log's last lines, and its end on leaving the `with` block, whatever the reason."""

    def __init__(self, start: engines.Start) -> None:
        self.echo = False  # while loading, its log is kept; once it serves, it is shown
        self.grace_s = GRACE_LOADING_S
        self.process = subprocess.Popen(
            [sys.executable, tether.__file__, str(os.getpid()), *start.command],
            cwd=start.folder,
            env=os.environ | start.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> _Engine:
        return self

    def __exit__(self, *_error: object) -> None:
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):  # a second Ctrl-C shortens the grace
            self.process.wait(self.grace_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # what is left of its session
        self.process.wait()
        self._reader.join(1)

    def failure(self, what: str) -> QrlError:
        """What happened, with the log's last lines."""
        self._reader.join(1)
        code = self.process.poll()
        how = "" if code is None else f" (exit code {code})"
        return QrlError(
            f"The serving engine {what}{how}. Its last lines:\n" + "\n".join(f"  {line}" for line in self._lines)
        )

    def _read(self) -> None:
        for line in self.process.stdout:
            if line.strip():
                self._lines.append(line.rstrip())
                if self.echo:
                    sys.stderr.write(line)


def _wait_until_ready(child: _Engine, host: str, port: int, what: str, timeout_s: float) -> None:
    from tqdm import tqdm

    deadline = time.monotonic() + timeout_s
    with tqdm(bar_format="{desc} {elapsed}", desc=what, leave=False, mininterval=1) as bar:
        while not _healthy(host, port):
            if child.process.poll() is not None:
                raise child.failure("died while loading the model")
            if time.monotonic() > deadline:
                raise child.failure(f"did not answer within {timeout_s:.0f} s")
            time.sleep(0.2)
            bar.update()


def _healthy(host: str, port: int) -> bool:
    """Whether /health answers 200: both engines listen only once the model is loaded. Asked past any proxy."""
    anywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}
    connection = http.client.HTTPConnection(anywhere.get(host, host), port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def check_port(host: str, port: int) -> None:
    """Listens for a moment, so that a port in use is told before the model is loaded.

    Raises:
        BadInput: it cannot be listened on.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise BadInput(
            f"Cannot listen on {_literal(host)}:{port} ({error.strerror or error}): "
            "stop what listens there, or choose another port or host."
        ) from None


def _literal(host: str) -> str:
    return f"[{host}]" if ":" in host else host
