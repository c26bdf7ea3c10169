r"""DeepMath-103K (He et al., arXiv 2504.11456): 103,022 hard problems with answers that can be checked, for RL.

The hub has one split. Held out is about one problem in a hundred, decided by a hash of its own text: the same on every machine, and
no text is in both splits. Columns: `question`, `final_answer`, `difficulty`, `topic`, and three solutions by R1 of thousands of
tokens, which are not used: another model's thoughts, and too long for calibration. A folder holds the same columns, or MATH's.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

from qrl.errors import BadInput
from qrl.tasks import jsonl
from qrl.tasks.math import loader
from qrl.tasks.question import Question

HUB = "zwhe99/DeepMath-103K"
HELDOUT_SHARE = 100  # one text in so many is held out


def load(split: str, n: int | None, seed: int) -> list[Question]:
    """A seeded subset of a split from the hub, or all of it; rows whose answer the grader cannot read are left out, with a warning.

    Raises:
        BadInput: the hub cannot be reached.
    """
    found, unread = [], 0
    for where, row in loader.hub(HUB, None, "train"):
        if split_of(str(row.get("question"))) != split:
            continue
        try:
            found += questions("deepmath", split, [(where, row)])
        except BadInput:
            unread += 1
    if unread:
        warnings.warn(
            f"{unread} of {unread + len(found)} rows of {HUB} ({split}) have no answer that the grader reads: left out.",
            stacklevel=2,
        )
    named = [
        Question(f"deepmath-{split}-{i}", q.question, q.solution, q.answer, q.subject, q.level)
        for i, q in enumerate(found)
    ]
    return jsonl.subset(named, n, seed, HUB)


def questions(task: str, split: str, rows: Iterable[tuple[str, Any]]) -> list[Question]:
    """Questions from (where, row) pairs with `question` and `final_answer`, or in MATH's columns.

    Raises:
        BadInput: a row without them, or with an answer that the grader cannot read; `where` names it.
    """
    return loader.questions(task, split, _in_maths_columns(rows))


def split_of(question: str) -> str:
    """The split that a problem's text belongs to, by its hash; white space and case do not count."""
    bare = "".join(question.casefold().split())
    return "heldout" if zlib.crc32(bare.encode()) % HELDOUT_SHARE == 0 else "train"


def _in_maths_columns(rows: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    for where, row in rows:
        if not (isinstance(row, dict) and "final_answer" in row):
            yield where, row
            continue
        topic, difficulty = row.get("topic"), row.get("difficulty")
        yield (
            where,
            {
                "problem": row.get("question"),
                "answer": row["final_answer"],
                "subject": topic.split("->")[1].strip() if isinstance(topic, str) and "->" in topic else topic,
                "level": int(difficulty) if isinstance(difficulty, int | float) and difficulty > 0 else None,
            },
        )
