"""Grading a file of somebody else's completions."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from qrl import tasks
from qrl.errors import BadInput


def grade(task: str, file: str | Path, out: str | Path) -> str:
    """Writes the rows of a JSONL file with `parsed`, `strict` and `flexible` added; the file appears whole.

    Args:
        task: whose grader.
        file: a JSON object a line, with `completion` and `answer`.
        out: the file to write.

    Returns:
        A line that says how many were right.

    Raises:
        BadInput: unknown task, no such file, or a line that is no object with both texts; the line is named.
    """
    rows = [_row(where, line) for where, line in _lines(Path(file))]
    if not rows:
        raise BadInput(f"{file} holds no rows: expected a JSON object a line, with 'completion' and 'answer'.")
    target = Path(out)
    if target.is_dir() or not target.parent.is_dir():  # told before minutes of grading
        raise BadInput(
            f"{out} cannot be written ({'it is a folder' if target.is_dir() else 'there is no such folder'}): give the path of a file, in a folder that exists."
        )
    graded = _graded(task, rows)
    partial = target.with_name(target.name + ".partial")
    try:
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in graded)
        partial.write_text(
            text, encoding="utf-8", errors="backslashreplace"
        )  # a lone surrogate stays JSON's own escape of it
        os.replace(partial, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)  # of a full disk
        raise BadInput(
            f"{out} cannot be written ({error.strerror}): give a path in a folder that exists, on a disk with room."
        ) from None
    n = len(graded)
    rates = {key: sum(row[key] for row in graded) / n for key in ("strict", "flexible")}
    parsed = sum(row["parsed"] is not None for row in graded) / n
    faults = sum("fault" in row for row in graded)
    failed = f", {faults} of them unreached within the grader's limits" if faults else ""
    return f"n = {n}{failed}: strict {rates['strict']:.4f}, flexible {rates['flexible']:.4f}, parsed {parsed:.4f}; rows in {out}"


def _lines(file: Path):
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise BadInput(f"{file} cannot be read ({error.strerror}): give a JSONL file of completions.") from None
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"{file}, line {number}", line


def _row(where: str, line: str) -> tuple[str, dict]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # the latter for brackets nested by the thousand
        raise BadInput(f"{where} is not JSON: expected an object with 'completion' and 'answer'.") from None
    if not (isinstance(row, dict) and isinstance(row.get("completion"), str) and "answer" in row):
        raise BadInput(f"{where} lacks 'completion' or 'answer': expected an object with both.")
    answer = row["answer"]
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise BadInput(f"{where}: 'answer' is {json.dumps(answer)[:40]}, but must be a text or a number.")
    return where, row


def _graded(task: str, rows: list[tuple[str, dict]]) -> list[dict]:
    from tqdm import tqdm

    completions, answers = [row["completion"] for _, row in rows], [str(row["answer"]) for _, row in rows]
    try:
        with tqdm(total=len(rows), desc="grade", unit="row", leave=False, delay=2) as bar:
            verdicts = tasks.grade_many(task, completions, answers, bar.update)
    except BadInput as error:
        _blame(task, rows)
        raise error
    return [
        row
        | {"parsed": each.parsed, "strict": each.strict, "flexible": each.flexible}
        | ({"fault": each.fault} if each.fault else {})
        for (_, row), each in zip(rows, verdicts, strict=True)
    ]


def _blame(task: str, rows: list[tuple[str, dict]]) -> None:
    """Names the first line whose gold answer is refused; an empty completion is graded at once."""
    for where, row in rows:
        try:
            tasks.grade(task, "", str(row["answer"]))
        except BadInput as error:
            raise BadInput(f"{where}: {error}") from None
