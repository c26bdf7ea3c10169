"""Estimates and tables as Markdown."""

import math
from collections.abc import Iterable

from qrl.stats.estimate import Estimate, signed


def interval(value: Estimate) -> str:
    """Return a difference with its interval: `+0.040 [−0.087, +0.167]`."""
    return f"{signed(value.estimate)} [{signed(value.low)}, {signed(value.high)}]"


def percent(share: float) -> str:
    """Return a share in percent: `16 %`; below one, with a decimal, `0.4 %`."""
    digits = 1 if 0 < share < 0.0095 else 0
    return f"{100 * share:.{digits}f} %"


def percent_interval(share: Estimate) -> str:
    """Return a share in percent with its interval: `62 % [58, 66]`; an end that is unknown is `?`."""
    estimate, low, high = (
        _whole_percent(value) if math.isfinite(value) else "?" for value in (share.estimate, share.low, share.high)
    )
    return f"{estimate} % [{low}, {high}]"


def _whole_percent(share: float) -> str:
    """Return a share as a whole number of percent; what rounds to 0 has no sign."""
    return f"{round(100 * share)}".replace("-", "−")


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Return the lines of a Markdown table, its first column left-aligned and the others right-aligned."""
    head = list(head)
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return [f"| {' | '.join(line)} |" for line in lines]
