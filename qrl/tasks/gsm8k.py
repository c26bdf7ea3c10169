"""GSM8K from the hub (Cobbe et al., arXiv 2110.14168): 7,473 training and 1,319 test questions; its form of a row."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qrl.errors import BadInput
from qrl.tasks import rows
from qrl.tasks.number import text
from qrl.tasks.numeric import gold_number
from qrl.tasks.question import Question

HUB = "openai/gsm8k"
CONFIG = "main"  # the other one, `socratic`, has solutions as questions and answers
CALCULATOR = re.compile(r"<<[^<>\n]*>>")  # GSM8K's calculator annotations, `<<48/2=24>>`, are not part of the prose


def of_hub(split: str, mirror: Path | None = None) -> Iterator[rows.Row]:
    """Return the rows of a split; the held-out split is the hub's `test`."""
    hub_split = "test" if split == "heldout" else "train"
    return rows.of_hub(HUB, CONFIG, hub_split, mirror)


def question(name: str, location: str, row: dict[str, Any]) -> Question:
    """Return the question of a row with the text `question` and an `answer`: a worked solution, or a number alone.

    A number alone, as a text or not, becomes the solution `#### number`: the grader's form, without any reasoning.

    Raises:
        BadInput: a field is missing, or the answer is neither; `location` names the row.
    """
    answer = row.get("answer")
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    question_text = _text(location, "question", row.get("question"))
    solution = CALCULATOR.sub("", _text(location, "answer", answer)).strip()
    number = gold_number(solution)
    is_worked = "####" in solution
    if number is None or ("\n" in solution and not is_worked):  # reasoning without its last line states no answer
        raise BadInput(
            f"{location}: the gold answer {solution[-40:]!r} cannot be read: 'answer' must be a number, or end in one "
            "line '#### number'."
        )
    if not is_worked:
        solution = f"#### {text(number)}"
    return Question(name, question_text.strip(), solution, text(number))


def _text(location: str, key: str, value: object) -> str:
    """Return a field's text; raise BadInput if it is missing, empty or something else."""
    if not isinstance(value, str) or not value.strip():
        raise BadInput(f"{location}: '{key}' is missing or not a text: each row needs 'question' and 'answer'.")
    return value
