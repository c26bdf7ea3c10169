"""What tasks and graders exchange: a question with its gold answer, and the verdict on a completion."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Question:
    """A question and its gold answer."""

    id: str  # unique within its task; the cells of a study are paired by it
    question: str  # its text, without any instruction
    solution: str  # worked reasoning that ends in the form that its task grades: a line `#### x`, or `\boxed{x}`
    answer: str  # x, as the grader normalizes it
    subject: str | None = None  # its topic, where the data set gives one
    level: int | None = None  # its difficulty, from 1, where the data set gives one


def bare(question: str) -> str:
    """Return a question's text without white space and case, which make no other question."""
    return "".join(question.casefold().split())


@dataclass(frozen=True, slots=True)
class Verdict:
    """A grader's verdict on one completion."""

    parsed: str | None  # the strict answer, normalized (`1,000.0` → `1000`); None if there is none, or several
    strict: bool  # the strict answer equals the gold answer
    flexible: bool  # the last number anywhere equals the gold answer
    fault: str | None = None  # "timeout" or "error" where the grader itself failed, which counts as wrong
    fault_cause: str | None = field(default=None, compare=False)  # what it raised, in words


def leaked(question: str, text: str, raw: str, markers: Sequence[str]) -> bool:
    """Return whether a completion has chat markers or repeats the question: signs of a new prompt after the answer.

    Args:
        question: its text.
        text: the completion without special tokens.
        raw: the completion with special tokens, but without the end token.
        markers: the tokenizer's special tokens.
    """
    return any(marker in raw for marker in markers) or question.strip() in text
