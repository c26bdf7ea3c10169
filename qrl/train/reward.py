"""The reward is the grader: one piece of code says what is right, in training and in evaluation."""

from __future__ import annotations

from collections.abc import Callable

from qrl import tasks

TIMEOUTS, ERRORS = "grader_timeout_rate", "grader_error_rate"  # shares of a step's completions, as TRL logs them


def function(task: str) -> Callable[..., list[float]]:
    """TRL's reward function of a task: 1.0 where the strict verdict is right, else 0.0.

    Args:
        task: a task's name; the training rows carry the column `answer`.
    """

    def correct(completions: list, answer: list[str], log_metric: Callable[[str, float], None] | None = None, **_) -> list[float]:
        texts = [message[0]["content"] if isinstance(message, list) else message for message in completions]
        verdicts = tasks.grade_many(task, texts, answer)
        if log_metric is not None:
            for name, fault in ((TIMEOUTS, "timeout"), (ERRORS, "error")):
                log_metric(name, sum(verdict.fault == fault for verdict in verdicts) / len(verdicts))
        return [float(verdict.strict) for verdict in verdicts]

    return correct
