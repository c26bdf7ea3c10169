"""What is asked, and what counts as right.

A task is a source of questions with gold answers, graded by the same rules and asked through the same renderer (`prompt.py`)
in training, calibration and evaluation alike. Numbers after `####` are judged here and now (`grade.py`); the answers that
`math` boxes may need algebra, which runs in worker processes under limits (`math_pool.py`).
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from qrl.errors import BadInput
from qrl.tasks import arithmetic, deepmath, gsm8k, jsonl
from qrl.tasks import grade as grading
from qrl.tasks.grade import Verdict
from qrl.tasks.math import grade as math_grade
from qrl.tasks.math import loader
from qrl.tasks.question import Question

__all__ = ["TASKS", "Question", "Verdict", "grade", "grade_many", "load"]

TASKS = ("arithmetic", "gsm8k", "math", "deepmath")
BOXED = {"math": loader, "deepmath": deepmath}  # judged by what is in \boxed{}
Split = Literal["train", "heldout"]


def load(task: str, split: Split, n: int | None = None, seed: int = 0, data: str | None = None) -> list[Question]:
    """Questions of one split; the same arguments give the same questions on every machine.

    Args:
        task: one of `TASKS`.
        split: "train" or "heldout"; no question of a generated task is ever in both, whatever the seeds.
        n: how many, at most; None means all of them, for a task that has an end.
        seed: which questions are generated, or which n rows of a larger set are drawn.
        data: folder with train.jsonl and test.jsonl in GSM8K's format, or MATH's for `math`; None means generated, or the hub.

    Raises:
        BadInput: unknown task or split, n < 1, a missing or malformed file, no hub.
    """
    _check(task)
    if split not in ("train", "heldout"):
        raise BadInput(f"There is no split '{split}': expected train or heldout.")
    if n is not None and n < 1:
        raise BadInput(f"{n} questions were asked for, but at least 1 was expected: ask for a positive number.")
    if data is not None:
        return jsonl.load(task, Path(data), split, n, seed, BOXED[task].questions if task in BOXED else None)
    if task == "arithmetic":
        if n is None:
            raise BadInput("The arithmetic task is generated without end: say how many questions are wanted.")
        return arithmetic.load(split, n, seed)
    return BOXED.get(task, gsm8k).load(split, n, seed)


def grade(task: str, completion: str, answer: str) -> Verdict:
    """The verdict on one completion; many at once are faster through `grade_many`.

    Raises:
        BadInput: unknown task, or a gold answer that is none.
    """
    return grade_many(task, [completion], [answer])[0]


def grade_many(
    task: str, completions: Sequence[str], answers: Sequence[str], progress: Callable[[int], object] = lambda n: None
) -> list[Verdict]:
    """A verdict on each completion, in order; see `qrl.tasks.grade.grade` and `qrl.tasks.math.rule`.

    Args:
        task: one of `TASKS`.
        completions: N texts of a model.
        answers: N gold answers.
        progress: called with the number of verdicts reached since the last call.

    Returns:
        N verdicts; those that a grader could not reach carry their `fault`.

    Raises:
        BadInput: unknown task, or a gold answer that is none.
    """
    _check(task)
    if task in BOXED:
        return math_grade.grade_many(completions, answers, progress)
    verdicts = []
    for completion, answer in zip(completions, answers, strict=True):
        verdicts.append(grading.grade(completion, answer))
        progress(1)
    return verdicts


def _check(task: str) -> None:
    if task not in TASKS:
        raise BadInput(f"There is no task '{task}': expected one of {', '.join(TASKS)}.")
