"""The rewards are the grader's: one piece of code says what is right, in training and in evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from qrl import tasks

TIMEOUTS, ERRORS = "grader_timeout_rate", "grader_error_rate"  # shares of a step's completions, as TRL logs them


def functions(task: str, names: Sequence[str] = ("correct",)) -> list[Callable[..., list[float]]]:
    """TRL's reward functions of a task, which share one grading of each batch.

    Args:
        task: a task's name; the training rows carry the column `answer`.
        names: `correct` is 1.0 where the strict verdict is right, `format` 1.0 where there is an answer in the asked form,
            right or wrong; else 0.0.
    """
    graded: dict[tuple, list[tasks.Verdict]] = {}

    def verdicts(texts: tuple[str, ...], answers: tuple[str, ...]) -> list[tasks.Verdict]:
        if (texts, answers) not in graded:
            graded.clear()
            graded[texts, answers] = tasks.grade_many(task, texts, answers)
        return graded[texts, answers]

    def correct(
        completions: list, answer: list[str], log_metric: Callable[[str, float], None] | None = None, **_
    ) -> list[float]:
        found = verdicts(_texts(completions), tuple(answer))
        if log_metric is not None:
            for name, fault in ((TIMEOUTS, "timeout"), (ERRORS, "error")):
                log_metric(name, sum(verdict.fault == fault for verdict in found) / len(found))
        return [float(verdict.strict) for verdict in found]

    def format(completions: list, answer: list[str], **_) -> list[float]:  # TRL logs a reward under its function's name
        return [float(verdict.parsed is not None) for verdict in verdicts(_texts(completions), tuple(answer))]

    return [{"correct": correct, "format": format}[name] for name in names]


def _texts(completions: list) -> tuple[str, ...]:
    return tuple(message[0]["content"] if isinstance(message, list) else message for message in completions)
