"""Questions from a folder with train.jsonl and test.jsonl: a JSON object a line, in GSM8K's or the task's fields."""

import json
import random
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from qrl.errors import BadInput
from qrl.tasks.number import text
from qrl.tasks.numeric import strict
from qrl.tasks.question import Question

FILES = {"train": "train.jsonl", "heldout": "test.jsonl"}
CALCULATOR = re.compile(r"<<[^<>\n]*>>")  # GSM8K's calculator annotations, `<<48/2=24>>`, are not part of the prose
ReadRow = Callable[[str, str, dict[str, Any]], Question]  # (id, where, row) → question


def question(name: str, where: str, row: dict[str, Any]) -> Question:
    """Return the question of a row with GSM8K's texts `question` and `answer`.

    Raises:
        BadInput: a text is missing, or the answer has no line `#### number`; `where` names the row.
    """
    for key in ("question", "answer"):
        if not isinstance(row.get(key), str) or not row[key].strip():
            raise BadInput(f"{where}: '{key}' is missing or not a text: each row needs 'question' and 'answer'.")
    solution = CALCULATOR.sub("", row["answer"]).strip()
    answer = strict(solution)
    if answer is None:
        raise BadInput(f"{where}: the gold answer cannot be read: 'answer' must end in one line '#### number'.")
    return Question(name, row["question"].strip(), solution, text(answer))


def load(task: str, folder: Path, split: str, n: int | None, seed: int, read_row: ReadRow = question) -> list[Question]:
    """Return all questions in one file of the folder, or a seeded subset.

    Args:
        task: the prefix of the questions' ids.
        folder: has train.jsonl (split train) and test.jsonl (split heldout).
        n: maximum number; None, or at least as many as there are, keeps the file's order.
        read_row: reads the task's own fields.

    Raises:
        BadInput: the folder or file is missing, a row is malformed (its line is named), or the file has no rows.
    """
    path = folder / FILES[split]
    if not folder.is_dir():
        raise BadInput(f"There is no data folder {folder}: expected a folder with {' and '.join(FILES.values())}.")
    if not path.is_file():
        raise BadInput(f"The data folder {folder} has no {path.name}, which has the {split} split: add it.")
    return subset(questions(task, split, _rows(path), read_row), n, seed, str(path))


def questions(task: str, split: str, rows: Iterable[tuple[str, dict]], read_row: ReadRow = question) -> list[Question]:
    """Return questions from (where, row) pairs, with ids that count them."""
    return [read_row(f"{task}-{split}-{index}", where, row) for index, (where, row) in enumerate(rows)]


def subset(questions: Sequence[Question], n: int | None, seed: int, source: str) -> list[Question]:
    """Return all questions in order, or n drawn without replacement; raise BadInput if there are none."""
    if not questions:
        raise BadInput(f"{source} has no questions: expected at least one row.")
    if n is None or n >= len(questions):
        return list(questions)
    return random.Random(seed).sample(questions, n)


def _rows(path: Path) -> Iterable[tuple[str, dict]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
                if b"\\u" in line:  # a lone surrogate, `\ud800`, is not a text that a tokenizer can read
                    json.dumps(row, ensure_ascii=False).encode()
            except (ValueError, RecursionError):
                raise BadInput(f"{where} is not valid: expected a JSON object in UTF-8 on every line.") from None
            if not isinstance(row, dict):
                raise BadInput(f"{where} is a {type(row).__name__}: expected a JSON object on every line.")
            yield where, row
