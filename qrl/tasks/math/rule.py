r"""When a completion of the task `math` is right.

Strict: the content of \boxed{}. Every box of a completion must say the same, however written; different ones are no answer,
so that listing candidates earns nothing. Flexible: the last box alone; without one, the last expression or number that
math-verify finds near the end. What follows an end token is not read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from qrl.errors import BadInput
from qrl.tasks.grade import ENDS, Verdict
from qrl.tasks.math import text as math_text

MOST_BOXES = 8  # different texts in boxes: more are a list of candidates
TAIL = 2000  # characters at the end that are searched for an expression where there is no box


class Unsure(Exception):
    """Texts alone cannot tell: algebra has to."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A completion reduced to what decides, so that a megabyte of text does not travel to a worker.

    Args:
        gold: the gold answer in normal form.
        boxes: different contents of its boxes in normal form, the last one last; at most `MOST_BOXES` + 1.
        tail: the end of the text, where there is no box.
    """

    gold: str
    boxes: tuple[str, ...]
    tail: str


def asked(completion: str, answer: str) -> Asked:
    """What a completion says, and what is right.

    Raises:
        BadInput: the gold answer is empty, or longer than an answer can be.
    """
    body = ENDS.split(completion, maxsplit=1)[0]
    found = math_text.boxes(body)
    if not found:
        return Asked(gold(answer), (), body[-TAIL:])
    once = dict.fromkeys(reversed(found))
    normal = dict.fromkeys(box if len(box) > math_text.LONGEST_ANSWER else math_text.normal(box) for box in once)
    different = [box for box in normal if box][: MOST_BOXES + 1]
    return Asked(gold(answer), tuple(reversed(different)), "")


def gold(answer: str) -> str:
    r"""The gold answer in normal form, from the answer itself or a worked solution with a \boxed{}.

    Raises:
        BadInput: there is none.
    """
    found = math_text.boxes(answer)
    text = math_text.normal((found[-1] if found else answer)[: math_text.LONGEST_ANSWER + 1])
    if not text or len(text) > math_text.LONGEST_ANSWER:
        raise BadInput(
            f"The gold answer {answer[:80]!r} is {'empty' if not text else 'too long'}: expected an expression such as "
            f"\\frac{{14}}{{3}}, of at most {math_text.LONGEST_ANSWER} characters."
        )
    return text


def verdict(asked: Asked, same: Callable[[str, str], bool], last_expression: Callable[[str], str | None]) -> Verdict:
    """The verdict on what a completion says.

    Args:
        asked: gold answer and boxes.
        same: (gold, said) → whether they are equal.
        last_expression: text → the last expression in it.
    """
    if not asked.boxes:
        said = last_expression(asked.tail)
        return Verdict(None, False, said is not None and same(asked.gold, said))
    *others, last = asked.boxes
    if len(last) > math_text.LONGEST_ANSWER:
        return Verdict(None, False, False)
    agreed = len(others) < MOST_BOXES and all(
        len(other) <= math_text.LONGEST_ANSWER and same(last, other) for other in others
    )
    right = same(asked.gold, last)
    return Verdict(last if agreed else None, right and agreed, right)


def by_text(asked: Asked) -> Verdict | None:
    """The verdict where texts and plain numbers are enough, as they are for most; None leaves it to a worker."""
    try:
        return verdict(asked, _same, _no_expression)
    except Unsure:
        return None


def _same(gold: str, said: str) -> bool:
    told = math_text.same(gold, said)
    if told is None:
        raise Unsure
    return told


def _no_expression(text: str) -> str | None:
    """Without a digit, a dollar sign or a command nothing can be extracted."""
    if any(letter in "$\\" or letter.isdigit() for letter in text):
        raise Unsure
    return None
