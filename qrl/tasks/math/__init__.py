"""The grader of answers in `\\boxed{}`, and the MATH data set (`dataset.py`).

Most answers are graded by comparing texts (`latex.py`), the rest by algebra in worker processes (`pool.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from qrl.tasks.math import pool, verdict
from qrl.tasks.question import Verdict

__all__ = ["grade_many"]


def grade_many(
    completions: Sequence[str], answers: Sequence[str], progress: Callable[[int], object] = lambda n: None
) -> list[Verdict]:
    """Return a verdict on each completion; it depends neither on their order nor on the other completions.

    Raises:
        BadInput: a gold answer is empty or too long.
        QrlError: the worker processes do not start.
    """
    claims = [verdict.claim(*pair) for pair in zip(completions, answers, strict=True)]
    verdicts = {claim: verdict.by_text(claim) for claim in dict.fromkeys(claims)}  # completions often repeat a claim
    hard = [claim for claim, by_text in verdicts.items() if by_text is None]
    progress(len(claims) - len(hard))
    if hard:
        verdicts |= zip(hard, pool.grade(hard, progress), strict=True)
    return [verdicts[claim] for claim in claims]
