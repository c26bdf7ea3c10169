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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from qrl.compare.missing import WRONG
from qrl.compare.missing import check as check_missing
from qrl.compare.read import read_questions
from qrl.compare.validate import quoted
from qrl.errors import BadInput
from qrl.files import reading, tables
from qrl.names import cell_name

LARGEST = 1 << 30  # bytes of a log, uncompressed
GROWS = 8  # times in memory, at least half of the worst: 300 MB of `[],[],…` take 6 GB
ZSTD = 93  # zip's number for it, which the standard library reads only from Python 3.14 on
HARNESS, INSPECT = "lm-evaluation-harness", "inspect_ai"
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
    same: dict[str, str]  # what every cell must have for this question, as text
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
    first: dict[str, tuple[str, Answer]] = {}  # of each question
    for variant, scheme, place in tables.cells(source):
        if (cell := cell_name(variant, scheme)) in logs:
            raise BadInput(f"--logs names cell {cell} twice: give one log per cell.")
        log = logs[cell] = _read(_file(place), missing)
        _check_settings(logs)
        if log.tool == INSPECT and filter is not None:
            raise BadInput(f"{log.path} is a log of {INSPECT}, which has no filters: omit --filter.")
        filter = _chosen("filter", filter, log, {answer.filter: None for answer in log.answers})
        answers = [answer for answer in log.answers if answer.filter == filter]
        metric = _chosen("metric", metric, log, dict.fromkeys(name for answer in answers for name in answer.scores))
        for answer in answers:
            _check_same(logs, cell, answer, *first.setdefault(answer.question, (cell, answer)))
            rows.append(
                {"variant": variant, "scheme": scheme, "question": answer.question, "sample": answer.sample}
                | {"correct": _outcome(log, answer, str(metric)), "completion": answer.completion}
            )
    return read_questions(tables.framed(rows), reference=reference)


def _file(place: str) -> Path:
    path = Path(place)
    if path.is_dir():
        files = [file for file in reading.walk(path) if file.suffix == ".eval" or file.match("samples_*.jsonl")]
    else:
        files = [path] if path.exists() else [Path(name) for name in sorted(glob.glob(place, recursive=True))]
    if len(files) != 1:
        which = f" ({', '.join(file.name for file in files)[:200]})" if files else ""
        expected = "one per cell, a samples_*.jsonl of lm-evaluation-harness, or an .eval or .json of inspect_ai"
        raise BadInput(f"There are {len(files)} logs at {place}{which}: expected {expected}.")
    return files[0]


def _read(path: Path, missing: str | None) -> Log:
    if not path.is_file():
        raise BadInput(f"{path} is no file: give a log of {HARNESS} or {INSPECT}.")
    if path.stat().st_size > LARGEST:
        raise BadInput(f"{path} is larger than {LARGEST >> 30} GiB: expected a log; shorten it to what was graded.")
    readers = {".jsonl": _harness, ".eval": partial(_eval, missing=missing), ".json": partial(_json, missing=missing)}
    if path.suffix not in readers:
        raise BadInput(f"{path} ends in '{path.suffix}', but logs are read from {', '.join(readers)}: convert it.")
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
    for at, row in tables.records(path):
        if absent := {"doc_id", "arguments", "resps"}.difference(row):
            expected = f"samples of {HARNESS}, from --log_samples"
            raise BadInput(f"{at} has no '{min(absent)}': expected {expected}.")
        arguments = row["arguments"].values() if isinstance(row["arguments"], dict) else row["arguments"]
        parts = [part for one in arguments for part in (one.values() if isinstance(one, dict) else one)]
        same = {
            "question": row.get("doc_hash") or _text(row.get("doc")),
            "gold answer": row.get("target_hash") or _text(row.get("target")),
            "prompt": "\n".join(str(part) for part in parts if not isinstance(part, dict)),
            "prompt hash": row.get("prompt_hash", ""),
            "generation settings": _text([part for part in parts if isinstance(part, dict)]),
        }
        metrics = row.get("metrics") or [key for key in row if key not in KEYS]
        scores = {name: row[name] for name in metrics}
        answers.append(
            Answer(str(row["doc_id"]), str(_leaf(row["resps"])), scores, same, filter=str(row.get("filter", "none")))
        )
    task = re.fullmatch(r"samples_(.+)_\d{4}-\d\d-\d\dT.*", path.stem)
    return Log(path, HARNESS, answers, {"task": task[1]} if task else {})


def _eval(path: Path, missing: str | None) -> Log:
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
            if sum(sizes) > LARGEST or max(sizes) > reading.memory_bytes() // GROWS:  # a member is in memory as a whole
                expected = "shorten it, for example by its events"
                raise BadInput(
                    f"{path} unpacks to more than fits into memory, {max(sizes):,} bytes at once: {expected}."
                )
            parsed = (tables.parsed(f"{path}, {info.filename}", _content(path, archive, info)) for info in samples)
            document = tables.parsed(f"{path}, header.json", _content(path, archive, header))
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
        name, extra = (int.from_bytes(file.read(2), "little") for _ in range(2))
        file.seek(name + extra, os.SEEK_CUR)
        packed = pyarrow.BufferReader(file.read(info.compress_size))
    content = pyarrow.CompressedInputStream(packed, "zstd").read(info.file_size + 1)
    if zlib.crc32(content) != info.CRC:
        raise zipfile.BadZipFile(f"bad checksum of {info.filename}")
    return content


def _json(path: Path, missing: str | None) -> Log:
    document = tables.parsed(str(path), reading.content(path, min(LARGEST, reading.memory_bytes() // GROWS)))
    if not isinstance(document, dict) or "eval" not in document:
        raise BadInput(f"{path} has no 'eval': expected a log of {INSPECT}. Of {HARNESS}, give samples_*.jsonl.")
    return _inspect(path, document, iter(document.get("samples") or ()), missing)


def _inspect(path: Path, header: Mapping[str, Any], samples: Iterator[dict[str, Any]], missing: str | None) -> Log:
    if header["status"] != "success":
        problem = f"{path} is of an evaluation with status '{header['status']}', not 'success'"
        raise BadInput(f"{problem}: end it with `inspect eval-retry`.")
    made, plan = header["eval"], header.get("plan") or {}
    settings = {name: made.get(name) for name in ("task", "task_version", "task_args", "scorers")}
    settings["config"] = {name: made["config"].get(name) for name in LIMITS}
    settings["solver"] = [(step["solver"], step.get("params")) for step in plan.get("steps", ())]
    drawn = (made.get("model_generate_config") or {}) | (plan.get("config") or {})
    settings["generate"] = {name: value for name, value in drawn.items() if name not in IRRELEVANT}
    answers = []
    for sample in samples:
        question = str(sample["id"])
        unanswered = sample.get("error") or not sample.get("scores")
        if unanswered and missing == WRONG:
            continue
        if unanswered:
            problem = "ended in an error" if sample.get("error") else "has no scores"
            advice = "run `inspect eval-retry` or `inspect score`, or count it as wrong: `--missing wrong`"
            raise BadInput(f"Question '{question}' of {path} {problem}: {advice}.")
        attached = sample.get("attachments") or {}
        prompt = []
        for message in sample.get("messages") or ():
            if message.get("source") == "generate":
                break
            content = message["content"]
            text = attached.get(str(content).removeprefix("attachment://"), content)
            prompt.append(f"{message['role']}: {text if isinstance(text, str) else _text(text)}")
        same = {"question": _text([sample["input"], sample.get("choices")]), "gold answer": _text(sample["target"])}
        same["prompt"] = "\n".join(prompt)
        scores = {}
        for name, score in sample["scores"].items():
            scores |= _flat(name, score["value"])
        completion = (sample.get("output") or {}).get("completion") or ""
        answers.append(Answer(question, completion, scores, same, int(sample["epoch"])))
    return Log(path, INSPECT, answers, _flat("", settings))


def _chosen(what: str, name: str | None, log: Log, present: Mapping[str | None, None]) -> str | None:
    """Return the metric or filter to read: the one that is named, or else the only one."""
    available = f"{log.path} has the {what}{'s' if len(present) > 1 else ''} {quoted(map(str, present))}"
    if name is None and len(present) > 1:
        raise BadInput(f"{available}: choose one with --{what}.")
    if name is not None and name not in present:
        raise BadInput(f"{available}, not '{name}': choose with --{what} one that every log has.")
    return name if name is not None else next(iter(present), None)


def _outcome(log: Log, answer: Answer, metric: str) -> float:
    value = answer.scores.get(metric)
    value = GRADES.get(value, value) if isinstance(value, str) else value
    if not isinstance(value, int | float) or not 0 <= value <= 1:
        problem = f"'{metric}' of question '{answer.question}' in {log.path} is {value!r:.40}"
        expected = "must be 0 or 1, wrong or right, or a partial credit between them"
        raise BadInput(f"{problem}, but {expected}: choose another with --metric.")
    return float(value)


def _check_settings(logs: Mapping[str, Log]) -> None:
    """Reject the last log if its settings are not the first one's."""
    (cell, log), (other, latest) = next(iter(logs.items())), list(logs.items())[-1]
    if log.tool != latest.tool:
        problem = f"{cell} is a log of {log.tool}, {other} one of {latest.tool}"
        raise BadInput(f"{problem}: their prompts and graders differ; give logs of one tool.")
    for name in dict.fromkeys((*log.settings, *latest.settings)):
        values = [each.settings.get(name) for each in (log, latest)]
        if values[0] != values[1] and (log.tool == INSPECT or None not in values):
            shown = " and ".join(f"{value!r:.60} in {each}" for value, each in zip(values, (cell, other), strict=True))
            raise BadInput(f"The logs differ in {name}: {shown}. To compare them, {ADVICE}.")


def _check_same(logs: Mapping[str, Log], cell: str, answer: Answer, other: str, first: Answer) -> None:
    """Reject an answer to a question that another log asked otherwise."""
    for what, text in answer.same.items():
        if text != (before := first.same[what]):
            apart = (index for index, pair in enumerate(zip(text, before, strict=False)) if len({*pair}) > 1)
            start = max(0, next(apart, min(len(text), len(before))) - 15)
            texts = " and ".join(f"{one[start : start + 45]!r}" for one in (before, text))
            places = f"{cell} ({logs[cell].path.name}) than in {other} ({logs[other].path.name})"
            problem = f"Question '{answer.question}' has another {what} in {places}: {texts}"
            raise BadInput(f"{problem}. To compare them, {ADVICE}.")


def _flat(name: str, value: Any) -> dict[str, Any]:
    """Return nested settings by dotted name."""
    if not isinstance(value, dict):
        return {name: value}
    parts = (_flat(f"{name}.{key}".lstrip("."), part) for key, part in value.items())
    return {key: part for flat in parts for key, part in flat.items()}


def _leaf(value: Any) -> Any:
    """Return the first text of nested lists."""
    while isinstance(value, list) and value:
        value = value[0]
    return value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)
