"""Grading the user's own completions: a file's, or a frame's."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qrl import names, process, stats, tasks
from qrl.errors import BadInput, QrlError
from qrl.files import tables
from qrl.stats.text import table
from qrl.workspace import written_whole

if TYPE_CHECKING:
    import pandas as pd

CELL = ("variant", "scheme")
_PRECISIONS = ("bf16", "bfloat16", "fp32", "float32", "float16", "half")  # what others call full precision


@dataclass(frozen=True)
class Graded:
    """Completions with a verdict each.

    Attributes:
        task: the task with the grader that was used.
        rows: the rows that were given, each with `parsed`, `strict`, `flexible` and `correct` (0/1: `strict`), and with
            `fault` and `fault_cause` if the grader failed.
    """

    task: str
    rows: tuple[dict[str, Any], ...] = field(repr=False)

    @property
    def frame(self) -> pd.DataFrame:
        """The rows as a table, which `compare` reads if it has `variant`, `scheme` and `question`."""
        import pandas as pd

        return pd.DataFrame(self.rows)

    def __str__(self) -> str:
        """Return a table with the rates of each cell, or of all rows if they name no cells, as Markdown."""
        cells: dict[str, list[dict[str, Any]]] = {}
        for row in self.rows:
            name = names.cell_name(row["variant"], row["scheme"]) if row.keys() >= set(CELL) else "all"
            cells.setdefault(name, []).append(row)
        body = []
        for name, rows in cells.items():
            verdicts = [[row["strict"] for row in rows], [row["flexible"] for row in rows]]
            shares = [sum(right) for right in (*verdicts, [row["parsed"] is not None for row in rows])]
            body.append((name, str(len(rows)), *(_rate(right, len(rows)) for right in shares)))
        return "\n".join(table(("cell", "n", "strict", "flexible", "parsed"), body))

    _repr_markdown_ = __str__


def grade(
    data: pd.DataFrame | str | Path,
    task: str,
    *,
    columns: Mapping[str, str] | None = None,
    max_grader_fault_rate: float | None = None,
) -> Graded:
    """Return a verdict on each completion.

    Args:
        data: rows with `completion` and `answer`: a frame, a file, or files per cell (`VARIANT:SCHEME=FILE,…`).
        task: the task with the grader to use, or a task file.
        columns: our name of a column → its name in the data, such as {"completion": "output"}.
        max_grader_fault_rate: largest share of completions on which the grader may fail; None: as for `evaluate`.

    Raises:
        BadInput: the task is unknown, the data cannot be read, or a row lacks a field; the row is named.
        QrlError: the grader failed on more completions than that; one of them and what it raised are named.
    """
    most = _most_faults(max_grader_fault_rate)
    graded = _graded_rows(data, task, columns)
    if failed := _too_many_faults(graded, most):
        raise QrlError(failed)
    return graded


def _graded_rows(data: pd.DataFrame | str | Path, task: str, columns: Mapping[str, str] | None) -> Graded:
    tasks.check(task)
    rows = tables.records(data, columns)
    for where, row in rows:
        _check(where, row)
    return Graded(task, tuple(_graded(task, rows)))


def _most_faults(given: float | None) -> float:
    """Return the largest share of faults: the one that is given, or the default of `evaluate`."""
    from qrl.recipe import Evaluate

    if given is None:
        return Evaluate().max_grader_fault_rate
    if not 0 <= given <= 1:
        raise BadInput(f"max_grader_fault_rate is {given!r}, but must be a share from 0 to 1, such as 0.01.")
    return given


def _too_many_faults(graded: Graded, most: float) -> str:
    """Return a sentence if the grader failed on too many completions, with its most frequent cause; else nothing."""
    n = len(graded.rows)
    faults = [row for row in graded.rows if "fault" in row]
    if len(faults) <= most * n:
        return ""
    causes = Counter(row.get("fault_cause") or row["fault"] for row in faults)
    cause, count = causes.most_common(1)[0]
    others = f", {len(causes) - 1} other cause(s)" if len(causes) > 1 else ""
    return (
        f"The grader of {graded.task} failed on {len(faults)} of {n} completions ({count} times: {cause}{others}), "
        f"but at most {most:.3g} of them may fail, since each counts as wrong: correct the grader, or allow more by "
        "max_grader_fault_rate."
    )


def grade_file(
    task: str,
    source: str | Path,
    out: str | Path,
    columns: Mapping[str, str] | None = None,
    max_grader_fault_rate: float | None = None,
) -> str:
    """Write a file's rows with their verdicts as JSONL, whole or not at all; return a summary.

    Args:
        task, source, columns, max_grader_fault_rate: as for `grade`.
        out: the file to write.

    Returns:
        A line with n and the rates of right answers, a table if the rows name cells, and the next command.

    Raises:
        BadInput: as `grade`, or `out` cannot be written.
        QrlError: as `grade`, after the rows were written.
    """
    most = _most_faults(max_grader_fault_rate)
    target = Path(out)
    if target.is_dir() or not target.parent.is_dir():  # checked before minutes of grading
        why = "it is a folder" if target.is_dir() else "there is no such folder"
        raise BadInput(f"{out} cannot be written ({why}): give the path of a file, in a folder that exists.")
    graded = _graded_rows(source, task, columns)
    text = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in graded.rows)
    try:
        with written_whole(target) as partial:  # a lone surrogate is written as JSON's own escape, `\ud800`
            partial.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        where = "a path in a folder that exists, on a disk with space"
        raise BadInput(f"{out} cannot be written ({error.strerror}): give {where}.") from None
    if too_many := _too_many_faults(graded, most):
        raise QrlError(f"{too_many} The rows in {out} say which, in `fault` and `fault_cause`.")
    n = len(graded.rows)
    strict, flexible = (sum(row[key] for row in graded.rows) / n for key in ("strict", "flexible"))
    parsed = sum(row["parsed"] is not None for row in graded.rows) / n
    faults = sum("fault" in row for row in graded.rows)
    failed = f", {faults} of them not graded, since the grader failed" if faults else ""
    if not parsed:
        failed += f", none in the form that --task {task} reads: is it the right task"
    line = f"n = {n}{failed}: strict {strict:.4f}, flexible {flexible:.4f}, parsed {parsed:.4f}; rows in {out}"
    needed = [key for key in (*CELL, "question") if not all(key in row for row in graded.rows)]
    schemes = {str(row.get("scheme")) for row in graded.rows}
    other = sorted(schemes.difference(names.QUANTIZED_SCHEMES))  # full precision under another name
    other = [scheme for scheme in other if scheme.lower() in _PRECISIONS] or other
    options = {"questions": str(out)}
    if names.FULL not in map(names.scheme, schemes):
        options["reference"] = other[0] if len(other) == 1 else "SCHEME"
    following = f"Next: {process.command('compare', options | {'out': 'DIR'})}"
    if needed:
        following = (
            f"To compare cells, the rows also need {', '.join(needed)}: name them with --columns, as in "
            "question=id, or give a file per cell, VARIANT:SCHEME=FILE,…"
        )
    return "\n".join((line, *([] if needed else ["", str(graded), ""]), following))


def _rate(right: int, n: int) -> str:
    return f"{right / n:.3f} ± {stats.accuracy(right, n).stderr:.3f}" if n > 1 else f"{right / n:.3f}"


def _check(where: str, row: dict[str, Any]) -> None:
    if lacking := [f"'{key}'" for key in ("completion", "answer") if key not in row]:
        there = ", ".join(map(str, row)) or "none"
        raise BadInput(f"{where} lacks {' and '.join(lacking)}; its columns are {there}: --columns names other ones.")
    if not isinstance(row["completion"], str):
        raise BadInput(
            f"{where}: 'completion' is {json.dumps(row['completion'], default=str)[:40]}, but must be a text."
        )
    answer = row["answer"]
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise BadInput(f"{where}: 'answer' is {json.dumps(answer, default=str)[:40]}, but must be a text or a number.")


def _graded(task: str, rows: list[tables.Row]) -> list[dict[str, Any]]:
    from tqdm import tqdm

    completions, answers = [row["completion"] for _, row in rows], [str(row["answer"]) for _, row in rows]
    try:
        with tqdm(total=len(rows), desc="grade", unit="row", leave=False, delay=2) as bar:
            verdicts = tasks.grade_many(task, completions, answers, bar.update)
    except BadInput as error:
        if task not in tasks.TASKS:
            raise  # the user's file is to blame, not a row
        for (where, _), answer in zip(rows, answers, strict=True):  # name the first line with an unreadable answer
            try:
                tasks.grade(task, "", answer)  # an empty completion is graded at once
            except BadInput as unreadable:
                raise BadInput(f"{where}: {unreadable}") from None
        raise error  # no single row is to blame
    graded = []
    for (_, row), verdict in zip(rows, verdicts, strict=True):
        fields = {key: value for key, value in asdict(verdict).items() if not key.startswith("fault") or value}
        graded.append(row | fields | {"correct": int(verdict.strict)})
    return graded
