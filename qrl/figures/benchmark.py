"""Speed and latency over the batch, a line a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qrl.figures.canvas import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, canvas, finish

if TYPE_CHECKING:
    from qrl.benchmark.summary import Line

COLOURS = (GREY, BLUE, ORANGE, GREEN, PURPLE, SKY, RED)
STYLES = ("-", "--", ":", "-.")


def speeds(lines: Sequence[Line], path: str | Path) -> None:
    """Tokens per second above, 95th percentile of latency below, over the batch; bars are 95 % intervals over rounds.

    Args:
        lines: of `benchmark.summary.lines`.
        path: the PNG to write.
    """
    figure, (above, below) = canvas(7.4, 6.4, rows=2)
    labels = list(dict.fromkeys(line.label for line in lines))
    for number, label in enumerate(labels):
        own = [line for line in lines if line.label == label]
        look = {"color": COLOURS[number % len(COLOURS)], "ls": STYLES[number // len(COLOURS) % len(STYLES)], "marker": "o", "ms": 4}
        for axes, metric in ((above, "tokens_per_s"), (below, "latency_p95_s")):
            values = [getattr(line, metric) for line in own]
            reach = [[value.estimate - value.low for value in values], [value.high - value.estimate for value in values]]
            axes.errorbar([line.batch for line in own], [value.estimate for value in values], yerr=reach, label=label, capsize=2, **look)
    for axes, name in ((above, "tokens per second"), (below, "latency p95, seconds")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_ylabel(name)
    below.set_xticks(sorted({line.batch for line in lines}), [str(batch) for batch in sorted({line.batch for line in lines})])
    below.set_xlabel("prompts at once")
    above.legend(frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5))
    most = max(lines, key=lambda line: line.tokens_per_s.estimate)
    title = f"Most tokens per second: {most.label} at batch {most.batch}, {most.tokens_per_s.estimate:,.0f} [{most.tokens_per_s.low:,.0f}, {most.tokens_per_s.high:,.0f}]"
    note = f"{most.engine}. Bars are 95 % intervals over {most.tokens_per_s.n} interleaved rounds; n = {min(line.requests for line in lines)} requests or more a point."
    finish(figure, above, title, note, path)
