r"""MATH (Hendrycks et al., arXiv 2103.03874): 12,500 competition problems with worked solutions that end in \boxed{}.

Held out are the 500 of MATH-500 (Lightman et al., arXiv 2305.20050). Training questions from the hub are all others of the
12,500, told apart by their text: the 12,000 that MATH-500's authors trained on, where no other problem has the same text.
A folder is read as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from qrl.errors import BadInput
from qrl.tasks import jsonl
from qrl.tasks.math import rule
from qrl.tasks.math import text as math_text
from qrl.tasks.question import Question

HELDOUT = "HuggingFaceH4/MATH-500"
WHOLE = "EleutherAI/hendrycks_math"
SUBJECTS = (
    "algebra", "counting_and_probability", "geometry", "intermediate_algebra",
    "number_theory", "prealgebra", "precalculus",
)  # fmt: skip
_LINE = re.compile(r"####[ \t]*([^\n]*?)[ \t]*\Z")  # how GSM8K's files give an answer
_LEVEL = re.compile(r"(?:Level\s*)?(\d+)")


def load(split: str, n: int | None, seed: int) -> list[Question]:
    """A seeded subset of a split from the hub, or all of it.

    Raises:
        BadInput: the hub cannot be reached.
    """
    heldout = list(hub(HELDOUT, None, "test"))
    rows = heldout
    if split == "train":
        seen = {_squeezed(row["problem"]) for _, row in heldout}
        whole = (pair for subject in SUBJECTS for part in ("train", "test") for pair in hub(WHOLE, subject, part))
        rows = [(where, row) for where, row in whole if _squeezed(row["problem"]) not in seen]
    return jsonl.subset(questions("math", split, rows), n, seed, HELDOUT if split == "heldout" else WHOLE)


def questions(task: str, split: str, rows: Iterable[tuple[str, Any]]) -> list[Question]:
    r"""Questions from (where, row) pairs: `problem` and `solution`, with `answer` or not, or `question` and `answer`.

    Raises:
        BadInput: a row without these texts, or one whose answer is neither given nor boxed; `where` names it.
    """
    return [_question(f"{task}-{split}-{index}", where, row) for index, (where, row) in enumerate(rows)]


def _question(name: str, where: str, row: Any) -> Question:
    if not isinstance(row, dict):
        raise BadInput(f"{where}: a {type(row).__name__}, but an object with 'problem' and 'solution' was expected.")
    problem = _text(row.get("problem")) or _text(row.get("question"))
    answer, solution = _text(row.get("answer")), _text(row.get("solution"))
    if problem is None:
        raise BadInput(f"{where}: 'problem' (or 'question') is missing or not a text: each row needs what is asked.")
    if answer is None and solution is None:
        raise BadInput(
            f"{where}: neither 'solution' nor 'answer' is a text: each row needs one from which the gold answer is read."
        )
    worked = _boxed(solution or answer)
    boxed = math_text.boxes(worked)
    if not boxed and answer is None:
        raise BadInput(f"{where}: 'solution' boxes no answer and there is no 'answer': add either.")
    try:
        right = rule.gold(answer if solution and answer else worked)
    except BadInput as error:
        raise BadInput(f"{where}: {error}") from None
    if not boxed:
        worked = f"{worked}\n\n\\boxed{{{right}}}" if solution else f"\\boxed{{{right}}}"
    return Question(name, problem, worked, right, _text(row.get("subject", row.get("type"))), _level(row.get("level")))


def _boxed(text: str) -> str:
    r"""A worked solution in the asked form: GSM8K's last line `#### x` becomes \boxed{x}, its calculator's notes go."""
    return _LINE.sub(lambda match: f"\\boxed{{{match[1]}}}", jsonl.CALCULATOR.sub("", text).strip())


def hub(name: str, config: str | None, split: str) -> Iterable[tuple[str, dict]]:
    """(where, row) pairs of a data set on the hub.

    Raises:
        BadInput: it cannot be reached.
    """
    import datasets

    try:
        table = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # a dozen kinds, by network, proxy and cache: the way out is the same for all
        raise BadInput(
            f"{name} could not be loaded from the hub ({type(error).__name__}): "
            "connect to it, or name a folder with train.jsonl and test.jsonl as data."
        ) from error
    return ((f"{name} {config or ''} {split}, row {index}", row) for index, row in enumerate(table))


def _squeezed(problem: str) -> str:
    return re.sub(r"\s+", "", problem)


def _text(value: Any) -> str | None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    return value.strip() if isinstance(value, str) and value.strip() else None


def _level(value: Any) -> int | None:
    """MATH says `Level 5`, or `Level ?` of two of its problems; MATH-500 says 5."""
    found = _LEVEL.fullmatch(str(value).strip())
    return int(found[1]) if found else None
