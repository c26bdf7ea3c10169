"""Questions from a folder: train.jsonl and test.jsonl, a JSON object a line, in GSM8K's fields or in those of the task's own."""

import json
import random
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from qrl.errors import BadInput
from qrl.tasks.grade import strict, text
from qrl.tasks.question import Question

FILES = {"train": "train.jsonl", "heldout": "test.jsonl"}
CALCULATOR = re.compile(r"<<[^<>\n]*>>")  # GSM8K's notes to a calculator, `<<48/2=24>>`, are not part of the prose


def load(
    task: str, folder: Path, split: str, n: int | None, seed: int, read: Callable[..., list[Question]] | None = None
) -> list[Question]:
    """A seeded subset of one file of the folder, or all of it.

    Args:
        task: the name that ids begin with.
        folder: holds train.jsonl (split train) and test.jsonl (split heldout).
        n: how many; None, or as many as there are, keeps the file's order.
        read: (task, split, rows) → questions; None reads GSM8K's fields with `questions`.

    Raises:
        BadInput: no such folder or file, a malformed row (named by its line), or fewer than n rows.
    """
    path = folder / FILES[split]
    if not folder.is_dir():
        raise BadInput(f"There is no data folder {folder}: expected a folder with {' and '.join(FILES.values())}.")
    if not path.is_file():
        raise BadInput(f"The data folder {folder} has no {path.name}, which the {split} split is read from: add it.")
    return subset((read or questions)(task, split, _rows(path)), n, seed, str(path))


def questions(task: str, split: str, rows: Iterable[tuple[str, Any]]) -> list[Question]:
    """Questions from (where, row) pairs; `where` names the row in a complaint.

    Raises:
        BadInput: a row that is no object with the texts `question` and `answer`, or an answer without `#### number`.
    """
    return [_question(f"{task}-{split}-{index}", where, row) for index, (where, row) in enumerate(rows)]


def subset(found: Sequence[Question], n: int | None, seed: int, source: str) -> list[Question]:
    """All of them in order, or n drawn without replacement; n is a wish, and a smaller set gives all that it has.

    Raises:
        BadInput: there are none.
    """
    if not found:
        raise BadInput(f"{source} holds no questions: expected at least one row.")
    if n is None or n >= len(found):
        return list(found)
    return random.Random(seed).sample(found, n)


def _rows(path: Path) -> Iterable[tuple[str, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
                if b"\\u" in line:
                    json.dumps(
                        row, ensure_ascii=False
                    ).encode()  # half a character, `\ud800` alone, is no text for a tokenizer
            except (ValueError, RecursionError):
                raise BadInput(
                    f"{where}: not a JSON object in UTF-8, which is what JSONL holds on every line."
                ) from None
            yield where, row


def _question(name: str, where: str, row: Any) -> Question:
    if not isinstance(row, dict):
        raise BadInput(f"{where}: a {type(row).__name__}, but an object with 'question' and 'answer' was expected.")
    for key in ("question", "answer"):
        if not isinstance(row.get(key), str) or not row[key].strip():
            raise BadInput(f"{where}: '{key}' is missing or not a text: each row needs 'question' and 'answer'.")
    solution = CALCULATOR.sub("", row["answer"]).strip()
    answer = strict(solution)
    if answer is None:
        raise BadInput(f"{where}: 'answer' does not end in one line '#### number', from which the gold answer is read.")
    return Question(name, row["question"].strip(), solution, text(answer))
