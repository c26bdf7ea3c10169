"""Estimates and tables as Markdown."""

import math
from collections.abc import Iterable

from qrl.stats.estimate import Estimate, signed

_SMALLEST_P = 1e-12  # far tails of a distribution are no more precise than this


def interval(value: Estimate) -> str:
    """Return a difference with its interval: `+0.040 [−0.087, +0.167]`."""
    return f"{signed(value.estimate)} [{signed(value.low)}, {signed(value.high)}]"


def percent(share: float) -> str:
    """Return a share in percent: `16 %`; below one, with a decimal, `0.4 %`."""
    digits = 1 if 0 < share < 0.0095 else 0
    return f"{100 * share:.{digits}f} %"


def percent_interval(share: Estimate) -> str:
    """Return a share in percent with its interval: `62 % [58, 66]`; an end that is unknown is `?`."""
    return f"{_whole_percent(share.estimate)} % [{_whole_percent(share.low)}, {_whole_percent(share.high)}]"


def _whole_percent(share: float) -> str:
    """Return a share as a whole number of percent; what rounds to 0 has no sign, and what is unknown is `?`."""
    if not math.isfinite(share):
        return "?"
    return f"{round(100 * share)}".replace("-", "−")


def p_text(value: float | None) -> str:
    """Return a p-value as text: `0.012`, or `below 1e-12`."""
    if value is None:
        return "not defined"
    return f"{value:.2g}" if value >= _SMALLEST_P else f"below {_SMALLEST_P:g}"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Return the lines of a Markdown table, its first column left-aligned and the others right-aligned."""
    head = list(head)
    alignment = ["---", *["---:"] * (len(head) - 1)]
    lines = [head, alignment, *rows]
    return [f"| {' | '.join(line)} |" for line in lines]
