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

_OUTPUTS, _EVIDENCE = "outputs.json", "evidence"
_NEWEST_FIRST = ["attributes.start_time DESC"]
_DIGEST = re.compile(r"[0-9a-f]{32,64}")  # of contents, or a run's id
_FILES_NAMED = 3
_BASE = f"{keys.INPUT}base"
_SAME = ("task", f"{keys.INPUT}variant", f"{keys.INPUT}scheme")  # parts that name a result
_UNREADABLE = (mlflow.MlflowException, OSError, ValueError, TypeError)  # what reading a record may raise


@dataclass(frozen=True)
class Outputs:
    """What a step left for later ones: models by label, artifacts by path in its run, plain values by name."""

    models: dict[str, str] = field(default_factory=dict)
    artifacts: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)


def find(step: str, key: str) -> Run | None:
    """Return the newest finished run with this key in the active experiment, or None if its outputs are not intact."""
    for most in (1, 100):  # those before the newest are loaded only if that one is damaged
        query = f" and tags.`{names.TAG_CACHE_KEY}` = '{key}'"
        runs = _finished(step, query, order_by=_NEWEST_FIRST, max_results=most)
        if (intact := next((run for run in runs if _is_intact(run)), None)) or len(runs) < most:
            return intact
    return None


def answered(key: str) -> list[Run]:
    """Return the runs of cells with these answers in the active experiment, newest first: finished, or void."""
    query = f"tags.`{names.TAG_STEP}` = 'evaluate' and tags.`{names.TAG_ANSWERS_KEY}` = '{key}'"
    found = mlflow.search_runs(filter_string=query, output_format="list", order_by=_NEWEST_FIRST, max_results=20)
    return [run for run in found if run.info.status in ("FINISHED", "FAILED")]


def changes(step: str, key: str) -> list[str]:
    """Return in words how a wanted result differs from the newest finished one; empty if there is none to compare.

    A result to compare has the same task, variant and scheme: another one is no earlier version of it.
    Results that share more of the wanted inputs come first.
    """
    wanted, recorded = keys.PARTS.get(key, {}), []
    for run in _finished(step, order_by=_NEWEST_FIRST, max_results=20):
        with suppress(*_UNREADABLE):
            recorded.append(_parts(run.info.artifact_uri))

    def unlike(parts: dict[str, str]) -> int:
        return sum(parts.get(name) != value for name, value in wanted.items() if name.startswith(keys.INPUT))

    alike = [parts for parts in recorded if parts and all(parts.get(name) == wanted.get(name) for name in _SAME)]
    newest = min(alike, key=unlike, default=None)
    return _differences(newest, wanted) if newest and wanted else []


def _differences(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Return a phrase for each difference: `train.steps 16 → 20`, or `qrl/train/grpo.py changed`."""
    if before.get(_BASE) != now.get(_BASE):  # another study: the rest does not matter
        return [f"{_spoken(_BASE)} changed"]
    phrases, files = [], []
    for name in now | before:
        old, new = before.get(name, ""), now.get(name, "")
        if old == new or name == "sources":
            continue
        if name.startswith(keys.SOURCE):
            files.append(name)
        elif _DIGEST.fullmatch(old or new):
            phrases.append(f"{_spoken(name)} changed")
        else:
            phrases.append(f"{_spoken(name)} {old or 'unset'} → {new or 'unset'}")
    if not any(name.startswith(keys.SOURCE) for name in before):  # an earlier version's record: one digest of all
        files = ["the sources"] if before.get("sources") != now.get("sources") else []
    if files:
        more = len(files) - _FILES_NAMED
        phrases.append(f"{', '.join(files[:_FILES_NAMED])}{f' and {more} more sources' if more > 0 else ''} changed")
    return list(dict.fromkeys(phrases)) or ["files of the last result are missing or were changed"]


def _spoken(part: str) -> str:
    name = part.removeprefix(keys.INPUT)
    return "cells" if name.isdecimal() else name


def _finished(step: str, more: str = "", **how: Any) -> list[Run]:
    query = f"attributes.status = 'FINISHED' and tags.`{names.TAG_STEP}` = '{step}'{more}"
    return mlflow.search_runs(filter_string=query, output_format="list", **how)


def record_outputs(*, models: dict | None = None, artifacts: list | None = None, values: dict | None = None) -> None:
    """Record in the active run what later steps need, with file sizes and artifact digests; the last call of a step.

    Args:
        models: label → "models:/m-…".
        artifacts: paths in the active run, files or folders.
        values: anything that JSON holds.
    """
    run = mlflow.get_run(contents.active_id())
    outputs = Outputs(models or {}, artifacts or [], values or {})
    sizes = {place: _sizes(_address(run, place)) for place in (*outputs.models.values(), *outputs.artifacts)}
    digests = {place: _digests(_address(run, place)) for place in outputs.artifacts}
    parts = keys.PARTS.get(run.data.tags.get(names.TAG_CACHE_KEY, ""), {})
    document = {**vars(outputs), "sizes": sizes, "digests": digests, "parts": parts}
    mlflow.log_dict(document, _OUTPUTS)


def seal(rows: Path, facts: Mapping[str, object]) -> None:
    """Record in the active run, at a cell's end, the sha256 of its rows and what they are; nobody can change it.

    MLflow writes a parameter once: unlike a tag, a metric, a status or an artifact, it cannot be edited afterwards.
    """
    contents.log_params({_EVIDENCE: json.dumps({"rows": process.file_digest(rows), **facts})})


def sealed(run: Run) -> dict[str, Any]:
    """Return what `seal` recorded in a run; of an earlier version's run, the digest of its rows in outputs.json.

    Returns:
        `rows`, and the facts if there are; empty for a run without either record.

    Raises:
        QrlError: the record cannot be read.
    """
    if text := run.data.params.get(_EVIDENCE):
        with suppress(ValueError):
            if isinstance(facts := reading.parsed(text), dict):
                return facts
        wrong = f"The parameter {_EVIDENCE} of run {run.info.run_id} cannot be read"
        raise QrlError(f"{wrong}, so the database was edited: evaluate the cell again.")
    with suppress(*_UNREADABLE, KeyError):
        return {"rows": _document(run)["digests"][names.QUESTIONS][names.QUESTIONS]}
    return {}


def outputs(run: Run) -> Outputs:
    """Return what `record_outputs` recorded in a run."""
    document = _document(run)
    return Outputs(document["models"], document["artifacts"], document["values"])


def _is_intact(run: Run) -> bool:
    """Whether every recorded file is there with its size, and weights and artifacts with their digests."""
    try:
        document = _document(run)
        return (
            all(sizes and _sizes(_address(run, place)) == sizes for place, sizes in document["sizes"].items())
            and all(_digests(_address(run, place)) == digests for place, digests in document.get("digests", {}).items())
            and all(models.holds(uri, document["values"].get("digest")) for uri in document["models"].values())
        )
    except (*_UNREADABLE, KeyError):
        return False  # what cannot be read cannot be reused


def _document(run: Run) -> dict:
    return reading.parsed(load_text(f"{run.info.artifact_uri}/{_OUTPUTS}"))


@cache  # a study of many cells asks for each, and a finished step's record never changes
def _parts(place: str) -> dict[str, str] | None:
    """Return the parts of a finished step's key, by the address of its artifacts."""
    return reading.parsed(load_text(f"{place}/{_OUTPUTS}")).get("parts")


def _address(run: Run, place: str) -> str:
    return place if place.startswith("models:/") else f"{run.info.artifact_uri}/{place}"


def _sizes(address: str) -> dict[str, int | None]:
    """Return path below the address → bytes, for every file except MLflow's own note of a download."""
    parent, _, name = address.rpartition("/")
    siblings = [] if address.startswith("models:/") else get_artifact_repository(parent).list_artifacts(None)
    for info in siblings:
        if Path(info.path).name == name and not info.is_dir:
            return {name: info.file_size}
    repository = get_artifact_repository(address)
    pending, sizes = repository.list_artifacts(None), {}
    while pending:
        info = pending.pop()
        if info.is_dir:
            pending += repository.list_artifacts(info.path)
        elif info.path != "registered_model_meta":
            sizes[info.path] = info.file_size
    return sizes


def _digests(address: str) -> dict[str, str]:
    """Return path below the address → sha256, for every file of a local artifact; nothing for a remote store."""
    place = models.local(address)
    if place is None:
        return {}
    files = [place] if place.is_file() else sorted(file for file in place.rglob("*") if file.is_file())
    return {file.relative_to(place.parent).as_posix(): process.file_digest(file) for file in files}
