"""An engine's process: started before it is known what to serve, watched, and stopped with all that it started.

It runs in a session of its own, so that Ctrl-C reaches us alone and the engine is stopped in order: SIGTERM first, and
after a grace the whole group, for vLLM keeps workers that outlive its front process.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from qrl.errors import QrlError
from qrl.serve import engine_bootstrap, engines
from qrl.workspace import Scratch

KEPT_LINES, LAST_LINES = 400, 15  # of the engine's log: kept, and shown where it fails
# How a traceback ends, behind what vLLM's log puts before each line; the first one is the cause of the others.
_ERROR = re.compile(r"^(?:\([^)]*\) )?(?:ERROR \S+ \S+ \[[^]]*\] )?((?:\w+\.)*(\w*(?:Error|Exception)\b(?:: .*)?))$")
# From SIGTERM to SIGKILL; a running answer may be finished.
GRACE_LOADING_S, GRACE_SERVING_S = 5, engines.DRAIN_S + 5


@dataclass(frozen=True)
class Load:
    """What an engine is to serve."""

    name: str  # registered
    version: int | str
    path: Path  # of the checkpoint, opened in place
    verify: Callable[[], object] = lambda: (
        None
    )  # reads the files while the engine loads them; raises QrlError where they are not the evaluated ones
    device: str = "cpu"
    dtype: str = "auto"
    also: tuple[str, ...] = ()  # other ids that clients may ask for
    memory: float | None = None  # share of the GPU's memory; None: the engine's default

    @property
    def served(self) -> str:
        """The id under which it answers."""
        return engines.served_id(self.name, self.version)


class Engine:
    """One engine, to be used in a `with` block, which ends it whatever happens."""

    def __init__(self, engine: str, api_key: str | None = None, shares: bool = False) -> None:
        """Starts it; its libraries are imported while the caller looks up what to serve. From the main thread: it dies with its parent thread.

        Args:
            engine: "transformers" or "vllm".
            api_key: what clients must send; goes by the environment, since anybody may read a command line.
            shares: another engine will run beside it.

        Raises:
            BadInput: vLLM is not installed here, or a key of an engine that knows none.
        """
        engines.check(engine, api_key)
        self.engine = engine
        self.echo = False  # while loading, its log is kept; once it serves, it is shown
        self.serving = self._reaped = False
        self.listen: tuple[str, int] | Path | None = None  # once it is told what to load
        self._scratch = Scratch("qrl-engine-")
        self.scratch = self._scratch.path
        self.process = subprocess.Popen(
            [sys.executable, "-P", engine_bootstrap.__file__, str(os.getpid()), engines.MODULES[engine]],
            # The working folder matters: a folder called like the model in the user's own would be taken for it.
            cwd=self.scratch,
            env=os.environ | engines.environment(engine, self.scratch, api_key, shares),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._at: dict[str, float] = {}  # when what happened, on the monotonic clock
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._verified = threading.Event()
        self._refusal: QrlError | None = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):  # a second Ctrl-C shortens the grace
            self.process.wait(self.grace_s)
        self.reap()

    @property
    def grace_s(self) -> float:
        """How long it may take to end, in seconds."""
        return GRACE_SERVING_S if self.serving else GRACE_LOADING_S

    def load(self, what: Load, listen: tuple[str, int] | Path) -> None:
        """Has it load a checkpoint, whose files are verified meanwhile.

        Args:
            what: the version.
            listen: host and port, or the path of a Unix socket (vLLM).
        """
        self.listen = listen
        self._at["load"] = time.monotonic()
        words = engines.arguments(
            self.engine,
            what.path,
            [what.served, *what.also],
            listen,
            what.device,
            what.dtype,
            self.scratch,
            what.memory,
        )
        with contextlib.suppress(BrokenPipeError):  # it died already: `ready` tells how
            self.process.stdin.write(json.dumps(words) + "\n")
            self.process.stdin.close()
        threading.Thread(target=self._verify, args=(what.verify,), daemon=True).start()

    def ready(self) -> bool:
        """Whether it answers, and its files are those that were evaluated.

        Raises:
            QrlError: they are not, or it died while loading; in its own words.
        """
        if self._refusal:
            raise self._refusal
        if self.process.poll() is not None:
            raise self.failure("died while loading the model")
        if "healthy" not in self._at and self.healthy():
            self._at["healthy"] = time.monotonic()
        self.serving = self._verified.is_set() and "healthy" in self._at
        return self.serving

    def seconds(self) -> dict[str, float]:
        """Of an engine that is ready: `load` it, `verify` the files meanwhile, and what was `added` to the slower of the two.

        Added is the time that it stood waiting, its imports done, to be told what to load, and the time since both were done.
        """
        began, imported = self._at["load"], self._at.get("imported", math.inf)
        load, verify = self._at["healthy"] - began, self._at["verified"] - began
        return {
            "load": load,
            "verify": verify,
            "added": max(0.0, began - imported) + time.monotonic() - began - max(load, verify),
        }

    def healthy(self) -> bool:
        """Whether /health answers 200: both engines listen only once the model is loaded. Asked past any proxy."""
        connection = _Local(self.listen)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def stop(self) -> None:
        """Asks it to end; it may finish the answers that it is writing, for `grace_s`."""
        self.process.terminate()

    def reap(self) -> None:
        """Ends what is left of its session, at once; a second call does nothing."""
        if self._reaped:
            return
        self._reaped = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self._reader.join(1)
        self._scratch.cleanup()

    def failure(self, what: str) -> QrlError:
        """What happened, in a sentence that quotes the engine's own first error; its log's last lines go to stderr."""
        self._reader.join(1)
        code = self.process.poll()
        how = "" if code is None else f" (exit code {code})"
        if not self.echo:
            sys.stderr.write("".join(f"  {line}\n" for line in list(self._lines)[-LAST_LINES:]))
        why = (
            f": {said.rstrip('.')[:400]}"
            if (said := cause(self._lines))
            else "; its last lines, above, say why"
            if self._lines
            else ", and said nothing"
        )
        return QrlError(f"The serving engine {what}{how}{why}.")

    def _verify(self, verify: Callable[[], object]) -> None:
        try:
            verify()
        except QrlError as error:
            self._refusal = error
        except (
            Exception
        ) as error:  # a disk that fails, say: told where the engine is waited for, not in a thread that nobody sees
            self._refusal = QrlError(f"The files to serve cannot be read ({error}).")
        self._at["verified"] = time.monotonic()
        self._verified.set()

    def _read(self) -> None:
        for line in self.process.stdout:
            if line.strip() == engine_bootstrap.IMPORTED:
                self._at["imported"] = time.monotonic()
            elif line.strip():
                self._lines.append(line.rstrip())
                if self.echo:
                    sys.stderr.write(line)


def cause(log: Iterable[str]) -> str | None:
    """The error that the others in an engine's log follow from, in its own words."""
    lines = list(log)
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        if (found := _ERROR.match(line)) and "See root cause above" not in line:
            return (
                f"{found[2]}: {after.strip()}" if "validation error" in found[2] else found[2]
            )  # pydantic's own reason stands below
    return None


class _Local(http.client.HTTPConnection):
    """A connection to an engine of this machine, by port or by Unix socket."""

    def __init__(self, listen: tuple[str, int] | Path) -> None:
        host, port = ("localhost", 80) if isinstance(listen, Path) else listen
        super().__init__({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port, timeout=5)
        self._listen = listen

    def connect(self) -> None:
        if not isinstance(self._listen, Path):
            return super().connect()
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._listen))
