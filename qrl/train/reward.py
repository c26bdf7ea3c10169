"""Rewards by the grader that also evaluates: training and evaluation agree on what is right."""

from collections.abc import Callable, Sequence

from qrl import tasks

TIMEOUTS, ERRORS = "grader_timeout_rate", "grader_error_rate"  # shares of a step's completions, as TRL logs them


def functions(task: str, names: Sequence[str] = ("correct",)) -> list[Callable[..., list[float]]]:
    """Return TRL's reward functions of a task, which grade each batch once between them.

    Args:
        task: a task's name; the training rows carry the column `answer`.
        names: `correct` is 1.0 where the strict verdict is right, `format` 1.0 where the answer has the required form,
            right or wrong; else 0.0.
    """
    graded: dict[tuple, list[tasks.Verdict]] = {}

    def verdicts(completions: list, answers: list[str]) -> list[tasks.Verdict]:
        texts = tuple(item[0]["content"] if isinstance(item, list) else item for item in completions)
        key = (texts, tuple(answers))
        if key not in graded:
            graded.clear()
            graded[key] = tasks.grade_many(task, *key)
        return graded[key]

    def correct(completions: list, answer: list[str], log_metric: Callable | None = None, **_) -> list[float]:
        batch = verdicts(completions, answer)
        if log_metric is not None:
            for name, fault in ((TIMEOUTS, "timeout"), (ERRORS, "error")):
                log_metric(name, sum(verdict.fault == fault for verdict in batch) / len(batch))
        return [float(verdict.strict) for verdict in batch]

    def format(completions: list, answer: list[str], **_) -> list[float]:  # TRL logs a reward under its function's name
        return [float(verdict.parsed is not None) for verdict in verdicts(completions, answer)]

    return [{"correct": correct, "format": format}[name] for name in names]
