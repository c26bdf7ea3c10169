"""Logs of lm-evaluation-harness (`samples_*.jsonl`) and inspect_ai (`.eval`, `.json`) as a table of outcomes.

Cells are paired by document. Logs with other questions, gold answers, prompts (few-shot examples are part of them) or
settings are refused. Neither tool has to be installed.
"""

import glob
import json
import os
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from qrl.compare.missing import WRONG, check_missing
from qrl.compare.read import read_questions
from qrl.compare.validate import quoted
from qrl.errors import BadInput
from qrl.files import reading, tables
from qrl.names import cell_name

LARGEST = 1 << 30  # bytes of a log, uncompressed
GROWS = 8  # bytes in memory per byte of JSON, at least half of the worst case: 300 MB of `[],[],…` take 6 GB
ZSTD = 93  # zip's number for it, which the standard library reads only from Python 3.14 on
NO_FILTER = "none"  # the harness's own name for it
HARNESS = "lm-evaluation-harness"
INSPECT = "inspect_ai"
GRADES = {"C": 1.0, "I": 0.0, "N": 0.0, "P": 0.5}  # inspect's correct, incorrect, no answer, partly correct: its values
LIMITS = ("epochs", "message_limit", "token_limit", "time_limit", "working_limit")  # of eval.config
# Settings of inspect's generation that change no distribution of answers.
IRRELEVANT = {"seed", "max_connections", "adaptive_connections", "max_retries", "timeout", "attempt_timeout", "batch"}
# Keys of a sample of lm-evaluation-harness that are no metric, for versions that do not list their metrics.
KEYS = {"doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "filter", "metrics"}
KEYS |= {"doc_hash", "prompt_hash", "target_hash"}
ADVICE = "evaluate all cells with one task, one prompt and the same few-shot examples"


@dataclass(frozen=True, slots=True)
class Answer:
    """One graded answer of a log."""

    question: str
    completion: str
    scores: dict[str, Any]  # by metric
    conditions: dict[str, str]  # what every cell must have for this question, as text: prompt, gold answer
    sample: int = 1
    filter: str | None = None


@dataclass(frozen=True, slots=True)
class Log:
    """One file, read: its answers, and the settings that all files must share, by dotted name."""

    path: Path
    tool: str
    answers: list[Answer]
    settings: dict[str, Any] = field(default_factory=dict)


def read_logs(
    source: str,
    *,
    metric: str | None = None,
    filter: str | None = None,
    reference: str | None = None,
    missing: str | None = None,
) -> pd.DataFrame:
    """Return a row per cell, question and sample, as `from_questions` reads them; epochs of inspect are samples.

    Args:
        source: `VARIANT:SCHEME=LOG,…`; LOG is a file, or a folder or pattern that holds one log.
        metric: name of the score, from 0 to 1, that is `correct`; None if the logs have one. A score of inspect is
            named by its scorer, a part of one `scorer.part`.
        filter: filter of lm-evaluation-harness, such as "strict-match"; None if the logs have one.
        reference: the logs' name for full precision, such as "bf16".
        missing: "wrong" leaves out samples of inspect that ended in an error or have no scores, for `from_questions` to
            count as wrong; None refuses them.

    Raises:
        BadInput: a log cannot be read; it has several metrics or filters and none is chosen; a score is outside 0..1;
            logs differ in tool, task, settings, question, gold answer or prompt.
    """
    check_missing(missing)
    logs: dict[str, Log] = {}
    rows: list[dict[str, Any]] = []
    first_answers: dict[str, tuple[str, Answer]] = {}  # question → the first cell with it, and its answer
    for variant, scheme, address in tables.parse_cells(source):
        cell = cell_name(variant, scheme)
        if cell in logs:
            raise BadInput(f"--logs names cell {cell} twice: give one log per cell.")
        log = _read(_file(address), missing)
        logs[cell] = log
        _check_settings(logs)

        if log.tool == INSPECT and filter is not None:
            raise BadInput(f"{log.path} is a log of {INSPECT}, which has no filters: omit --filter.")
        filter, answers = _filtered(log, filter)
        metrics: dict[str, None] = {}  # their names, each once, in order
        for answer in answers:
            metrics.update(dict.fromkeys(answer.scores))
        metric = _only("metric", metric, log, metrics)

        for answer in answers:
            first_cell, first_answer = first_answers.setdefault(answer.question, (cell, answer))
            _check_conditions(logs, cell, answer, first_cell, first_answer)
            row = {
                "variant": variant,
                "scheme": scheme,
                "question": answer.question,
                "sample": answer.sample,
                "correct": _outcome(log, answer, str(metric)),
                "completion": answer.completion,
            }
            rows.append(row)
    return read_questions(tables.as_frame(rows), reference=reference)


def _file(address: str) -> Path:
    """Return the one log that an address names: a file, or a folder or pattern that holds one."""
    path = Path(address)
    if path.is_dir():
        files = [file for file in reading.walk(path) if file.suffix == ".eval" or file.match("samples_*.jsonl")]
    elif path.exists():
        files = [path]
    else:
        files = [Path(name) for name in sorted(glob.glob(address, recursive=True))]
    if len(files) != 1:
        file_names = ", ".join(file.name for file in files)[:200]
        listed = f" ({file_names})" if files else ""
        expected = "one per cell, a samples_*.jsonl of lm-evaluation-harness, or an .eval or .json of inspect_ai"
        raise BadInput(f"There are {len(files)} logs at {address}{listed}: expected {expected}.")
    return files[0]


def _read(path: Path, missing: str | None) -> Log:
    if not path.is_file():
        raise BadInput(f"{path} is no file: give a log of {HARNESS} or {INSPECT}.")
    if path.stat().st_size > LARGEST:
        raise BadInput(f"{path} is larger than {LARGEST >> 30} GiB: expected a log; shorten it to what was graded.")
    readers = {".jsonl": _harness, ".eval": partial(_eval, missing=missing), ".json": partial(_json, missing=missing)}
    if path.suffix not in readers:
        raise BadInput(f"{path} ends in '{path.suffix}', but logs are read from {', '.join(readers)}: convert it.")

    # Whatever a file holds where the tool would have written something else raises one of these.
    try:
        log = readers[path.suffix](path)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, OSError, RecursionError) as error:
        reason = f"{type(error).__name__}: {str(error)[:100]}"
        expected = f"expected samples of {HARNESS} (.jsonl) or a log of {INSPECT} (.eval, .json)"
        raise BadInput(f"{path} cannot be read as a log ({reason}): {expected}.") from None
    if not log.answers:
        raise BadInput(f"{path} has no answers: log them, with --log_samples (lm-eval) or without --no-log-samples.")
    return log


def _harness(path: Path) -> Log:
    answers = []
    for location, row in tables.read_rows(path):
        lacking = {"doc_id", "arguments", "resps"}.difference(row)
        if lacking:
            expected = f"samples of {HARNESS}, from --log_samples"
            raise BadInput(f"{location} has no '{min(lacking)}': expected {expected}.")
        arguments = _harness_arguments(row)
        prompt = [str(argument) for argument in arguments if not isinstance(argument, dict)]
        settings = [argument for argument in arguments if isinstance(argument, dict)]
        conditions = {
            "question": row.get("doc_hash") or _text(row.get("doc")),
            "gold answer": row.get("target_hash") or _text(row.get("target")),
            "prompt": "\n".join(prompt),
            "prompt hash": row.get("prompt_hash", ""),
            "generation settings": _text(settings),
        }
        metrics = row.get("metrics") or [key for key in row if key not in KEYS]
        answer = Answer(
            question=str(row["doc_id"]),
            completion=str(_first_leaf(row["resps"])),
            scores={name: row[name] for name in metrics},
            conditions=conditions,
            filter=None if row.get("filter") is None else str(row["filter"]),
        )
        answers.append(answer)
    _check_unnamed_filters(path, answers)
    task = re.fullmatch(r"samples_(.+)_\d{4}-\d\d-\d\dT.*", path.stem)
    return Log(path, HARNESS, answers, {"task": task[1]} if task else {})


def _harness_arguments(row: Mapping[str, Any]) -> list[Any]:
    """Return the prompt and the generation settings of a sample: in some versions a dictionary of dictionaries."""
    requests = row["arguments"].values() if isinstance(row["arguments"], dict) else row["arguments"]
    arguments = []
    for request in requests:
        arguments += request.values() if isinstance(request, dict) else request
    return arguments


def _eval(path: Path, missing: str | None) -> Log:
    """Read an .eval file: an archive with a header and a member per sample."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename: info for info in archive.infolist()}
            header = members.get("header.json")
            if header is None:
                raise BadInput(
                    f"{path} has no header.json: the evaluation has not ended; `inspect eval-retry` ends it."
                )
            samples = [info for name, info in members.items() if name.startswith("samples/")]
            sizes = [info.file_size for info in (header, *samples)]
            # A member is in memory as a whole.
            if sum(sizes) > LARGEST or max(sizes) > reading.memory_limit_bytes() // GROWS:
                expected = "shorten it, for example by its events"
                raise BadInput(
                    f"{path} unpacks to more than fits into memory, {max(sizes):,} bytes at once: {expected}."
                )

            # A generator, so that one sample is in memory at a time.
            parsed = (tables.parse_json(f"{path}, {info.filename}", _content(path, archive, info)) for info in samples)
            document = tables.parse_json(f"{path}, header.json", _content(path, archive, header))
            return _inspect(path, document, parsed, missing)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, OSError) as error:
        damaged = f"{path} is no .eval log of {INSPECT}, or is damaged ({str(error)[:100]})"
        raise BadInput(f"{damaged}: copy it again, or convert it with `inspect log dump FILE > FILE.json`.") from None


def _content(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    """Return a member's bytes, never more than it declares."""
    if info.compress_type != ZSTD:
        return archive.read(info)
    import pyarrow

    with path.open("rb") as file:
        file.seek(info.header_offset + 26)  # the lengths of name and extra field end the local header's 30 bytes
        name_length = int.from_bytes(file.read(2), "little")
        extra_length = int.from_bytes(file.read(2), "little")
        file.seek(name_length + extra_length, os.SEEK_CUR)
        packed = pyarrow.BufferReader(file.read(info.compress_size))
    content = pyarrow.CompressedInputStream(packed, "zstd").read(info.file_size + 1)
    if zlib.crc32(content) != info.CRC:
        raise zipfile.BadZipFile(f"bad checksum of {info.filename}")
    return content


def _json(path: Path, missing: str | None) -> Log:
    document = tables.parse_json(
        str(path), reading.read_bytes(path, min(LARGEST, reading.memory_limit_bytes() // GROWS))
    )
    if not isinstance(document, dict) or "eval" not in document:
        raise BadInput(f"{path} has no 'eval': expected a log of {INSPECT}. Of {HARNESS}, give samples_*.jsonl.")
    return _inspect(path, document, iter(document.get("samples") or ()), missing)


def _inspect(path: Path, header: Mapping[str, Any], samples: Iterator[dict[str, Any]], missing: str | None) -> Log:
    if header["status"] != "success":
        problem = f"{path} is of an evaluation with status '{header['status']}', not 'success'"
        raise BadInput(f"{problem}: end it with `inspect eval-retry`.")
    settings = _inspect_settings(header)
    answers = []
    for sample in samples:
        failed = bool(sample.get("error"))
        if not failed and sample.get("scores"):
            answers.append(_inspect_answer(sample))
        elif missing != WRONG:
            problem = "ended in an error" if failed else "has no scores"
            advice = "run `inspect eval-retry` or `inspect score`, or count it as wrong: `--missing wrong`"
            raise BadInput(f"Question '{sample['id']}' of {path} {problem}: {advice}.")
    return Log(path, INSPECT, answers, settings)


def _inspect_settings(header: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that all logs must share, by dotted name."""
    evaluation = header["eval"]
    plan = header.get("plan") or {}
    settings = {name: evaluation.get(name) for name in ("task", "task_version", "task_args", "scorers")}
    settings["config"] = {name: evaluation["config"].get(name) for name in LIMITS}
    settings["solver"] = [(step["solver"], step.get("params")) for step in plan.get("steps", ())]
    generation = (evaluation.get("model_generate_config") or {}) | (plan.get("config") or {})
    settings["generate"] = {name: value for name, value in generation.items() if name not in IRRELEVANT}
    return _flat("", settings)


def _inspect_answer(sample: Mapping[str, Any]) -> Answer:
    scores = {}
    for name, score in sample["scores"].items():
        scores |= _flat(name, score["value"])
    return Answer(
        question=str(sample["id"]),
        completion=(sample.get("output") or {}).get("completion") or "",
        scores=scores,
        conditions={
            "question": _text([sample["input"], sample.get("choices")]),
            "gold answer": _text(sample["target"]),
            "prompt": _inspect_prompt(sample),
        },
        sample=int(sample["epoch"]),
    )


def _inspect_prompt(sample: Mapping[str, Any]) -> str:
    """Return the messages before the model's first; long ones are stored apart, as attachments."""
    attachments = sample.get("attachments") or {}
    lines = []
    for message in sample.get("messages") or ():
        if message.get("source") == "generate":
            break
        content = message["content"]
        text = _text(attachments.get(str(content).removeprefix("attachment://"), content))
        lines.append(f"{message['role']}: {text}")
    return "\n".join(lines)


def _only(option: str, name: str | None, log: Log, values: Iterable[str | None]) -> str | None:
    """Return the metric or filter to read: the one that is named, or else the only one of the log."""
    present = list(dict.fromkeys(values))
    plural = "s" if len(present) > 1 else ""
    available = f"{log.path} has the {option}{plural} {quoted(map(str, present))}"
    if name is None:
        if len(present) > 1:
            raise BadInput(f"{available}: choose one with --{option}.")
        return present[0] if present else None
    if name not in present:
        raise BadInput(f"{available}, not '{name}': choose with --{option} one that every log has.")
    return name


def _filtered(log: Log, name: str | None) -> tuple[str | None, list[Answer]]:
    """Return the filter to read, and the answers that it made; of a log without filters, all of them.

    A log of lm-evaluation-harness whose samples name no filter has one at most, which is called "none" there.
    """
    named = [answer.filter for answer in log.answers]
    if log.tool == HARNESS and None in named and name not in (None, NO_FILTER):
        raise BadInput(
            f"The samples of {log.path} name no filter, so it is not known whether '{name}' made their scores: give "
            f"logs of one version of {HARNESS}, written with --log_samples by one that names the filter."
        )
    if log.tool == HARNESS:
        named = [filter or NO_FILTER for filter in named]
    chosen = _only("filter", name, log, named)
    return chosen, [answer for answer, filter in zip(log.answers, named, strict=True) if filter == chosen]


def _check_unnamed_filters(path: Path, answers: Iterable[Answer]) -> None:
    """Raise BadInput if a log has several samples of one document and does not say which filter made which."""
    unnamed = Counter(answer.question for answer in answers if answer.filter is None)
    repeated = [question for question, count in unnamed.items() if count > 1]
    if repeated:
        raise BadInput(
            f"{path} has {unnamed[repeated[0]]} samples of document {repeated[0]} and names no filter: the task has "
            f"several filters, and this version of {HARNESS} does not say which one made a sample. Keep one sample a "
            "document, that of one filter, or run lm-eval again in a version whose samples have `filter`."
        )


def _outcome(log: Log, answer: Answer, metric: str) -> float:
    score = answer.scores.get(metric)
    value = GRADES.get(score, score) if isinstance(score, str) else score
    if not isinstance(value, int | float) or not 0 <= value <= 1:
        problem = f"'{metric}' of question '{answer.question}' in {log.path} is {value!r:.40}"
        expected = "must be 0 or 1, wrong or right, or a partial credit between them"
        raise BadInput(f"{problem}, but {expected}: choose another with --metric.")
    return float(value)


def _check_settings(logs: Mapping[str, Log]) -> None:
    """Reject the last log if its settings are not the first one's."""
    cells = list(logs)
    first_cell = cells[0]
    last_cell = cells[-1]
    first = logs[first_cell]
    last = logs[last_cell]
    if first.tool != last.tool:
        problem = f"{first_cell} is a log of {first.tool}, {last_cell} one of {last.tool}"
        raise BadInput(f"{problem}: their prompts and graders differ; give logs of one tool.")
    for name in dict.fromkeys((*first.settings, *last.settings)):
        first_value = first.settings.get(name)
        last_value = last.settings.get(name)
        # The only setting of the harness is the task, by a file's name; a file that was renamed has none.
        is_unknown = first.tool == HARNESS and (first_value is None or last_value is None)
        if first_value != last_value and not is_unknown:
            values = f"{first_value!r:.60} in {first_cell} and {last_value!r:.60} in {last_cell}"
            raise BadInput(f"The logs differ in {name}: {values}. To compare them, {ADVICE}.")


def _check_conditions(logs: Mapping[str, Log], cell: str, answer: Answer, first_cell: str, first: Answer) -> None:
    """Reject an answer to a question that the first log with it put differently."""
    for name, text in answer.conditions.items():
        first_text = first.conditions[name]
        if text == first_text:
            continue
        # Of long prompts only the place is shown where they begin to differ, with a few characters before it.
        start = max(0, _common_length(text, first_text) - 15)
        excerpts = f"{first_text[start : start + 45]!r} and {text[start : start + 45]!r}"
        cells = f"{cell} ({logs[cell].path.name}) than in {first_cell} ({logs[first_cell].path.name})"
        problem = f"Question '{answer.question}' has another {name} in {cells}: {excerpts}"
        raise BadInput(f"{problem}. To compare them, {ADVICE}.")


def _common_length(first: str, second: str) -> int:
    """Return how many characters two texts have in common at their start."""
    for index, (first_character, second_character) in enumerate(zip(first, second, strict=False)):
        if first_character != second_character:
            return index
    return min(len(first), len(second))


def _flat(name: str, value: Any) -> dict[str, Any]:
    """Return nested settings by dotted name."""
    if not isinstance(value, dict):
        return {name: value}
    flat = {}
    for key, part in value.items():
        flat |= _flat(f"{name}.{key}".lstrip("."), part)
    return flat


def _first_leaf(value: Any) -> Any:
    """Return the first value of nested lists that is no list."""
    while isinstance(value, list) and value:
        value = value[0]
    return value


def _text(value: Any) -> str:
    """Return a value as text that is equal for equal values."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)
