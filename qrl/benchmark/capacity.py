"""How many requests a second a server holds: arrivals at rising rates, until latency breaks a limit.

Arrivals are open-loop: a request is sent when its time has come, whether or not earlier ones were answered. With a
fixed number of clients, as without a rate, a slow server is also asked less, so that overload does not show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from qrl import names
from qrl.benchmark import summary
from qrl.benchmark.http import UNITS
from qrl.errors import QrlError
from qrl.stats import Estimate
from qrl.stats.text import table

FIRST, MOST, LEAST = 1.0, 4096.0, 1 / 64  # requests a second: the first rate, and the bounds of the search
REFINEMENTS = 3  # steps of bisection, on a logarithmic scale: the rates around the limit are 2^(1/8) apart
KEPT_UP = 0.9  # share of the requests that arrive a second that a server completes, or its queue grows without bound


@dataclass(frozen=True)
class Point:
    """What a server did at one rate of arrivals."""

    rate: float  # requests a second
    latency_p95_s: Estimate  # over rounds
    latency_p50_s: Estimate
    first_token_s: Estimate  # median
    tokens_per_s: Estimate
    completed_per_s: Estimate
    requests: int  # completed in all rounds
    failed: int = 0

    @property
    def kept_up(self) -> bool:
        """Whether no request failed, and as many were answered a second as a server without a queue answers."""
        each = self.requests / self.completed_per_s.n  # of a round, which lasts until its last answer
        possible = each / (each / self.rate + self.latency_p50_s.estimate)
        return not self.failed and self.completed_per_s.high >= KEPT_UP * possible


@dataclass(frozen=True)
class Capacity:
    """The rates that one model's server was asked at, in rising order, and what it holds."""

    variant: str
    scheme: str
    engine: str
    limit_s: float
    points: tuple[Point, ...]
    request_cache_bytes: float  # keys and values of a request at its last token

    @property
    def label(self) -> str:
        """The cell's name in the UI."""
        return names.cell_name(self.variant, self.scheme)

    @property
    def held(self) -> float:
        """Requests a second at the limit: the largest rate below which all tried ones hold; 0 if none does."""
        return self._largest("estimate")

    @property
    def bounds(self) -> tuple[float, float]:
        """The largest rate whose latency is within the limit with its whole interval, and with a part of it."""
        return self._largest("high"), self._largest("low")

    @property
    def at_limit(self) -> Point | None:
        """The point at the capacity; None where no rate holds."""
        return next((point for point in self.points if point.rate == self.held), None)

    @property
    def text(self) -> str:
        """The capacity with its bounds, such as `45.3 [38.1, 45.3]`."""
        if not self.held:
            return f"below {self.points[0].rate:.3g}"
        low, high = self.bounds
        more = "≥ " if self.at_limit is self.points[-1] else ""
        return f"{more}{self.held:.3g} [{low:.3g}, {high:.3g}]"

    def _largest(self, end: str) -> float:
        largest = 0.0
        for point in self.points:
            if not point.kept_up or getattr(point.latency_p95_s, end) > self.limit_s:
                break
            largest = point.rate
        return largest


def search(measure: Callable[[float], Point], limit_s: float) -> list[Point]:
    """Return the points measured on the way to the largest rate that holds, in rising order of rates.

    Rates double from one request a second until one breaks the limit (or halve until one holds, or until half the rate
    no longer lowers the latency); the interval around the limit is then halved a few times, on a logarithmic scale.

    Args:
        measure: measures a server at a rate, in requests a second.
        limit_s: largest 95th percentile of latency, in seconds.
    """
    points: dict[float, Point] = {}

    def holds(rate: float) -> bool:
        points[rate] = point = measure(rate)
        return point.kept_up and point.latency_p95_s.estimate <= limit_s

    rate = FIRST
    if holds(rate):
        while rate < MOST and holds(2 * rate):
            rate *= 2
    else:
        before, rate = points[rate].latency_p95_s, rate / 2
        while not holds(rate):
            if rate <= LEAST or points[rate].latency_p95_s.high >= before.estimate > limit_s:
                return [points[each] for each in sorted(points)]  # waiting is not what takes the time
            before, rate = points[rate].latency_p95_s, rate / 2
    if 2 * rate in points:
        for _ in range(REFINEMENTS):
            broken = min(other for other in points if other > rate)
            middle = math.sqrt(rate * broken)
            if holds(middle):
                rate = middle
    return [points[rate] for rate in sorted(points)]


def point(rate: float, results: Sequence[dict]) -> Point:
    """Return a point from the results of `vllm bench serve` in several rounds at one rate.

    Raises:
        QrlError: the server completed none of a round's requests.
    """
    if not all(result["completed"] for result in results):
        raise QrlError(f"The server completed no request of a round at {rate:.3g} a second: see its log.")
    counts = {key: sum(result.get(key, 0) for result in results) for key in ("completed", "failed")}
    over = {name: summary.over_rounds([result[key] / per for result in results]) for name, (key, per) in UNITS.items()}
    completed = summary.over_rounds([result["request_throughput"] for result in results])
    return Point(rate, completed_per_s=completed, requests=counts["completed"], failed=counts["failed"], **over)


def markdown(measured: Sequence[Capacity]) -> str:
    """Return the table of capacities in Markdown, with a note on what was measured."""
    head = [
        "model",
        "requests/s at the limit",
        "latency p95, s",
        "first token, s",
        "tokens/s",
        "KV cache a request, MB",
    ]
    rows = []
    for capacity in measured:
        at, size = capacity.at_limit, f"{capacity.request_cache_bytes / 1e6:.2f}"
        speeds = ["–"] * 3
        if at:
            seconds = (summary.text(value, 3) for value in (at.latency_p95_s, at.first_token_s))
            speeds = [*seconds, summary.text(at.tokens_per_s, 0)]
        rows.append([capacity.label, capacity.text, *speeds, size])
    first, points = measured[0], [point for capacity in measured for point in capacity.points]
    note = (
        f"{first.engine}; `vllm bench serve`, open-loop Poisson arrivals. The limit is a 95th percentile of latency of "
        f"{first.limit_s:g} s; rates were tried down to steps of 2^(1/8). Brackets are 95 % intervals over "
        f"{points[0].latency_p95_s.n} rounds; those of the rate run from the largest rate whose latency is within the "
        "limit with its whole interval to the largest with a part of it. "
        f"n = {min(point.requests for point in points)} requests or more a rate."
    )
    return "\n".join(table(head, rows)) + f"\n\n{note}\n"


def metrics(capacity: Capacity) -> dict[str, float]:
    """Return metric name → value of a model's run."""
    low, high = capacity.bounds
    values = {"serve/capacity_per_s": capacity.held, "serve/capacity_per_s_low": low, "serve/capacity_per_s_high": high}
    return values | {"serve/kv_cache_bytes_per_request": capacity.request_cache_bytes}
