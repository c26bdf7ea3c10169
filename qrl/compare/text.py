"""Pieces of Markdown."""

from __future__ import annotations

from collections.abc import Iterable

from qrl.stats import Estimate, signed


def interval(value: Estimate) -> str:
    """A difference as text, never without its interval: `+0.040 [−0.087, +0.167]`."""
    return f"{signed(value.estimate)} [{signed(value.low)}, {signed(value.high)}]"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Lines of a table; the first column is left-aligned."""
    head = list(head)
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return [f"| {' | '.join(line)} |" for line in lines]
