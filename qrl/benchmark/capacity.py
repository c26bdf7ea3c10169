"""How many requests a second a server holds: arrivals at rising rates, until latency breaks a limit.

Arrivals are open-loop: a request is sent when its time has come, whether or not earlier ones were answered. A fixed
number of clients would send a slow server fewer requests, so that overload would not show.
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

# Requests a second: where the search begins, and its bounds.
FIRST_RATE = 1.0
LARGEST_RATE = 4096.0
SMALLEST_RATE = 1 / 64
REFINEMENTS = 3  # steps of bisection, on a logarithmic scale: the rates around the limit are 2^(1/8) apart
COMPLETED_SHARE = 0.9  # of the requests that arrive; a server that completes fewer has a queue that grows without bound


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
    def keeps_up(self) -> bool:
        """Whether no request failed, and as many were answered a second as a server without a queue answers."""
        if self.failed:
            return False
        # A round lasts until its last answer, so even a server without a queue completes less than arrives.
        requests_per_round = self.requests / self.completed_per_s.n
        round_s = requests_per_round / self.rate + self.latency_p50_s.estimate
        possible_per_s = requests_per_round / round_s
        return self.completed_per_s.high >= COMPLETED_SHARE * possible_per_s


@dataclass(frozen=True)
class Capacity:
    """The measurements of one model's server at rising rates, and the largest rate that it holds."""

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
    def requests_per_s(self) -> float:
        """The largest rate up to which every measured one is within the limit; 0 if none is."""
        return self._largest_rate("estimate")

    @property
    def bounds(self) -> tuple[float, float]:
        """The largest rate whose latency is within the limit with its whole interval, and with a part of it."""
        return self._largest_rate("high"), self._largest_rate("low")

    @property
    def at_limit(self) -> Point | None:
        """The point at the capacity; None if no rate is within the limit."""
        return next((point for point in self.points if point.rate == self.requests_per_s), None)

    @property
    def text(self) -> str:
        """The capacity with its bounds, such as `45.3 [38.1, 45.3]`."""
        if not self.requests_per_s:
            return f"below {self.points[0].rate:.3g}"
        low, high = self.bounds
        prefix = "≥ " if self.at_limit is self.points[-1] else ""  # the search ended before a rate broke the limit
        return f"{prefix}{self.requests_per_s:.3g} [{low:.3g}, {high:.3g}]"

    def _largest_rate(self, field: str) -> float:
        """Return the largest rate up to which latency is within the limit, by a field of its estimate."""
        largest_rate = 0.0
        for point in self.points:
            if not point.keeps_up or getattr(point.latency_p95_s, field) > self.limit_s:
                break
            largest_rate = point.rate
        return largest_rate


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
        point = measure(rate)
        points[rate] = point
        return point.keeps_up and point.latency_p95_s.estimate <= limit_s

    rate = FIRST_RATE
    if holds(rate):
        while rate < LARGEST_RATE and holds(2 * rate):
            rate *= 2
    else:
        latency_at_double = points[rate].latency_p95_s
        rate /= 2
        while not holds(rate):
            latency = points[rate].latency_p95_s
            # Half the rate takes as long: the time is not spent waiting in a queue, so no rate will do.
            is_unchanged = latency.high >= latency_at_double.estimate > limit_s
            if rate <= SMALLEST_RATE or is_unchanged:
                return _by_rate(points)
            latency_at_double = latency
            rate /= 2

    if 2 * rate in points:  # which broke the limit
        for _ in range(REFINEMENTS):
            broken_rate = min(measured_rate for measured_rate in points if measured_rate > rate)
            middle_rate = math.sqrt(rate * broken_rate)
            if holds(middle_rate):
                rate = middle_rate
    return _by_rate(points)


def _by_rate(points: dict[float, Point]) -> list[Point]:
    return [points[rate] for rate in sorted(points)]


def point(rate: float, results: Sequence[dict]) -> Point:
    """Return a point from the results of `vllm bench serve` in several rounds at one rate.

    Raises:
        QrlError: the server completed none of a round's requests.
    """
    if not all(result["completed"] for result in results):
        raise QrlError(f"The server completed no request of a round at {rate:.3g} a second: see its log.")
    estimates = {
        name: summary.over_rounds([result[key] / units for result in results]) for name, (key, units) in UNITS.items()
    }
    return Point(
        rate,
        completed_per_s=summary.over_rounds([result["request_throughput"] for result in results]),
        requests=sum(result["completed"] for result in results),
        failed=sum(result.get("failed", 0) for result in results),
        **estimates,
    )


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
        at_limit = capacity.at_limit
        speeds = ["–"] * 3
        if at_limit:
            speeds = [
                summary.text(at_limit.latency_p95_s, 3),
                summary.text(at_limit.first_token_s, 3),
                summary.text(at_limit.tokens_per_s, 0),
            ]
        cache_mb = f"{capacity.request_cache_bytes / 1e6:.2f}"
        rows.append([capacity.label, capacity.text, *speeds, cache_mb])

    first = measured[0]
    points = []
    for capacity in measured:
        points += capacity.points
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
    return {
        "serve/capacity_per_s": capacity.requests_per_s,
        "serve/capacity_per_s_low": low,
        "serve/capacity_per_s_high": high,
        "serve/kv_cache_bytes_per_request": capacity.request_cache_bytes,
    }
