"""One question with its worked solution: what every task hands out."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Question:
    """A question and its gold answer.

    Args:
        id: names the question within its task; cells of a study are paired by it.
        question: what is asked, without any instruction.
        solution: worked reasoning that ends in a line `#### x`.
        answer: x, as the grader normalizes it.
    """

    id: str
    question: str
    solution: str
    answer: str
