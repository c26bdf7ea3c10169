"""Grading many answers of the task `math` at once: most by their text, the rest in the pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from qrl.tasks.grade import Verdict
from qrl.tasks.math import pool, rule


def grade_many(
    completions: Sequence[str], answers: Sequence[str], progress: Callable[[int], object] = lambda n: None
) -> list[Verdict]:
    """A verdict each, in order; the same ones whatever the order and the company.

    Args:
        completions: N texts of a model.
        answers: N gold answers, or worked solutions that box them.
        progress: called with the number of verdicts reached since.

    Raises:
        BadInput: a gold answer is empty or too long.
        QrlError: no worker process starts.
    """
    asked = [rule.asked(*pair) for pair in zip(completions, answers, strict=True)]
    told = {each: rule.by_text(each) for each in dict.fromkeys(asked)}  # a group's completions often say the same
    hard = [each for each, verdict in told.items() if verdict is None]
    progress(len(asked) - len(hard))
    told |= zip(hard, pool.judge(hard, progress), strict=True) if hard else {}
    return [told[each] for each in asked]
