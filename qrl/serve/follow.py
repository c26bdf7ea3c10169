"""Serving a stage as it moves: the new version loads, takes over the traffic, and the old engine drains.

An engine is in one of three places, at most one in each:

    loading ──ready──► serving ──another takes over──► draining ──no requests, or its deadline──► ended
       └──refused, failed, or the stage moved again──────────────►┘

At most two engines run at once: one that serves, and one that loads or drains. A version that cannot take over
(rejected by its gate, changed files, a dead engine) is reported once and ignored until the stage moves again; the old
one keeps serving.

The loop runs on the main thread, because engines die with the thread that started them; `proxy` passes requests on
another.
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
EVERY_S = 5.0  # from one look at the registry to the next
DRAIN_S = 300.0  # how long an engine that no longer serves may finish its answers
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
    deadline: float = math.inf  # of loading, draining or stopping, on the monotonic clock
    stopped: bool = False  # it was told to end


class _Fleet(contextlib.AbstractContextManager):
    """The engines that serve, load and drain; the end of the `with` block ends them all."""

    def __init__(self, engine: Engine, model: ServedModel, stage: FollowedStage) -> None:
        self.stage = stage
        self.serving = _Member(engine, model)
        self.loading: _Member | None = None
        self.draining: _Member | None = None
        self.look_at = 0.0  # when to look at the registry again, on the monotonic clock
        self.last_version = int(model.version)  # the last one that was handled, served or refused
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
            if not self.is_registry_down:
                reason = " ".join(str(error).split())[:300]
                serves = f"{self.serving.model.id} keeps serving"
                self.stage.on_notice(f"The registry did not answer ({reason}); {serves}, lookups go on.")
            self.is_registry_down = True
            return
        self.is_registry_down = False
        if version == self.last_version or self.draining:
            return
        if self.loading:
            self._abandon()  # and look again once it has ended and freed its memory
            return
        self.last_version = version
        if version == int(self.serving.model.version):  # the stage moved back before another version took over
            return
        self._start_loading(version)

    def _start_loading(self, version: int) -> None:
        """Start an engine with a version, if its gate passed it; report it otherwise."""
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
                if time.monotonic() > new.deadline:
                    raise new.engine.failure(f"did not answer within {server.READY_TIMEOUT_S} s")
                return
        except QrlError as error:
            self._abandon()
            self._refuse(int(new.model.version), error)
            return
        proxy.switch_to(new.engine.listen)
        old = self.serving
        old.deadline = time.monotonic() + self.stage.drain_s
        self.serving = new
        self.loading = None
        self.draining = old
        old.engine.log.echo = False
        new.engine.log.echo = True

        running = proxy.in_flight(old.engine.listen)
        drains = f"{old.model.id} has {self.stage.drain_s:.0f} s to finish its {running} running requests"
        self.stage.on_switch(new.model, f"{new.model.id} serves now; {drains}.")

    def _drain(self, old: _Member, proxy: Proxy) -> None:
        """End the old engine once it has no requests, or at its deadline."""
        now = time.monotonic()
        running = proxy.in_flight(old.engine.listen)
        if not old.stopped and (not running or now >= old.deadline):
            if running:
                deadline = f"The old engine is stopped after {self.stage.drain_s:.0f} s"
                self.stage.on_notice(f"{deadline}; its {running} running requests have {engines.DRAIN_S} s left.")
            old.engine.stop()
            old.stopped = True
            old.deadline = now + old.engine.grace_s
        elif old.stopped and (old.engine.process.poll() is not None or now >= old.deadline):
            old.engine.reap()
            proxy.forget(old.engine.listen)
            self.draining = None

    def _refuse(self, version: int, error: Exception) -> None:
        sentence = f"Version {version} does not take over, {self.serving.model.id} keeps serving: {error}"
        self.stage.on_refusal(version, sentence)

    def _abandon(self) -> None:
        """Let the engine that loads drain, which has nothing to finish: it is stopped at once."""
        self.draining = self.loading
        self.loading = None
        self.draining.deadline = 0.0
