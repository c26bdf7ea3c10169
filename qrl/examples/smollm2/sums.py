"""A task of one's own: sums, differences and products of small whole numbers; its grader, and a reward."""

import random
import re
import zlib

from qrl.tasks import Question, Verdict

LIMITS = {"train": 6000, "heldout": 2000}  # of about 10,300 and 2,600 different questions
SIGNS = "++--*"  # products are drawn half as often: there are few of them
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def load(split: str, n: int | None, seed: int) -> list[Question]:
    """Return different questions of a split, train or heldout: n of them, or all that the task offers."""
    count = min(n or LIMITS[split], LIMITS[split])
    generator = random.Random(f"{split} {seed}")
    questions: dict[str, Question] = {}
    while len(questions) < count:
        a, sign, b = draw_numbers(generator)
        if split_of(a, sign, b) == split:
            question = make_question(a, sign, b)
            questions[question.id] = question
    return list(questions.values())


def draw_numbers(generator: random.Random) -> tuple[int, str, int]:
    """Return two numbers and a sign; a difference is never negative, a product has a factor of one digit."""
    sign = generator.choice(SIGNS)
    a = generator.randrange(10, 100)
    b = generator.randrange(10, 100)
    if sign == "*":
        b = generator.randrange(2, 10)
    if sign == "-" and a < b:
        a, b = b, a
    return a, sign, b


def split_of(a: int, sign: str, b: int) -> str:
    """Return the split of a question, whatever the seed: a fifth is held out, a sum in both orders of its numbers."""
    ordered = f"{max(a, b)} {sign} {min(a, b)}"
    return "heldout" if zlib.crc32(ordered.encode()) % 5 == 0 else "train"


def make_question(a: int, sign: str, b: int) -> Question:
    """Return the question with its worked solution."""
    values = {"+": a + b, "-": a - b, "*": a * b}
    answer = str(values[sign])
    text = f"What is {a} {sign} {b}?"
    return Question(id=text, question=text, solution=f"{a} {sign} {b} = {answer}", answer=answer)


def grade(completion: str, answer: str) -> Verdict:
    """Return the verdict: the last number counts, so that `12 + 30 = 42` is right; flexible: any number counts."""
    numbers = numbers_in(completion)
    last = numbers[-1] if numbers else None
    return Verdict(parsed=last, strict=last == answer, flexible=answer in numbers)


def digits(completions: list[str], answers: list[str]) -> list[float]:
    """Reward each completion with the share of the answer's digits that its last number has in the same place.

    Few completions are right at first, so most groups of eight have none to learn from; some digits are right in all.
    """
    return [share_of_digits(completion, answer) for completion, answer in zip(completions, answers, strict=True)]


def share_of_digits(completion: str, answer: str) -> float:
    numbers = numbers_in(completion)
    if not numbers or len(numbers[-1]) > len(answer):
        return 0.0
    last = numbers[-1].rjust(len(answer))
    matches = [digit == right_digit for digit, right_digit in zip(last, answer, strict=True)]
    return sum(matches) / len(answer)


def numbers_in(completion: str) -> list[str]:
    """Return the numbers of a text, without commas between their digits."""
    return [number.replace(",", "") for number in NUMBER.findall(completion)]
