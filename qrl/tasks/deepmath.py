r"""DeepMath-103K (He et al., arXiv 2504.11456): 103,022 hard problems with verifiable answers, for RL.

The hub has one split. A hash of each problem's text puts about one in a hundred into the held-out split: the same ones
on every machine, and no text is in both splits. Columns: `question`, `final_answer`, `difficulty`, `topic`, and three
solutions by R1 of thousands of tokens. The solutions are not used: they are another model's reasoning, and too long for
calibration. A folder may have the same columns, or MATH's.
"""

import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qrl.errors import BadInput
from qrl.tasks import rows
from qrl.tasks.math import dataset
from qrl.tasks.question import Question, normalized_text

HUB = "zwhe99/DeepMath-103K"
HELDOUT_SHARE = 100  # one text in so many is held out


def of_hub(split: str, mirror: Path | None = None) -> Iterator[rows.Row]:
    """Yield the rows of a split, except those that the grader cannot read; warn about them at the end."""
    total = 0
    unreadable = 0
    for location, row in rows.of_hub(HUB, None, "train", mirror):
        if split_of(str(row.get("question"))) != split:
            continue
        total += 1
        try:
            question("", location, row)
            yield location, row
        except BadInput:
            unreadable += 1
    if unreadable:
        left_out = f"{unreadable} of {total} rows of {HUB} ({split}) were left out"
        warnings.warn(f"{left_out}: the grader cannot read their answers.", stacklevel=2)


def question(name: str, location: str, row: dict[str, Any]) -> Question:
    """Return the question of a row with `question` and `final_answer`, or in MATH's columns, as `dataset.question`."""
    if "final_answer" not in row:
        return dataset.question(name, location, row)
    topic = row.get("topic")
    if isinstance(topic, str) and "->" in topic:  # `Mathematics -> Algebra -> …`
        topic = topic.split("->")[1].strip()
    difficulty = row.get("difficulty")
    is_known = isinstance(difficulty, int | float) and difficulty > 0
    math_row = {
        "problem": row.get("question"),
        "answer": row["final_answer"],
        "subject": topic,
        "level": int(difficulty) if is_known else None,
    }
    return dataset.question(name, location, math_row)


def split_of(question: str) -> str:
    """Return the split that a problem's text belongs to, by its hash; white space and case do not count."""
    return "heldout" if zlib.crc32(normalized_text(question).encode()) % HELDOUT_SHARE == 0 else "train"
