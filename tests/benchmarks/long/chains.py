"""A task with long answers: count up to a number in equal steps, a line for each step. One wrong sum makes it wrong.

The made model sums wrongly now and then, at any line alike: GRPO has to find a few bad tokens among thousands. Its
reward is the share of right lines, since a model this small gets no answer of 450 lines wholly right.
"""

import random
import re

from qrl.tasks import Question, Verdict

LINES = 450  # of the longest answer; 17 tokens each


def chain(target: int, first: int, step: int, slip=lambda: 0) -> str:
    """Return the lines from `first` up to `target`; `slip` says by how much each sum is wrong."""
    lines, number = [], first
    while number < target:
        following = number + step + slip()
        lines.append(f"{target} {number}+{step}={following}")
        number = following
    return "\n".join([*lines, f"#### {target}"])


def drawn(draw: random.Random, lines: int, firsts: range) -> tuple[int, int, int]:
    """Return target, first number and step of a question whose answer has about `lines` lines."""
    first, step = draw.choice(firsts), draw.randint(2, 9)
    return first + step * draw.randint(max(1, lines * 9 // 10), lines), first, step


def load(split: str, n: int | None, seed: int) -> list[Question]:
    """Return questions of a split: even first numbers are for training, odd ones held out."""
    draw, found = random.Random(f"{split} {seed}"), {}
    while len(found) < (n or 500):
        target, first, step = drawn(draw, LINES, range(2 - (split == "heldout"), 1000, 2))
        asked = f"Count from {first} to {target} by {step}."
        found[asked] = Question(f"{split}-{asked}", asked, chain(target, first, step), f"{target} {first} {step}")
    return list(found.values())


def lines(completions: list[str], answers: list[str]) -> list[float]:
    """Return of each completion the share of lines that go on rightly from the line before, of those it should have."""
    return [
        _share(completion.strip().splitlines(), answer) for completion, answer in zip(completions, answers, strict=True)
    ]


def _share(written: list[str], answer: str) -> float:
    target, number, step = map(int, answer.split())
    wanted, right = len(range(number, target, step)) + 1, 0
    for place, line in enumerate(written):
        if not (summed := re.fullmatch(rf"{target} {number}\+{step}=([0-9]{{1,9}})", line)):
            right += line == f"#### {target}" and number >= target and place == len(written) - 1
            break
        right += int(summed[1]) == number + step
        number = int(summed[1])
    return min(right, wanted) / max(wanted, len(written))


def grade(completion: str, answer: str) -> Verdict:
    """Return the verdict: every line has to be right; flexible: the last one is."""
    target, first, step = map(int, answer.split())
    right, ended = completion.strip() == chain(target, first, step), completion.strip().endswith(f"#### {target}")
    return Verdict(str(target) if ended else None, strict=right, flexible=ended)
