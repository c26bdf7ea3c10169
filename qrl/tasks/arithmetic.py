"""Word problems in GSM8K's format with one to four steps, from a seeded generator.

A problem is a chain: a person has some things, and each step either changes that number or moves on to another person,
with a number relative to it. Numbers stay whole and within 0..999. A hash of a question's text decides its split, so no
text is in both splits, whatever the seeds and sizes.
"""

import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from qrl.tasks.question import Question

LARGEST = 999
HELDOUT_SHARE = 5  # one text in five is held out

NAMES = ("Ann", "Tom", "Ben", "Mia", "Sam", "Eva", "Leo", "Zoe", "Max", "Amy", "Ned", "Ivy", "Kai", "Liz", "Jon", "Pam")
OBJECTS = (
    "apples", "books", "cards", "coins", "pens", "shells", "stamps", "eggs",
    "beads", "cups", "kites", "marbles", "stones", "tickets", "plums", "roses",
)  # fmt: skip

# n: the person who has the things now; m: another person; b: the step's number; o: the things.
OPENINGS = ("{n} has {b} {o}.", "{n} starts with {b} {o}.", "There are {b} {o} in the bag of {n}.", "{n} owns {b} {o}.")
SENTENCES = {
    "gain": ("{n} buys {b} more.", "{n} finds {b} more {o}.", "{m} gives {n} {b} {o}.",
             "Then {n} gets {b} {o} as a gift."),
    "lose": ("{n} gives {b} {o} to {m}.", "{n} loses {b} of them.", "{n} sells {b} {o}.",
             "Then {n} throws {b} of the {o} away."),
    "more": ("{m} has {b} more {o} than {n}.", "{m} owns {b} {o} more than {n}."),
    "fewer": ("{m} has {b} fewer {o} than {n}.", "{n} has {b} more {o} than {m}."),
    "times": ("{m} has {b} times as many {o} as {n}.", "{m} owns {b} times the {o} of {n}.",
              "For each of these {o}, {m} has {b}."),
    "share": ("{n} shares them equally among {b} friends, and {m} is one of them.",
              "{n} packs the {o} into {b} equal boxes and hands one box to {m}.",
              "{m} has as many {o} as one of {b} equal shares of these."),
}  # fmt: skip
ENDINGS = ("How many {o} does {n} have now?", "How many {o} does {n} have?", "How many {o} does {n} have in the end?")
SUMS = ("How many {o} do {n} and {m} have together?", "How many {o} do {n} and {m} have in all?")

KINDS = tuple(SENTENCES)
WEIGHTS = (20, 20, 16, 16, 18, 10)  # frequency of each kind, where its numbers allow it
# How a solution writes a calculation by its sign, `{0}+{1}={2}`, and its end: as `arithmetic` does; as GSM8K's rows do,
# with calculator annotations; as MATH does, in LaTeX.
FORMS = {
    "plain": {"+": "{0}+{1}={2}", "-": "{0}-{1}={2}", "*": "{0}*{1}={2}", "/": "{0}/{1}={2}", "end": "#### {0}"},
    "gsm8k": {
        "+": "{0}+{1}=<<{0}+{1}={2}>>{2}", "-": "{0}-{1}=<<{0}-{1}={2}>>{2}", "*": "{0}*{1}=<<{0}*{1}={2}>>{2}",
        "/": "{0}/{1}=<<{0}/{1}={2}>>{2}", "end": "#### {0}",
    },
    "math": {
        "+": "${0} + {1} = {2}$", "-": "${0} - {1} = {2}$", "*": "${0} \\times {1} = {2}$",
        "/": "$\\frac{{{0}}}{{{1}}} = {2}$", "end": "The answer is $\\boxed{{{0}}}$.",
    },
}  # fmt: skip
SIGN = {"gain": "+", "lose": "-", "more": "+", "fewer": "-", "times": "*", "share": "/", "together": "+"}
STAYS = ("gain", "lose")  # kinds after which the question is still about the same person
MOST_STEPS = 4
TOGETHER = 0.15  # share of questions that add up the last two people, where the last step moved on to another person


@dataclass(frozen=True, slots=True)
class Step:
    """One calculation of a problem."""

    kind: str  # one of `KINDS`, or "together"
    number: int | None  # its second operand; None for "together", which adds the last two numbers
    line: str  # the sentence of the solution, with `{e}` in place of the calculation, `3+4=7`


@dataclass(frozen=True, slots=True)
class Problem:
    """An unsolved question: its text, its first number, and its steps in order."""

    question: str
    start: int
    steps: tuple[Step, ...]


def load(split: str, n: int, seed: int) -> list[Question]:
    """Return n different questions of a split; their ids name split, seed and position."""
    return questions(f"arithmetic-{split}-{seed}", islice(problems(split, seed), n), solve)


def questions(prefix: str, problems: Iterable[Problem], solve: Callable[[Problem], tuple[str, int]]) -> list[Question]:
    """Return problems with the solutions that `solve` returns, with ids that count them."""
    result = []
    for index, problem in enumerate(problems):
        solution, answer = solve(problem)
        result.append(Question(f"{prefix}-{index}", problem.question, solution, str(answer)))
    return result


def problems(split: str, seed: int | str) -> Iterator[Problem]:
    """Yield different problems of a split ("train" or "heldout") without end."""
    rng = random.Random(f"qrl.arithmetic:{split}:{seed}")
    earlier_texts = set()
    while True:
        problem = draw(rng)
        if split_of(problem.question) == split and problem.question not in earlier_texts:
            earlier_texts.add(problem.question)
            yield problem


def split_of(question: str) -> str:
    """Return the split that a question's text belongs to, by its hash."""
    return "heldout" if zlib.crc32(question.encode()) % HELDOUT_SHARE == 0 else "train"


def draw(rng: random.Random) -> Problem:
    """Return a problem of one to four steps, of either split.

    The order of the draws is part of the data set: another one makes other questions of the same seed.
    """
    people = rng.sample(NAMES, 5)
    objects = _pick(OBJECTS, rng)
    start = 2 + int(rng.random() ** 2 * 298)  # small numbers are likelier, as in GSM8K
    sentences = [_pick(OPENINGS, rng).format(n=people[0], b=start, o=objects)]
    steps: list[Step] = []

    person, value = people[0], start
    previous: tuple[str, int] | None = None  # the person before this one, and that person's number
    step_count = 1 + int(rng.random() * MOST_STEPS)
    for next_person in people[1 : 1 + step_count]:
        kind = rng.choices(KINDS, WEIGHTS)[0]
        kind, number = _operand(kind, value, rng)
        sentences.append(_pick(SENTENCES[kind], rng).format(n=person, m=next_person, b=number, o=objects))
        if kind in STAYS:
            previous = None
            line = f"{person} now has {{e}} {objects}."
        else:
            previous = (person, value)
            person = next_person
            line = f"{person} has {{e}} {objects}."
        steps.append(Step(kind, number, line))
        value = apply(value, SIGN[kind], number)

    # The last two people can be added up if both still have their things, and a step is left for it.
    can_add = previous is not None and steps[-1].kind != "share" and len(steps) < MOST_STEPS
    if can_add and value + previous[1] <= LARGEST and rng.random() < TOGETHER:
        sentences.append(_pick(SUMS, rng).format(n=previous[0], m=person, o=objects))
        steps.append(Step("together", None, f"Together they have {{e}} {objects}."))
    else:
        sentences.append(_pick(ENDINGS, rng).format(n=person, o=objects))
    return Problem(" ".join(sentences), start, tuple(steps))


def solve(problem: Problem, signs: Sequence[str] | None = None, form: str = "plain") -> tuple[str, int] | None:
    """Return the worked solution, which ends in the answer, and the answer; None if `calculate` returns None.

    Args:
        signs: an operator per step; None means the right ones, others give a wrong solution.
        form: how the solution is written, one of `FORMS`.
    """
    calculations = calculate(problem, signs)
    if calculations is None:
        return None
    spelling = FORMS[form]
    lines = []
    for step, (left, sign, right, result) in zip(problem.steps, calculations, strict=True):
        lines.append(step.line.format(e=spelling[sign].format(left, right, result)))
    answer = calculations[-1][-1]
    lines.append(spelling["end"].format(answer))
    return "\n".join(lines), answer


def calculate(problem: Problem, signs: Sequence[str] | None = None) -> list[tuple[int, str, int, int]] | None:
    """Return each step as left, sign, right, result; None if wrong signs leave the whole numbers 0..999."""
    if signs is None:
        signs = right_signs(problem)
    value = problem.start
    previous = None
    calculations = []
    for step, sign in zip(problem.steps, signs, strict=True):
        # "together" adds the numbers of two people; every other step changes the last one by its own number.
        left, right = (previous, value) if step.number is None else (value, step.number)
        result = apply(left, sign, right)
        if result is None:
            return None
        calculations.append((left, sign, right, result))
        previous = value
        value = result
    return calculations


def right_signs(problem: Problem) -> list[str]:
    """Return the right operator of each step."""
    return [SIGN[step.kind] for step in problem.steps]


def apply(left: int, sign: str, right: int) -> int | None:
    """Return `left sign right`; None outside the whole numbers 0..999."""
    if sign == "/":
        return None if left % right else left // right
    if sign == "+":
        result = left + right
    elif sign == "-":
        result = left - right
    else:
        result = left * right
    return result if 0 <= result <= LARGEST else None


def _pick(options: Sequence[str] | Sequence[int], rng: random.Random) -> Any:
    return options[int(rng.random() * len(options))]


def _operand(kind: str, value: int, rng: random.Random) -> tuple[str, int]:
    """Return a kind and a second operand that keep the result whole and within 0..999; change the kind if need be."""
    if kind == "share":
        divisors = [k for k in range(2, 10) if value % k == 0 and value >= k]
        if divisors:
            return kind, _pick(divisors, rng)
        kind = "times"
    if kind == "times":
        if 2 * value <= LARGEST and value:
            largest_factor = min(9, LARGEST // value)
            return kind, 2 + int(rng.random() * (largest_factor - 1))
        kind = "fewer"
    if kind in ("gain", "more") and value > LARGEST - 2:
        kind = "lose" if kind == "gain" else "fewer"
    if kind in ("lose", "fewer") and value < 2:
        kind = "gain" if kind == "lose" else "more"
    largest = LARGEST - value if kind in ("gain", "more") else value
    return kind, 1 + int(rng.random() * min(largest, 200))
