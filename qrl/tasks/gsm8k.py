"""GSM8K from the hub (Cobbe et al., arXiv 2110.14168): 7,473 training and 1,319 test questions; its form of a row."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qrl.errors import BadInput
from qrl.tasks import rows
from qrl.tasks.number import text
from qrl.tasks.numeric import strict
from qrl.tasks.question import Question

HUB = "openai/gsm8k"
CONFIG = "main"  # the other one, `socratic`, has solutions as questions and answers
CALCULATOR = re.compile(r"<<[^<>\n]*>>")  # GSM8K's calculator annotations, `<<48/2=24>>`, are not part of the prose


def of_hub(split: str, mirror: Path | None = None) -> Iterator[rows.Row]:
    """Return the rows of a split; the held-out split is the hub's `test`."""
    hub_split = "test" if split == "heldout" else "train"
    return rows.of_hub(HUB, CONFIG, hub_split, mirror)


def question(name: str, location: str, row: dict[str, Any]) -> Question:
    """Return the question of a row with GSM8K's texts `question` and `answer`.

    Raises:
        BadInput: a text is missing, or the answer has no line `#### number`; `location` names the row.
    """
    for key in ("question", "answer"):
        if not isinstance(row.get(key), str) or not row[key].strip():
            raise BadInput(f"{location}: '{key}' is missing or not a text: each row needs 'question' and 'answer'.")
    solution = CALCULATOR.sub("", row["answer"]).strip()
    answer = strict(solution)
    if answer is None:
        raise BadInput(f"{location}: the gold answer cannot be read: 'answer' must end in one line '#### number'.")
    return Question(name, row["question"].strip(), solution, text(answer))
