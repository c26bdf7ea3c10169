"""Serving a stage as it moves: the new version loads beside the old one, gets the traffic, and the old one drains.

The loop runs on the main thread, because engines die with the thread that started them; `proxy` passes requests on
another. At most two engines run at once: one that serves, and one that loads or drains. A version that cannot take over
(rejected by its gate, changed files, a dead engine) is reported once and ignored until the stage moves again; the old
one keeps serving.
"""

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from qrl.errors import QrlError
from qrl.serve import engines, server
from qrl.serve.engines import ServedModel
from qrl.serve.process import Engine
from qrl.serve.proxy import Proxy

MEMORY = 0.45  # largest share of a GPU's memory for each of two engines
EVERY_S, DRAIN_S = 5.0, 300.0
_SOCKET = "engine.sock"


@dataclass(frozen=True)
class FollowedStage:
    """A stage to follow, and callbacks for its moves."""

    start: Callable[[], Engine]
    version: Callable[[], int]  # the stage's version now; raises QrlError
    admit: Callable[[int], ServedModel]  # a version, if its gate passed it; raises QrlError
    on_switch: Callable[[ServedModel, str], object]  # a version took over; with a sentence
    on_refusal: Callable[[int, str], object]  # a version cannot take over; with a sentence
    on_notice: Callable[[str], object]  # anything else for an operator
    every_s: float = EVERY_S  # how often to ask the registry
    drain_s: float = DRAIN_S  # how long a drained engine may finish its answers


def run(
    engine: Engine, model: ServedModel, host: str, port: int, stage: FollowedStage, *, on_ready: Callable[[str], None]
) -> None:
    """Serve a stage until Ctrl-C; arguments and exceptions are those of `server.run`, for the first engine and version.

    Raises:
        QrlError: also if an engine dies that serves a later version.
    """
    server.check_port(host, port)
    engine.load(model, engine.scratch / _SOCKET)
    with _Fleet(engine, model, stage) as fleet, Proxy(host, port, engines.DRAIN_S) as proxy:
        server.wait(engine, f"loading {model.id}")
        proxy.switch_to(engine.listen)
        engine.log.echo = True
        try:
            on_ready(f"{server.url(host, port)}/v1")
            while True:
                fleet.step(proxy)
                time.sleep(server.POLL_S)
        except KeyboardInterrupt:
            return


@dataclass
class _Member:
    engine: Engine
    model: ServedModel
    until: float = math.inf  # deadline of loading, draining or stopping, on the monotonic clock
    stopped: bool = False


class _Fleet(contextlib.AbstractContextManager):
    """The engines that serve, load and drain; the end of the `with` block ends them all."""

    def __init__(self, engine: Engine, model: ServedModel, stage: FollowedStage) -> None:
        self.serving, self.stage, self.look_at = _Member(engine, model), stage, 0.0
        self.loading: _Member | None = None
        self.draining: _Member | None = None
        self.seen = int(model.version)  # the last version handled, served or refused
        self.is_registry_down = False

    def __exit__(self, *_error: object) -> None:
        members = [member for member in (self.serving, self.loading, self.draining) if member]
        for member in members:
            member.engine.stop()
        for member in members:
            member.engine.__exit__()

    def step(self, proxy: Proxy) -> None:
        """Check everything once, without blocking for long; raise QrlError if the engine that serves died."""
        if self.serving.engine.process.poll() is not None:
            raise self.serving.engine.failure("stopped serving unexpectedly")
        if self.draining:
            self._drain(self.draining, proxy)
        if time.monotonic() >= self.look_at:
            self._look()
            self.look_at = time.monotonic() + self.stage.every_s
        if self.loading:
            self._take_over(self.loading, proxy)

    def _look(self) -> None:
        """Look up the stage; a move starts an engine, once none drains, and abandons one that loads another version."""
        try:
            version = self.stage.version()
        except Exception as error:  # any error of a store that is down for a while; the engine that serves is untouched
            reason, served = " ".join(str(error).split())[:300], self.serving.model.id
            if not self.is_registry_down:
                self.stage.on_notice(f"The registry did not answer ({reason}); {served} keeps serving, lookups go on.")
            self.is_registry_down = True
            return
        self.is_registry_down = False
        if version == self.seen or self.draining:
            return
        if self.loading:
            self._abandon()  # and look again once it has ended and freed its memory
            return
        self.seen = version
        if version == int(self.serving.model.version):  # the stage moved back before another version took over
            return
        engine = None
        try:
            engine = self.stage.start()
            model = self.stage.admit(version)
            engine.load(model, engine.scratch / _SOCKET)
            self.loading = _Member(engine, model, time.monotonic() + server.READY_TIMEOUT_S)
        except Exception as error:  # refused by a gate; or no memory for another process, or a full disk
            if engine:
                self.draining = _Member(engine, self.serving.model, 0.0)
            self._refuse(version, error)

    def _take_over(self, new: _Member, proxy: Proxy) -> None:
        try:
            if not new.engine.ready():
                if time.monotonic() > new.until:
                    raise new.engine.failure(f"did not answer within {server.READY_TIMEOUT_S} s")
                return
        except QrlError as error:
            self._abandon()
            self._refuse(int(new.model.version), error)
            return
        proxy.switch_to(new.engine.listen)
        old, drain_s = self.serving, self.stage.drain_s
        old.until = time.monotonic() + drain_s
        self.serving, self.loading, self.draining = new, None, old
        old.engine.log.echo, new.engine.log.echo = False, True
        running = proxy.in_flight(old.engine.listen)
        left = f"{old.model.id} has {drain_s:.0f} s to finish its {running} running requests"
        self.stage.on_switch(new.model, f"{new.model.id} serves now; {left}.")

    def _drain(self, old: _Member, proxy: Proxy) -> None:
        """End the old engine once it has no requests, or at its deadline."""
        now, running = time.monotonic(), proxy.in_flight(old.engine.listen)
        if not old.stopped and (not running or now >= old.until):
            if running:
                stopped = f"The old engine is stopped after {self.stage.drain_s:.0f} s"
                self.stage.on_notice(f"{stopped}; its {running} running requests have {engines.DRAIN_S} s left.")
            old.engine.stop()
            old.stopped, old.until = True, now + old.engine.grace_s
        elif old.stopped and (old.engine.process.poll() is not None or now >= old.until):
            old.engine.reap()
            proxy.forget(old.engine.listen)
            self.draining = None

    def _refuse(self, version: int, error: Exception) -> None:
        sentence = f"Version {version} does not take over, {self.serving.model.id} keeps serving: {error}"
        self.stage.on_refusal(version, sentence)

    def _abandon(self) -> None:
        self.draining, self.loading = self.loading, None
        self.draining.until = 0.0
