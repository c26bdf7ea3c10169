"""The longest texts of many questions, in tokens.

Rendering and tokenizing thousands of questions takes minutes, and characters nearly order them as tokens do: only the
questions with the most characters are counted.
"""

from collections.abc import Sequence
from heapq import nlargest
from typing import Any

from qrl.tasks import prompt
from qrl.tasks.question import Question

COUNTED = 50  # questions whose tokens are counted


def longest_prompt(tokens: Any, questions: Sequence[Question], template: Any, *, counted: int = COUNTED) -> int:
    """Return the number of tokens of the longest prompt.

    Args:
        tokens: the tokenizer.
        questions: at least one.
        template: as in `prompt.render`.
        counted: how many questions are rendered, those with the most characters.
    """
    candidates = nlargest(counted, questions, key=lambda question: len(question.question))
    return max(len(prompt.render(tokens, question.question, template)) for question in candidates)


def longest_solution(tokens: Any, questions: Sequence[Question], template: Any) -> int:
    """Return the number of tokens of the longest question with its worked solution, as calibration reads it."""
    candidates = nlargest(COUNTED, questions, key=lambda question: len(question.question + question.solution))
    texts = [prompt.training_text(tokens, question, template) for question in candidates]
    return max(len(ids) for ids in tokens(texts, add_special_tokens=False)["input_ids"])
