"""Speed and latency over the batch size, a line per model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qrl.figures.canvas import BLUE, GREEN, GREY, LABEL_CHARACTERS, ORANGE, PURPLE, RED, SKY, canvas, finish, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from qrl.benchmark.capacity import Capacity
    from qrl.benchmark.summary import Line
    from qrl.stats import Estimate

COLOURS = (GREY, BLUE, ORANGE, GREEN, PURPLE, SKY, RED)
STYLES = ("-", "--", ":", "-.")


def speeds(lines: Sequence[Line], path: str | Path, at_once: str = "prompts") -> None:
    """Draw tokens per second and the 95th percentile of latency over the batch, with 95 % intervals over rounds.

    Args:
        lines: from `benchmark.summary.lines`.
        path: the PNG to write.
        at_once: what a batch counts.
    """
    figure, (speed_panel, latency_panel) = canvas(7.4, 6.4, rows=2)
    for number, label in enumerate(dict.fromkeys(line.label for line in lines)):
        of_label = [line for line in lines if line.label == label]
        batches = [line.batch for line in of_label]
        _draw_series(speed_panel, batches, [line.tokens_per_s for line in of_label], number, label)
        _draw_series(latency_panel, batches, [line.latency_p95_s for line in of_label], number, label)
    for axes, name in ((speed_panel, "tokens per second"), (latency_panel, "latency p95, seconds")):
        axes.set_xscale("log", base=2)
        _set_plain_numbers(axes)
        axes.set_ylabel(name)
    all_batches = sorted({line.batch for line in lines})
    latency_panel.set_xticks(all_batches, list(map(str, all_batches)))
    latency_panel.set_xlabel(f"{at_once} at once")
    speed_panel.legend(frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5))
    fastest = max(lines, key=lambda line: line.tokens_per_s.estimate)
    speed = fastest.tokens_per_s
    interval = f"{speed.estimate:,.0f} [{speed.low:,.0f}, {speed.high:,.0f}] tokens/s"
    title = (
        f"Fastest: {shortened(fastest.label, 2 * LABEL_CHARACTERS)} with {fastest.batch} {at_once} at once, {interval}"
    )
    note = (
        f"{fastest.engine}. Bars are 95 % intervals over {speed.n} interleaved rounds; "
        f"n = {min(line.requests for line in lines)} requests or more a point."
    )
    finish(figure, title, note, path)


def _draw_series(axes: Axes, x: Sequence[float], values: Sequence[Estimate], number: int, label: str) -> None:
    """Draw the values of one label with their intervals; `number` selects its colour and line style."""
    estimates = [value.estimate for value in values]
    below = [value.estimate - value.low for value in values]
    above = [value.high - value.estimate for value in values]
    axes.errorbar(
        x,
        estimates,
        yerr=(below, above),
        label=shortened(label, 2 * LABEL_CHARACTERS),  # a variant and a scheme
        color=COLOURS[number % len(COLOURS)],
        ls=STYLES[number // len(COLOURS) % len(STYLES)],
        marker="o",
        ms=4,
        capsize=2,
    )


def capacities(measured: Sequence[Capacity], path: str | Path) -> None:
    """Draw the 95th percentile of latency over the rate of arrivals, a line per model, with the limit.

    Args:
        measured: from `benchmark.capacity`.
        path: the PNG to write.
    """
    figure, axes = canvas(7.4, 4.2)
    for number, capacity in enumerate(measured):
        rates = [point.rate for point in capacity.points]
        latencies = [point.latency_p95_s for point in capacity.points]
        _draw_series(axes, rates, latencies, number, capacity.label)
    limit = measured[0].limit_s
    axes.axhline(limit, color=GREY, ls=":", lw=1)
    axes.set_xscale("log", base=2)
    _set_plain_numbers(axes)
    axes.set_xlabel("requests a second, as they arrive")
    axes.set_ylabel("latency p95, seconds")
    points = []
    for capacity in measured:
        points += capacity.points
    ticks = sorted({2.0 ** round(math.log2(point.rate)) for point in points})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5))
    largest = max(measured, key=lambda capacity: capacity.requests_per_s)
    title = f"At a p95 of {limit:g} s, {shortened(largest.label, 2 * LABEL_CHARACTERS)} holds {largest.text} requests/s"
    rounds = points[0].latency_p95_s.n
    n = min(point.requests for point in points)
    note = f"{largest.engine}. Dotted: the limit. Bars: 95 % intervals over {rounds} rounds; n = {n} or more a point."
    finish(figure, title, note, path)


def _set_plain_numbers(axes) -> None:
    """Set a logarithmic axis with plain labels, 0.05 and 2,000: 1, 2 and 5 of each decade, or even steps within one."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)))
    ticks = []
    for decade in decades:
        ticks += [step * 10.0**decade for step in (1, 2, 5)]
    if high < 10 * low:
        ticks = MaxNLocator(5, integer=low >= 1000).tick_values(low, high)
    axes.set_yticks([tick for tick in ticks if low <= tick <= high])  # fixed: LogLocator may find none on a short axis
    axes.yaxis.set_major_formatter(FuncFormatter(_plain_number))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _plain_number(value: float, _tick: int) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
