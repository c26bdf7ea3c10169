"""What is asked, and what counts as right.

A task is a source of questions with gold answers; every task here is graded by the same rules (`grade.py`) and asked
through the same renderer (`prompt.py`), in training, calibration and evaluation alike.
"""

from pathlib import Path
from typing import Literal

from qrl.errors import BadInput
from qrl.tasks import arithmetic, gsm8k, jsonl
from qrl.tasks import grade as grading
from qrl.tasks.grade import Verdict
from qrl.tasks.question import Question

__all__ = ["TASKS", "Question", "Verdict", "grade", "load"]

TASKS = ("arithmetic", "gsm8k")
Split = Literal["train", "heldout"]


def load(task: str, split: Split, n: int | None = None, seed: int = 0, data: str | None = None) -> list[Question]:
    """Questions of one split; the same arguments give the same questions on every machine.

    Args:
        task: one of `TASKS`.
        split: "train" or "heldout"; no question of a generated task is ever in both, whatever the seeds.
        n: how many, at most; None means all of them, for a task that has an end.
        seed: which questions are generated, or which n rows of a larger set are drawn.
        data: folder with train.jsonl and test.jsonl in GSM8K's format; None means generated, or the hub.

    Raises:
        BadInput: unknown task or split, n < 1, a missing or malformed file, no hub.
    """
    if task not in TASKS:
        raise BadInput(f"There is no task '{task}': expected one of {', '.join(TASKS)}.")
    if split not in ("train", "heldout"):
        raise BadInput(f"There is no split '{split}': expected train or heldout.")
    if n is not None and n < 1:
        raise BadInput(f"{n} questions were asked for, but at least 1 was expected: ask for a positive number.")
    if data is not None:
        return jsonl.load(task, Path(data), split, n, seed)
    if task == "arithmetic":
        if n is None:
            raise BadInput("The arithmetic task is generated without end: say how many questions are wanted.")
        return arithmetic.load(split, n, seed)
    return gsm8k.load(split, n, seed)


def grade(task: str, completion: str, answer: str) -> Verdict:
    """The verdict on one completion; see `qrl.tasks.grade.grade`.

    Raises:
        BadInput: unknown task, or a gold answer that is no number.
    """
    if task not in TASKS:
        raise BadInput(f"There is no task '{task}': expected one of {', '.join(TASKS)}.")
    return grading.grade(completion, answer)
