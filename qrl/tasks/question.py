"""What tasks and graders exchange: a question with its gold answer, and the verdict on a completion."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Question:
    """A question and its gold answer.

    Args:
        id: unique within its task; the cells of a study are paired by it.
        question: the question's text, without any instruction.
        solution: worked reasoning that ends in the form that its task grades: a line `#### x`, or `\\boxed{x}`.
        answer: x, as the grader normalizes it.
        subject: its topic, where the data set gives one.
        level: its difficulty, from 1, where the data set gives one.
    """

    id: str
    question: str
    solution: str
    answer: str
    subject: str | None = None
    level: int | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """A grader's verdict on one completion.

    Args:
        parsed: the strict answer, normalized (`1,000.0` → `1000`); None if there is none, or several.
        strict: the strict answer equals the gold answer.
        flexible: the last number anywhere equals the gold answer.
        fault: "timeout" or "error" where the grader itself failed, which counts as wrong and is reported; else None.
    """

    parsed: str | None
    strict: bool
    flexible: bool
    fault: str | None = None
