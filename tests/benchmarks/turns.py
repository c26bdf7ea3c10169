"""Run the cases of a benchmark on one card, a process each, in turn: one measures while the others wait."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import subprocess
from collections.abc import Callable, Sequence


class Turn:
    """A byte that processes pass around; the one that has read it may measure.

    Args:
        take: file descriptor that the byte comes from.
        give: file descriptor of the next process.
    """

    def __init__(self, take: int, give: int):
        self.take, self.give = take, give

    def __enter__(self):
        if not os.read(self.take, 1):
            raise EOFError("the process before this one ended without passing the turn on")

    def __exit__(self, *_):
        with contextlib.suppress(BrokenPipeError):  # the next process has finished
            os.write(self.give, b".")


def run(commands: Sequence[Callable[[Turn], list[str]]]) -> list[int]:
    """Start processes that take turns, the first one first.

    Args:
        commands: one per process; each returns its command for a turn.

    Returns:
        Exit codes.
    """
    pipes = [os.pipe() for _ in commands]
    turns = [Turn(take, pipes[(number + 1) % len(pipes)][1]) for number, (take, _) in enumerate(pipes)]
    running = [
        subprocess.Popen(command(turn), pass_fds=(turn.take, turn.give))
        for command, turn in zip(commands, turns, strict=True)
    ]
    os.write(pipes[0][1], b".")
    for pipe in pipes:
        for end in pipe:
            os.close(end)
    return [process.wait() for process in running]


def ratio(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> dict:
    """Return ours over theirs with Student's 95 % interval over rounds, of the logarithm of each ratio of medians."""
    from scipy.stats import t

    pairs = zip(ours, theirs, strict=True)
    logs = [math.log(statistics.median(mine) / statistics.median(other)) for mine, other in pairs]
    mean = statistics.mean(logs)
    row = {"ratio": math.exp(mean), "rounds": len(logs)}
    if len(logs) > 1:
        reach = t.ppf(0.975, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
        row |= {"ratio_low": math.exp(mean - reach), "ratio_high": math.exp(mean + reach)}
    return row
