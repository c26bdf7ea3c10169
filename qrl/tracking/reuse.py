"""Finished steps are found again by their key, if everything that they left is still there and unchanged."""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import mlflow
from mlflow.artifacts import load_text
from mlflow.entities import Run
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

from qrl import names, process
from qrl.errors import QrlError
from qrl.files import reading
from qrl.tracking import contents, keys, models

_OUTPUTS = "outputs.json"
_EVIDENCE = "evidence"  # the parameter that seals a cell's rows
_NEWEST_FIRST = ["attributes.start_time DESC"]
_DIGEST = re.compile(r"[0-9a-f]{32,64}")  # of contents, or a run's id
_FILES_NAMED = 3
_BASE = f"{keys.INPUT}base"
_NAMING = ("task", f"{keys.INPUT}variant", f"{keys.INPUT}scheme")  # parts that name a result
_UNREADABLE = (mlflow.MlflowException, OSError, ValueError, TypeError)  # what reading a record may raise


@dataclass(frozen=True)
class Outputs:
    """What a step left for later ones: models by label, artifacts by path in its run, plain values by name."""

    models: dict[str, str] = field(default_factory=dict)
    artifacts: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)


def find(step: str, key: str) -> Run | None:
    """Return the newest finished run with this key in the active experiment, or None if its outputs are not intact."""
    condition = f" and tags.`{names.TAG_CACHE_KEY}` = '{key}'"
    for limit in (1, 100):  # those before the newest are loaded only if that one is damaged
        runs = _finished(step, condition, limit)
        for run in runs:
            if _is_intact(run):
                return run
        if len(runs) < limit:
            return None
    return None


def find_answers(key: str) -> list[Run]:
    """Return the runs of cells with these answers in the active experiment, newest first: finished, or void."""
    query = f"tags.`{names.TAG_STEP}` = 'evaluate' and tags.`{names.TAG_ANSWERS_KEY}` = '{key}'"
    runs = mlflow.search_runs(filter_string=query, output_format="list", order_by=_NEWEST_FIRST, max_results=20)
    return [run for run in runs if run.info.status in ("FINISHED", "FAILED")]


def changes(step: str, key: str) -> list[str]:
    """Return in words how a required result differs from the newest finished one; empty if there is none to compare.

    A result to compare has the same task, variant and scheme: another one is no earlier version of it.
    Results that share more of the required inputs come first.
    """
    required = keys.PARTS.get(key, {})
    recorded = []
    for run in _finished(step, limit=20):
        with suppress(*_UNREADABLE):
            recorded.append(_parts(run.info.artifact_uri))

    def differing_inputs(parts: dict[str, str]) -> int:
        inputs = [name for name in required if name.startswith(keys.INPUT)]
        return sum(parts.get(name) != required[name] for name in inputs)

    comparable = [parts for parts in recorded if parts and _names_same_result(parts, required)]
    nearest = min(comparable, key=differing_inputs, default=None)
    if not (nearest and required):
        return []
    return _describe_differences(nearest, required)


def _names_same_result(parts: Mapping[str, str], required: Mapping[str, str]) -> bool:
    return all(parts.get(name) == required.get(name) for name in _NAMING)


def _describe_differences(recorded: dict[str, str], required: dict[str, str]) -> list[str]:
    """Return a phrase for each difference: `train.steps 16 → 20`, or `qrl/train/grpo.py changed`."""
    if recorded.get(_BASE) != required.get(_BASE):  # another study: the rest does not matter
        return [f"{_spoken(_BASE)} changed"]
    phrases = []
    changed_sources = []
    for name in required | recorded:
        old = recorded.get(name, "")
        new = required.get(name, "")
        if old == new or name == "sources":
            continue
        if name.startswith(keys.SOURCE):
            changed_sources.append(name)
        elif _DIGEST.fullmatch(old or new):
            phrases.append(f"{_spoken(name)} changed")
        else:
            phrases.append(f"{_spoken(name)} {old or 'unset'} → {new or 'unset'}")
    if changed_sources:
        phrases.append(_describe_sources(changed_sources))
    unique_phrases = list(dict.fromkeys(phrases))
    return unique_phrases or ["files of the last result are missing or were changed"]


def _describe_sources(changed: list[str]) -> str:
    listed = ", ".join(changed[:_FILES_NAMED])
    if len(changed) > _FILES_NAMED:
        listed += f" and {len(changed) - _FILES_NAMED} more sources"
    return f"{listed} changed"


def _spoken(part: str) -> str:
    name = part.removeprefix(keys.INPUT)
    return "cells" if name.isdecimal() else name


def _finished(step: str, condition: str = "", limit: int = 100) -> list[Run]:
    """Return the finished runs of a step in the active experiment, newest first."""
    query = f"attributes.status = 'FINISHED' and tags.`{names.TAG_STEP}` = '{step}'{condition}"
    return mlflow.search_runs(filter_string=query, output_format="list", order_by=_NEWEST_FIRST, max_results=limit)


def record_outputs(*, models: dict | None = None, artifacts: list | None = None, values: dict | None = None) -> None:
    """Record in the active run what later steps need, with file sizes and artifact digests; the last call of a step.

    Args:
        models: label → "models:/m-…".
        artifacts: paths in the active run, files or folders.
        values: anything that JSON holds.
    """
    run = mlflow.get_run(contents.active_id())
    outputs = Outputs(models or {}, artifacts or [], values or {})
    names_of_outputs = (*outputs.models.values(), *outputs.artifacts)
    sizes = {output: _sizes(_address(run, output)) for output in names_of_outputs}
    digests = {output: _digests(_address(run, output)) for output in outputs.artifacts}
    parts = keys.PARTS.get(run.data.tags.get(names.TAG_CACHE_KEY, ""), {})
    document = {**vars(outputs), "sizes": sizes, "digests": digests, "parts": parts}
    mlflow.log_dict(document, _OUTPUTS)


def seal(rows: Path, facts: Mapping[str, object]) -> None:
    """Record in the active run, at a cell's end, the sha256 of its rows and what they are; nobody can change it.

    MLflow writes a parameter once: unlike a tag, a metric, a status or an artifact, it cannot be edited afterwards.
    """
    contents.log_params({_EVIDENCE: json.dumps({"rows": process.file_digest(rows), **facts})})


def sealed(run: Run) -> dict[str, Any]:
    """Return what `seal` recorded in a run: `rows` and the facts; empty for a run without this record.

    Raises:
        QrlError: the record cannot be read.
    """
    text = run.data.params.get(_EVIDENCE)
    if not text:
        return {}
    with suppress(ValueError):
        evidence = reading.parse_json(text)
        if isinstance(evidence, dict):
            return evidence
    message = f"The parameter {_EVIDENCE} of run {run.info.run_id} cannot be read"
    raise QrlError(f"{message}, so the database was edited: evaluate the cell again.")


def outputs(run: Run) -> Outputs:
    """Return what `record_outputs` recorded in a run."""
    document = _document(run)
    return Outputs(document["models"], document["artifacts"], document["values"])


def _is_intact(run: Run) -> bool:
    """Return whether every recorded file is there with its size, and weights and artifacts with their digests."""
    try:
        document = _document(run)
        for output, sizes in document["sizes"].items():
            if not sizes or _sizes(_address(run, output)) != sizes:
                return False
        for output, digests in document["digests"].items():
            if _digests(_address(run, output)) != digests:
                return False
        digest = document["values"].get("digest")
        return all(models.holds(uri, digest) for uri in document["models"].values())
    except (*_UNREADABLE, KeyError):
        return False  # what cannot be read cannot be reused


def _document(run: Run) -> dict:
    return reading.parse_json(load_text(f"{run.info.artifact_uri}/{_OUTPUTS}"))


@cache  # a study reads it once a cell, and a finished step's record never changes
def _parts(artifacts: str) -> dict[str, str] | None:
    """Return the parts of a finished step's key, by the address of its artifacts."""
    return reading.parse_json(load_text(f"{artifacts}/{_OUTPUTS}")).get("parts")


def _address(run: Run, output: str) -> str:
    """Return the address of a step's output: a model's own, or that of an artifact of the run."""
    if output.startswith("models:/"):
        return output
    return f"{run.info.artifact_uri}/{output}"


def _sizes(address: str) -> dict[str, int | None]:
    """Return path below the address → bytes, for every file except MLflow's own note of a download."""
    if not address.startswith("models:/"):  # an artifact may be a file, which only its folder lists
        parent, _, name = address.rpartition("/")
        for info in get_artifact_repository(parent).list_artifacts(None):
            if Path(info.path).name == name and not info.is_dir:
                return {name: info.file_size}
    repository = get_artifact_repository(address)
    pending = repository.list_artifacts(None)
    sizes = {}
    while pending:
        info = pending.pop()
        if info.is_dir:
            pending += repository.list_artifacts(info.path)
        elif info.path != "registered_model_meta":
            sizes[info.path] = info.file_size
    return sizes


def _digests(address: str) -> dict[str, str]:
    """Return path below the address → sha256, for every file of a local artifact; nothing for a remote store."""
    path = models.local(address)
    if path is None:
        return {}
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return {file.relative_to(path.parent).as_posix(): process.file_digest(file) for file in files}
