"""One question with its worked solution: what every task hands out."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Question:
    """A question and its gold answer.

    Args:
        id: names the question within its task; cells of a study are paired by it.
        question: what is asked, without any instruction.
        solution: worked reasoning that ends in the form that its task grades: a line `#### x`, or `\\boxed{x}`.
        answer: x, as the grader normalizes it.
        subject: what it is about, where its data set says so.
        level: how hard it is, from 1, where its data set says so.
    """

    id: str
    question: str
    solution: str
    answer: str
    subject: str | None = None
    level: int | None = None
