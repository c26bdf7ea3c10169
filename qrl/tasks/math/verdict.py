r"""The rules for a completion with its answer in \boxed{}.

Strict: the content of \boxed{}. Several boxes must be equal, in whatever spelling; conflicting ones score zero, so that
listing candidates earns nothing. Flexible: the last box alone; without a box, the last expression or number that
math-verify extracts near the end. Thinking, and text after an end token, are ignored (`thinking.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass

from qrl.errors import BadInput
from qrl.tasks.math import latex
from qrl.tasks.math.latex import LONGEST_ANSWER
from qrl.tasks.question import Verdict
from qrl.tasks.thinking import TAGS, Tags
from qrl.tasks.thinking import answer as answer_part

MOST_BOXES = 8  # different texts in boxes: more are a list of candidates
TAIL = 2000  # characters at the end that are searched for an expression if there is no box


@dataclass(frozen=True, slots=True)
class Claim:
    """The part of a completion that decides its verdict; a worker gets this instead of a megabyte of text."""

    gold: str  # the gold answer in normal form
    boxes: tuple[str, ...]  # different contents of its boxes in normal form, in order; at most `MOST_BOXES` + 1
    tail: str  # the end of the text, if there is no box


def claim(completion: str, answer: str, tags: Tags = TAGS) -> Claim:
    """Return what a completion claims, beside the gold answer."""
    body = answer_part(completion, tags)
    contents = latex.boxes(body)
    if not contents:
        return Claim(gold(answer), (), body[-TAIL:])

    # Each different text once, where it is last: the last box decides the flexible verdict.
    boxes = []
    for box in dict.fromkeys(reversed(contents)):
        normal = box if len(box) > LONGEST_ANSWER else latex.normal(box)
        if normal and normal not in boxes:
            boxes.append(normal)
        if len(boxes) > MOST_BOXES:
            break
    return Claim(gold(answer), tuple(reversed(boxes)), "")


def gold(answer: str) -> str:
    r"""Return the gold answer of a text or of its last \boxed{} in normal form; raise BadInput if empty or too long."""
    contents = latex.boxes(answer)
    content = contents[-1] if contents else answer
    text = latex.normal(content[: LONGEST_ANSWER + 1])
    if not text or len(text) > LONGEST_ANSWER:
        defect = "too long" if text else "empty"
        expected = f"an expression such as \\frac{{14}}{{3}}, of at most {LONGEST_ANSWER} characters"
        raise BadInput(f"The gold answer {answer[:80]!r} is {defect}: expected {expected}.")
    return text


def verdict(claim: Claim, same: Callable[[str, str], bool], last_expression: Callable[[str], str | None]) -> Verdict:
    """Return the verdict on a claim, with functions that compare answers and extract a text's last expression."""
    if not claim.boxes:
        stated = last_expression(claim.tail)
        return Verdict(None, False, stated is not None and same(claim.gold, stated))
    *earlier_boxes, last_box = claim.boxes
    if len(last_box) > LONGEST_ANSWER:
        return Verdict(None, False, False)
    boxes_agree = len(earlier_boxes) < MOST_BOXES and all(
        len(box) <= LONGEST_ANSWER and same(last_box, box) for box in earlier_boxes
    )
    is_right = same(claim.gold, last_box)
    return Verdict(last_box if boxes_agree else None, is_right and boxes_agree, is_right)


def by_text(claim: Claim) -> Verdict | None:
    """Return the verdict if comparing texts and plain numbers is enough, as it mostly is; else None, for a worker."""
    try:
        return verdict(claim, _same, _no_expression)
    except _UnsureError:
        return None


class _UnsureError(Exception):
    """Comparing texts is not enough: algebra is needed."""


def _same(gold: str, stated: str) -> bool:
    equal = latex.same(gold, stated)
    if equal is None:
        raise _UnsureError
    return equal


def _no_expression(text: str) -> None:
    if any(letter in "$\\" or letter.isdigit() for letter in text):  # else nothing can be extracted
        raise _UnsureError
