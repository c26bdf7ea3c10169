"""Speed and latency over the batch, a line a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qrl.figures.canvas import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, canvas, finish

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from qrl.benchmark.summary import Line

COLOURS = (GREY, BLUE, ORANGE, GREEN, PURPLE, SKY, RED)
STYLES = ("-", "--", ":", "-.")


def speeds(lines: Sequence[Line], path: str | Path, at_once: str = "prompts") -> None:
    """Tokens per second above, 95th percentile of latency below, over the batch; bars are 95 % intervals over rounds.

    Args:
        lines: of `benchmark.summary.lines`.
        path: the PNG to write.
        at_once: what a batch counts.
    """
    figure, (above, below) = canvas(7.4, 6.4, rows=2)
    labels = list(dict.fromkeys(line.label for line in lines))
    for number, label in enumerate(labels):
        own = [line for line in lines if line.label == label]
        look = {
            "color": COLOURS[number % len(COLOURS)],
            "ls": STYLES[number // len(COLOURS) % len(STYLES)],
            "marker": "o",
            "ms": 4,
        }
        for axes, metric in ((above, "tokens_per_s"), (below, "latency_p95_s")):
            values = [getattr(line, metric) for line in own]
            reach = [
                [value.estimate - value.low for value in values],
                [value.high - value.estimate for value in values],
            ]
            axes.errorbar(
                [line.batch for line in own],
                [value.estimate for value in values],
                yerr=reach,
                label=label,
                capsize=2,
                **look,
            )
    for axes, name in ((above, "tokens per second"), (below, "latency p95, seconds")):
        axes.set_xscale("log", base=2)
        _plain_numbers(axes)
        axes.set_ylabel(name)
    below.set_xticks(
        sorted({line.batch for line in lines}), [str(batch) for batch in sorted({line.batch for line in lines})]
    )
    below.set_xlabel(f"{at_once} at once")
    above.legend(frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5))
    most = max(lines, key=lambda line: line.tokens_per_s.estimate)
    title = f"Fastest: {most.label} with {most.batch} {at_once} at once, {most.tokens_per_s.estimate:,.0f} [{most.tokens_per_s.low:,.0f}, {most.tokens_per_s.high:,.0f}] tokens/s"
    note = f"{most.engine}. Bars are 95 % intervals over {most.tokens_per_s.n} interleaved rounds; n = {min(line.requests for line in lines)} requests or more a point."
    finish(figure, above, title, note, path)


def _plain_numbers(axes: Axes) -> None:
    """A logarithmic axis with labels people read, 0.05 and 2,000: at 1, 2 and 5 of each decade, or evenly where there is less than one."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)) if high / low > 10 else MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 100 else f"{value:.4g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
