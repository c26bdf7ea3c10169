"""Tasks: questions with gold answers, and the graders of completions.

Training, calibration and evaluation render every question with `prompt.py` and grade every completion by the same
rules. Numbers after `####` are graded in this process (`numeric.py`). Answers in `\\boxed{}` may need algebra, which
runs in worker processes with limits (`math/pool.py`).
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from qrl.errors import BadInput
from qrl.tasks import arithmetic, deepmath, gsm8k, numeric, reached, rows
from qrl.tasks.math import dataset, pool
from qrl.tasks.question import Question, Verdict

__all__ = ["TASKS", "Question", "Split", "Verdict", "grade", "grade_many", "load", "stated_before"]

TASKS = ("arithmetic", "gsm8k", "math", "deepmath")
BOXED = {"math": dataset, "deepmath": deepmath}  # graded by the content of \boxed{}
Split = Literal["train", "heldout"]


def load(task: str, split: Split, n: int | None = None, seed: int = 0, data: str | None = None) -> list[Question]:
    """Return the questions of a split; the same arguments give the same questions on every machine.

    Args:
        task: one of `TASKS`.
        split: "train" or "heldout"; a question of a generated task is never in both, whatever the seeds.
        n: maximum number of questions; None means all of them, for a task with a finite data set.
        seed: which questions are generated, or which n rows of a larger set are drawn.
        data: folder with train.jsonl and test.jsonl in GSM8K's format, or in MATH's for `math`; None generates the
            questions or downloads them from the hub.

    Raises:
        BadInput: the task or split is unknown, n < 1, a file is missing or malformed, or the hub cannot be reached.
    """
    _check(task)
    if split not in ("train", "heldout"):
        raise BadInput(f"There is no split '{split}': expected train or heldout.")
    if n is not None and n < 1:
        raise BadInput(f"{n} questions were requested, but at least 1 was expected: give a positive number.")
    reader = BOXED.get(task, gsm8k)
    if data is not None:
        found, source = rows.of_folder(Path(data), split), str(Path(data) / rows.FILES[split])
    elif task == "arithmetic":
        if n is None:
            raise BadInput("The arithmetic task is generated without end: give the number of questions.")
        return arithmetic.load(split, n, seed)
    else:
        found, source = reader.of_hub(split), f"The hub's data set of {task}"
    return rows.questions(f"{task}-{split}", found, reader.question, n, seed, source)


def grade(task: str, completion: str, answer: str) -> Verdict:
    """Return the verdict on one completion, as `grade_many` does for many, which is faster."""
    return grade_many(task, [completion], [answer])[0]


def grade_many(
    task: str, completions: Sequence[str], answers: Sequence[str], progress: Callable[[int], object] = lambda n: None
) -> list[Verdict]:
    """Return a verdict on each completion, in order; see `numeric.py` and `math/verdict.py` for the rules.

    Args:
        task: one of `TASKS`.
        completions: N texts of a model.
        answers: N gold answers.
        progress: called with the number of verdicts since the last call.

    Returns:
        N verdicts; where a grader failed, the verdict carries the `fault`.

    Raises:
        BadInput: the task is unknown, or a gold answer cannot be read.
    """
    _check(task)
    if task in BOXED:
        return pool.grade_many(completions, answers, progress)
    verdicts = []
    for completion, answer in zip(completions, answers, strict=True):
        verdicts.append(numeric.grade(completion, answer))
        progress(1)
    return verdicts


def stated_before(task: str, completion: str, question: Question) -> bool | None:
    """Return whether a wrong or missing answer had stated the right value before; see `reached.py` for the rules.

    None for a task whose answers are neither numbers nor boxed.
    """
    if task not in TASKS:
        return None
    rule = reached.in_latex if task in BOXED else reached.numerically
    return rule(completion, question.answer, question.question)


def _check(task: str) -> None:
    if task not in TASKS:
        raise BadInput(f"There is no task '{task}': expected one of {', '.join(TASKS)}.")
