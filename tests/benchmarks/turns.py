"""Cases of a benchmark beside each other on one card, a process each, that measure in turn: one works, the others wait."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import subprocess
from collections.abc import Callable, Sequence


class Turn:
    """A byte that goes round between processes; who has read it may measure.

    Args:
        take: number of the pipe's end that it comes from.
        give: number of the next one's.
    """

    def __init__(self, take: int, give: int):
        self.take, self.give = take, give

    def __enter__(self):
        if not os.read(self.take, 1):
            raise EOFError("the process before this one ended without handing the turn on")

    def __exit__(self, *_):
        with contextlib.suppress(BrokenPipeError):  # the next has measured all it had to
            os.write(self.give, b".")


def run(commands: Sequence[Callable[[Turn], list[str]]]) -> list[int]:
    """Starts processes that take turns, the first one first.

    Args:
        commands: one a process: its command, made from the turn that it is to take.

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
    return [each.wait() for each in running]


def ratio(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> dict:
    """Ours over theirs, with Student's 95 % interval over rounds: the logarithm of each round's ratio of medians."""
    from scipy.stats import t

    logs = [
        math.log(statistics.median(one) / statistics.median(other)) for one, other in zip(ours, theirs, strict=True)
    ]
    mean, found = statistics.mean(logs), {"rounds": len(logs)}
    if len(logs) > 1:
        reach = t.ppf(0.975, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
        found |= {"ratio_low": math.exp(mean - reach), "ratio_high": math.exp(mean + reach)}
    return {"ratio": math.exp(mean), **found}
