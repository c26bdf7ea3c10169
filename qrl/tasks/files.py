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
from qrl.workspace import write_atomically

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
        rows_by_cell: dict[str, list[dict[str, Any]]] = {}
        for row in self.rows:
            cell = names.cell_name(row["variant"], row["scheme"]) if row.keys() >= set(CELL) else "all"
            rows_by_cell.setdefault(cell, []).append(row)

        body = []
        for cell, rows in rows_by_cell.items():
            n = len(rows)
            strict = _rate(sum(row["strict"] for row in rows), n)
            flexible = _rate(sum(row["flexible"] for row in rows), n)
            parsed = _rate(sum(row["parsed"] is not None for row in rows), n)
            body.append((cell, str(n), strict, flexible, parsed))
        return "\n".join(table(("cell", "n", "strict", "flexible", "parsed"), body))

    _repr_markdown_ = __str__


def grade(
    data: pd.DataFrame | tables.Rows | str | Path,
    task: str,
    *,
    columns: Mapping[str, str] | None = None,
    max_grader_fault_rate: float | None = None,
) -> Graded:
    """Return a verdict on each completion.

    Args:
        data: rows with `completion` and `answer`: a frame, a list of dicts, a file, or files per cell
            (`VARIANT:SCHEME=FILE,…`).
        task: the task with the grader to use, or a task file.
        columns: our name of a column → its name in the data, such as {"completion": "output"}.
        max_grader_fault_rate: largest share of completions on which the grader may fail; None: as for `evaluate`.

    Raises:
        BadInput: the task is unknown, the data cannot be read, or a row lacks a field; the row is named.
        QrlError: the grader failed on more completions than that; one of them and what it raised are named.
    """
    limit = _fault_limit(max_grader_fault_rate)
    graded = _graded_rows(data, task, columns)
    problem = _too_many_faults(graded, limit)
    if problem:
        raise QrlError(problem)
    return graded


def _graded_rows(data: pd.DataFrame | tables.Rows | str | Path, task: str, columns: Mapping[str, str] | None) -> Graded:
    tasks.check_task(task)
    rows = tables.read_rows(data, columns)
    for location, row in rows:
        _check_row(location, row)
    return Graded(task, tuple(_with_verdicts(task, rows)))


def _fault_limit(max_grader_fault_rate: float | None) -> float:
    """Return the largest share of completions on which the grader may fail; None: the default of `evaluate`."""
    from qrl.recipe import Evaluate

    if max_grader_fault_rate is None:
        return Evaluate().max_grader_fault_rate
    if not 0 <= max_grader_fault_rate <= 1:
        invalid = f"max_grader_fault_rate is {max_grader_fault_rate!r}"
        raise BadInput(f"{invalid}, but must be a share from 0 to 1, such as 0.01.")
    return max_grader_fault_rate


def _too_many_faults(graded: Graded, limit: float) -> str:
    """Return a sentence if the grader failed on too many completions, with its most frequent cause; else nothing."""
    n = len(graded.rows)
    faults = [row for row in graded.rows if "fault" in row]
    if len(faults) <= limit * n:
        return ""
    causes = Counter(row.get("fault_cause") or row["fault"] for row in faults)
    cause, count = causes.most_common(1)[0]
    frequency = _counted(count, "time")
    further_causes = f", {_counted(len(causes) - 1, 'other cause')}" if len(causes) > 1 else ""
    failures = f"failed on {len(faults)} of {_counted(n, 'completion')} ({frequency}: {cause}{further_causes})"
    return (
        f"The grader of {graded.task} {failures}, but at most {limit:.3g} of them may fail, since each counts as "
        "wrong: correct the grader, or allow more by max_grader_fault_rate."
    )


def _counted(count: int, noun: str) -> str:
    """Return a number with its noun: `1 time`, `2 times`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


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
    limit = _fault_limit(max_grader_fault_rate)
    target = Path(out)
    if target.is_dir() or not target.parent.is_dir():  # checked before minutes of grading
        cause = "it is a folder" if target.is_dir() else "there is no such folder"
        raise BadInput(f"{out} cannot be written ({cause}): give the path of a file, in a folder that exists.")

    graded = _graded_rows(source, task, columns)
    _write(graded, out)
    problem = _too_many_faults(graded, limit)
    if problem:
        raise QrlError(f"{problem} The rows in {out} say which, in `fault` and `fault_cause`.")

    rates = _rates_line(graded, out)
    missing = [key for key in (*CELL, "question") if not all(key in row for row in graded.rows)]
    if missing:
        hint = (
            f"To compare cells, the rows also need {', '.join(missing)}: name them with --columns, as in "
            "question=id, or give a file per cell, VARIANT:SCHEME=FILE,…"
        )
        return f"{rates}\n{hint}"
    obstacle = _obstacle_to_comparing(graded)
    if obstacle:
        return f"{rates}\n\n{graded}\n\n{obstacle}"
    return f"{rates}\n\n{graded}\n\nNext: {_compare_command(graded, out)}"


def _write(graded: Graded, out: str | Path) -> None:
    """Write rows as JSONL; raise BadInput if the file cannot be written."""
    lines = [json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in graded.rows]
    try:
        with write_atomically(Path(out)) as partial:  # a lone surrogate is written as JSON's own escape, `\ud800`
            partial.write_text("".join(lines), encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        remedy = "give a path in a folder that exists, on a disk with space"
        raise BadInput(f"{out} cannot be written ({error.strerror}): {remedy}.") from None


def _rates_line(graded: Graded, out: str | Path) -> str:
    """Return a line with n, the rates of right and of readable answers, and what is suspicious about them."""
    n = len(graded.rows)
    strict = sum(row["strict"] for row in graded.rows) / n
    flexible = sum(row["flexible"] for row in graded.rows) / n
    parsed = sum(row["parsed"] is not None for row in graded.rows) / n
    faults = sum("fault" in row for row in graded.rows)

    remarks = ""
    if faults:
        remarks += f", {faults} of them not graded, since the grader failed"
    if not parsed:
        remarks += f", none in the form that --task {graded.task} reads: is it the right task"
    return f"n = {n}{remarks}: strict {strict:.4f}, flexible {flexible:.4f}, parsed {parsed:.4f}; rows in {out}"


def _obstacle_to_comparing(graded: Graded) -> str:
    """Return why `compare` would refuse the rows: a question twice in a cell, or no base; empty if it would not."""
    seen = set()
    for row in graded.rows:
        answer = tuple(str(row.get(key)) for key in (*CELL, "question", "seed", "sample"))
        if answer in seen:
            variant, scheme, question, *_ = answer
            return (
                f"To compare cells, each question needs one row per cell, but {question!r} is repeated in "
                f"{names.cell_name(variant, scheme)}: number several answers in a column `sample`, training runs in a "
                "column `seed`, or remove the copies."
            )
        seen.add(answer)
    variants = {str(row["variant"]) for row in graded.rows}
    if names.BASE not in variants or len(variants) < 2:
        return (
            f"To compare cells, the rows need the variant `{names.BASE}` and a trained one, but they name "
            f"{', '.join(sorted(variants))}: name the model before training `{names.BASE}`."
        )
    return ""


def _compare_command(graded: Graded, out: str | Path) -> str:
    """Return the command that compares the rows; without a scheme `full`, it names the one in full precision."""
    schemes = {str(row.get("scheme")) for row in graded.rows}
    options = {"questions": str(out)}
    if names.FULL not in map(names.scheme, schemes):
        candidates = sorted(schemes.difference(names.QUANTIZED_SCHEMES))
        dtypes = [scheme for scheme in candidates if scheme.lower() in _PRECISIONS]
        candidates = dtypes or candidates
        options["reference"] = candidates[0] if len(candidates) == 1 else "SCHEME"
    options["out"] = "DIR"
    return process.command("compare", options)


def _rate(count: int, n: int) -> str:
    if n < 2:
        return f"{count / n:.3f}"
    return f"{count / n:.3f} ± {stats.accuracy(count, n).stderr:.3f}"


def _check_row(location: str, row: dict[str, Any]) -> None:
    """Raise BadInput if a row lacks its completion or its answer, or has one of another type."""
    missing = [f"'{key}'" for key in ("completion", "answer") if key not in row]
    if missing:
        present = ", ".join(map(str, row)) or "none"
        columns = f"its columns are {present}: --columns names other ones"
        raise BadInput(f"{location} lacks {' and '.join(missing)}; {columns}.")
    completion = row["completion"]
    if not isinstance(completion, str):
        raise BadInput(f"{location}: 'completion' is {_quoted(completion)}, but must be a text.")
    answer = row["answer"]
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise BadInput(f"{location}: 'answer' is {_quoted(answer)}, but must be a text or a number.")


def _quoted(value: Any) -> str:
    return json.dumps(value, default=str)[:40]


def _with_verdicts(task: str, rows: list[tables.Row]) -> list[dict[str, Any]]:
    """Return rows with the fields of their verdicts, and `correct`; raise BadInput as the grader does, with the row."""
    from tqdm import tqdm

    completions = [row["completion"] for _, row in rows]
    answers = [str(row["answer"]) for _, row in rows]
    try:
        with tqdm(total=len(rows), desc="grade", unit="row", leave=False, delay=2) as bar:
            verdicts = tasks.grade_many(task, completions, answers, bar.update)
    except BadInput:
        if task in tasks.TASKS:  # else the user's file is to blame, not a row
            _name_unreadable_answer(task, rows, answers)
        raise

    graded = []
    for (_, row), verdict in zip(rows, verdicts, strict=True):
        # Rows have no columns of faults unless a grader failed.
        fields = {key: value for key, value in asdict(verdict).items() if not key.startswith("fault") or value}
        graded.append(row | fields | {"correct": int(verdict.strict)})
    return graded


def _name_unreadable_answer(task: str, rows: list[tables.Row], answers: list[str]) -> None:
    """Raise BadInput for the first row with a gold answer that the task's grader cannot read, if there is one."""
    for (location, _), answer in zip(rows, answers, strict=True):
        try:
            tasks.grade(task, "", answer)  # an empty completion is graded at once
        except BadInput as error:
            raise BadInput(f"{location}: {error}") from None
