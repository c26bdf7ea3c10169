r"""MATH (Hendrycks et al., arXiv 2103.03874): 12,500 competition problems with worked solutions that end in \boxed{}.

The held-out split is MATH-500 (Lightman et al., arXiv 2305.20050). The training split from the hub is all of the 12,500
problems with a text that is not in MATH-500: the 12,000 that MATH-500's authors trained on, less any other problem with
the same text. A folder is read as it is.
"""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qrl.errors import BadInput
from qrl.tasks import gsm8k, rows
from qrl.tasks.math import latex, verdict
from qrl.tasks.question import Question

HELDOUT = "HuggingFaceH4/MATH-500"
WHOLE = "EleutherAI/hendrycks_math"
SUBJECTS = (
    "algebra", "counting_and_probability", "geometry", "intermediate_algebra",
    "number_theory", "prealgebra", "precalculus",
)  # fmt: skip
_LINE = re.compile(r"####[ \t]*([^\n]*?)[ \t]*\Z")  # the form of an answer in GSM8K's files
_LEVEL = re.compile(r"(?:Level\s*)?(\d+)")


def of_hub(split: str, mirror: Path | None = None) -> Iterator[rows.Row]:
    """Yield the rows of a split."""
    heldout = list(rows.of_hub(HELDOUT, None, "test", mirror))
    if split == "heldout":
        yield from heldout
        return
    texts = {_squeezed(row["problem"]) for _, row in heldout}
    for subject, part in itertools.product(SUBJECTS, ("train", "test")):
        for location, row in rows.of_hub(WHOLE, subject, part, mirror):
            if _squeezed(row["problem"]) not in texts:
                yield location, row


def question(name: str, location: str, row: dict[str, Any]) -> Question:
    """Return the question of a row with `problem` and `solution`, `answer` or both, or with `question` and `answer`.

    Raises:
        BadInput: a text is missing, or the answer is neither given nor boxed; `location` names the row.
    """
    problem = _text(row.get("problem")) or _text(row.get("question"))
    answer = _text(row.get("answer"))
    solution = _text(row.get("solution"))
    if problem is None:
        raise BadInput(f"{location}: 'problem' (or 'question') is missing or not a text: each row needs it.")
    if answer is None and solution is None:
        raise BadInput(f"{location}: 'solution' and 'answer' are missing or not texts: each row needs one of them.")
    worked = _boxed(solution or answer)
    is_boxed = bool(latex.boxes(worked))
    if not is_boxed and answer is None:
        raise BadInput(f"{location}: 'solution' has no boxed answer and there is no 'answer': add either.")

    # An answer of its own precedes the box of a worked solution; without a solution, the answer may be a worked one.
    stated = answer if solution and answer else worked
    try:
        gold = verdict.gold(stated)
    except BadInput as error:
        raise BadInput(f"{location}: {error}") from None
    if not is_boxed:
        box = f"\\boxed{{{gold}}}"
        worked = f"{worked}\n\n{box}" if solution else box

    # MATH writes `Level 5`, and `Level ?` for two of its problems; MATH-500 writes 5.
    level = _LEVEL.fullmatch(str(row.get("level")).strip())
    subject = _text(row.get("subject", row.get("type")))
    return Question(name, problem, worked, gold, subject, int(level[1]) if level else None)


def _boxed(text: str) -> str:
    r"""Return a worked solution without calculator annotations, its last line `#### x` written as \boxed{x}."""
    return _LINE.sub(lambda match: f"\\boxed{{{match[1]}}}", gsm8k.CALCULATOR.sub("", text).strip())


def _squeezed(problem: str) -> str:
    return re.sub(r"\s+", "", problem)


def _text(value: Any) -> str | None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        return None
    return value.strip() or None
