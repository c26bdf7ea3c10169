"""Grading a file of the user's own completions."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from qrl import tasks
from qrl.errors import BadInput
from qrl.workspace import written_whole


def grade(task: str, file: str | Path, out: str | Path) -> str:
    """Write the rows of a JSONL file with `parsed`, `strict` and `flexible` added; the file appears whole.

    Args:
        task: the task with the grader to use.
        file: a JSON object a line, with `completion` and `answer`.

    Returns:
        A line with n and the rates of right answers.

    Raises:
        BadInput: the task is unknown, a file cannot be read or written, or a line is not an object with both fields;
            the line is named.
    """
    rows = list(_rows(Path(file)))
    if not rows:
        raise BadInput(f"{file} has no rows: expected a JSON object a line, with 'completion' and 'answer'.")
    target = Path(out)
    if target.is_dir() or not target.parent.is_dir():  # checked before minutes of grading
        why = "it is a folder" if target.is_dir() else "there is no such folder"
        raise BadInput(f"{out} cannot be written ({why}): give the path of a file, in a folder that exists.")
    graded = _graded(task, rows)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in graded)
    try:
        with written_whole(target) as partial:  # a lone surrogate is written as JSON's own escape, `\ud800`
            partial.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        where = "a path in a folder that exists, on a disk with space"
        raise BadInput(f"{out} cannot be written ({error.strerror}): give {where}.") from None
    n = len(graded)
    strict, flexible = (sum(row[key] for row in graded) / n for key in ("strict", "flexible"))
    parsed = sum(row["parsed"] is not None for row in graded) / n
    faults = sum("fault" in row for row in graded)
    failed = f", {faults} of them not graded within the grader's limits" if faults else ""
    return f"n = {n}{failed}: strict {strict:.4f}, flexible {flexible:.4f}, parsed {parsed:.4f}; rows in {out}"


def _rows(file: Path) -> Iterator[tuple[str, dict]]:
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise BadInput(f"{file} cannot be read ({error.strerror}): give a JSONL file of completions.") from None
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{file}, line {number}"
            yield where, _row(where, line)


def _row(where: str, line: str) -> dict:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # the latter for brackets nested by the thousand
        raise BadInput(f"{where} is not JSON: expected an object with 'completion' and 'answer'.") from None
    if not (isinstance(row, dict) and isinstance(row.get("completion"), str) and "answer" in row):
        raise BadInput(f"{where} lacks 'completion' or 'answer': expected an object with both.")
    answer = row["answer"]
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise BadInput(f"{where}: 'answer' is {json.dumps(answer)[:40]}, but must be a text or a number.")
    return row


def _graded(task: str, rows: list[tuple[str, dict]]) -> list[dict]:
    from tqdm import tqdm

    completions, answers = [row["completion"] for _, row in rows], [str(row["answer"]) for _, row in rows]
    try:
        with tqdm(total=len(rows), desc="grade", unit="row", leave=False, delay=2) as bar:
            verdicts = tasks.grade_many(task, completions, answers, bar.update)
    except BadInput as error:
        for (where, _), answer in zip(rows, answers, strict=True):  # name the first line with an unreadable answer
            try:
                tasks.grade(task, "", answer)  # an empty completion is graded at once
            except BadInput as unreadable:
                raise BadInput(f"{where}: {unreadable}") from None
        raise error  # no single row is to blame
    found = [asdict(verdict).items() for verdict in verdicts]
    return [row | {k: v for k, v in fields if k != "fault" or v} for (_, row), fields in zip(rows, found, strict=True)]
