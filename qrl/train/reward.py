"""The reward is the grader: one piece of code says what is right, in training and in evaluation."""

from __future__ import annotations

from collections.abc import Callable

from qrl import tasks


def function(task: str) -> Callable[..., list[float]]:
    """TRL's reward function of a task: 1.0 where the strict verdict is right, else 0.0.

    Args:
        task: a task's name; the training rows carry the column `answer`.
    """

    def correct(completions: list, answer: list[str], **_) -> list[float]:
        texts = [message[0]["content"] if isinstance(message, list) else message for message in completions]
        return [float(tasks.grade(task, text, gold).strict) for text, gold in zip(texts, answer, strict=True)]

    return correct
