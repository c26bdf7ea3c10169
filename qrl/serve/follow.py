"""Serving a stage wherever it moves: the new version loads beside the old one, traffic turns to it, the old one drains.

One loop on the main thread, for engines die with the thread that started them; requests go through `proxy` on another.
At most two engines live at once: one that serves, and one that loads or drains. What cannot take over (a gate that refused,
files that changed, an engine that died) is told once and left alone until the stage moves again; the old one serves on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from qrl.errors import BadInput, QrlError
from qrl.serve import engines, server
from qrl.serve.process import Engine, Load
from qrl.serve.proxy import Proxy

MEMORY = 0.45  # of a GPU that two engines share: what each may take at most
EVERY_S, DRAIN_S = 5.0, 300.0  # how often the registry is asked, and how long a drained engine may go on answering
_LOOK_EVERY_S = 0.05


@dataclass(frozen=True)
class Following:
    """What is followed, and who hears of it."""

    start: Callable[[], Engine]
    version: Callable[[], int]  # behind the stage now; raises QrlError
    admit: Callable[[int], Load]  # a version, if its gate let it in; raises QrlError
    turned: Callable[[Load, str], object]  # a version took over: which, and a sentence
    refused: Callable[[int, str], object]  # a version cannot take over: which, and a sentence
    said: Callable[[str], object]  # whatever else an operator wants to know
    every_s: float = EVERY_S
    drain_s: float = DRAIN_S


def check(engine: str, memory: float | None) -> float:
    """The share of a GPU's memory that each of two engines gets.

    Args:
        engine: "transformers" or "vllm".
        memory: what was asked for; None: as much as may be.

    Raises:
        BadInput: an engine that cannot be followed with, or shares that two engines cannot both have.
    """
    if engine != engines.VLLM:
        raise BadInput("--follow loads the next version beside the old one under vLLM: add --engine vllm.")
    if memory is not None and memory > MEMORY:
        raise BadInput(
            f"--follow keeps two engines on one GPU for a while, so each gets at most {MEMORY} of its memory, but --gpu-memory-utilization is {memory}: give {MEMORY} or less."
        )
    return memory or MEMORY


def run(
    child: Engine, what: Load, host: str, port: int, following: Following, *, on_ready: Callable[[str], None]
) -> None:
    """Serves a stage until it is told to stop.

    Args:
        child: the first engine, started.
        what: the version that it loads.
        host, port: where clients ask.
        following: the stage.
        on_ready: called with the address once it answers.

    Raises:
        BadInput: the port cannot be listened on.
        QrlError: the first version could not be loaded, or the engine that serves died.
        KeyboardInterrupt: told to stop while the first version was loading; later on that is a normal return.
    """
    server.check_port(host, port)
    child.load(what, child.scratch / "engine.sock")
    with _Fleet(child, what, following) as fleet, Proxy(host, port, engines.DRAIN_S) as proxy:
        server.wait(child, f"loading {what.served}")
        proxy.turn_to(child.listen)
        child.echo = True
        try:
            on_ready(f"{server.url(host, port)}/v1")
            while True:
                fleet.go_on(proxy)
                time.sleep(_LOOK_EVERY_S)
        except KeyboardInterrupt:
            return


class _Fleet:
    """The engine that serves, the one that loads, the one that drains; all of them end with the `with` block."""

    def __init__(self, child: Engine, what: Load, following: Following) -> None:
        self.serving, self.what, self.following = child, what, following
        self.next: tuple[Engine, Load, float] | None = None  # loading, and until when it may
        self.old: Engine | None = None
        self.old_until = self.look_at = 0.0
        self.old_stopped = False
        self.seen = int(what.version)  # the version that was dealt with last, served or refused
        self.deaf = False  # the registry did not answer, which was told

    def __enter__(self) -> _Fleet:
        return self

    def __exit__(self, *_error: object) -> None:
        rest = [each for each in (self.serving, self.next and self.next[0], self.old) if each]
        for engine in rest:
            engine.stop()
        for engine in rest:
            engine.__exit__()

    def go_on(self, proxy: Proxy) -> None:
        """One look at everything; never blocks for long.

        Raises:
            QrlError: the engine that serves died.
        """
        if self.serving.process.poll() is not None:
            raise self.serving.failure("stopped serving, though nobody asked it to")
        if self.old:
            self._drain(proxy)
        if time.monotonic() >= self.look_at:
            self._look()
            self.look_at = time.monotonic() + self.following.every_s
        if self.next:
            self._take_over(proxy)

    def _look(self) -> None:
        """Asks where the stage is; a move starts an engine, unless the last one still drains, and gives up one that loads something else."""
        try:
            version = self.following.version()
        except Exception as error:  # whatever a store says that is away for a while: what serves is not touched
            if not self.deaf:
                self.following.said(
                    f"The registry does not say where the stage is ({' '.join(str(error).split())[:300]}); version {self.what.version} serves on, and it is asked again."
                )
            self.deaf = True
            return
        self.deaf = False
        if version == self.seen or self.old:
            return
        if self.next:
            self._give_up()  # and looks again once it is gone, its memory too
            return
        self.seen = version
        if version == int(self.what.version):  # it moved back before anything took over
            return
        try:
            engine = self.following.start()
        except Exception as error:  # no memory for another process, or a full disk
            self._tell_refused(version, error)
            return
        try:
            what = self.following.admit(version)
            engine.load(what, engine.scratch / "engine.sock")
        except Exception as error:
            self.next = (engine, replace(self.what, version=version), 0.0)
            self._refuse(error)
        else:
            self.next = (engine, what, time.monotonic() + server.READY_TIMEOUT_S)

    def _take_over(self, proxy: Proxy) -> None:
        engine, what, until = self.next
        try:
            if not engine.ready():
                if time.monotonic() > until:
                    raise engine.failure(f"did not answer within {server.READY_TIMEOUT_S:.0f} s")
                return
        except QrlError as error:
            self._refuse(error)
            return
        proxy.turn_to(engine.listen)
        self.old, self.old_until, self.old_stopped = self.serving, time.monotonic() + self.following.drain_s, False
        before, self.serving, self.what, self.next = self.what, engine, what, None
        self.old.echo, engine.echo = False, True
        running = proxy.in_flight(self.old.listen)
        self.following.turned(
            what,
            f"{what.served} serves now; {before.served} ends with the {running} requests that it is answering, in {self.following.drain_s:.0f} s at most.",
        )

    def _drain(self, proxy: Proxy) -> None:
        """Ends the old engine once nobody waits for it, or at the limit."""
        now, running = time.monotonic(), proxy.in_flight(self.old.listen)
        if not self.old_stopped and (not running or now >= self.old_until):
            if running:
                self.following.said(
                    f"The old engine has had its {self.following.drain_s:.0f} s and is stopped; {running} requests that it was answering have {engines.DRAIN_S} s left."
                )
            self.old.stop()
            self.old_stopped, self.old_until = True, now + self.old.grace_s
        elif self.old_stopped and (self.old.process.poll() is not None or now >= self.old_until):
            self.old.reap()
            proxy.forget(self.old.listen)
            self.old = None

    def _refuse(self, error: Exception) -> None:
        version = int(self.next[1].version)
        self._give_up()
        self._tell_refused(version, error)

    def _tell_refused(self, version: int, error: Exception) -> None:
        self.following.refused(version, f"Version {version} does not take over, {self.what.served} serves on: {error}")

    def _give_up(self) -> None:
        self.old, self.old_until, self.old_stopped, self.next = self.next[0], 0.0, False, None
