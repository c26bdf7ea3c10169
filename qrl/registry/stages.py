"""Stages: resolved once to a version, moved by promotion and rollback.

An alias is the truth. A stage of ours (`base`, `grpo`, `awq`) is the alias of that name, `<stage>-previous` is the
version that a rollback returns to, and MLflow's own stages are mirrored from the aliases. Pointers move under a lock,
the alias first: three racing transitions left two versions in Production, aliases never did (tried).
"""

import json
import re
import warnings
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from mlflow import MlflowClient

from qrl import names
from qrl.errors import BadInput, QrlError
from qrl.registry import pages, versions
from qrl.registry.versions import PASSED, REFUSED, Version, aliased, locked, versions_of

_PREVIOUS = "-previous"
_BY_MLFLOW_STAGE = {mirrored: stage for stage, mirrored in names.MLFLOW_STAGE.items() if mirrored != "None"}
ADDRESSES = (*names.STAGES, *_BY_MLFLOW_STAGE, "a version number", *(stage + _PREVIOUS for stage in names.STAGES))
_ANY = object()


def resolve(name: str, stage: str | int) -> Version:
    """Return the version behind a stage, resolved once.

    Args:
        name: the registered model.
        stage: base, grpo, awq, one of them with `-previous`, Staging, Production, or a version number.

    Raises:
        BadInput: the stage, model or version is unknown.
    """
    address = str(stage)
    alias = _BY_MLFLOW_STAGE.get(address.capitalize(), address)
    if re.fullmatch(r"[1-9][0-9]*", alias):
        by_number = {int(entry.version): entry for entry in versions_of(name)}
        if int(alias) in by_number:
            return Version.of(by_number[int(alias)])
        known = ", ".join(map(str, sorted(by_number))) or "none; `mlflow run .` or `python -m qrl study` makes them"
        raise BadInput(f"'{name}' has no version {alias}: registered are {known}.")
    own = alias.removesuffix(_PREVIOUS)
    if own not in names.STAGES:
        hint = " (the base model's stage is `base`)" if address.lower() == "none" else ""
        raise BadInput(f"There is no stage '{address}'{hint}: expected one of {', '.join(ADDRESSES)}.")
    if entry := aliased(name, alias):
        return Version.of(entry, own)
    if alias != own:
        raise BadInput(f"Stage {own} of '{name}' has had no other version, so there is no {alias}.")
    known = ", ".join(sorted(model.name for model in MlflowClient().search_registered_models())) or "none"
    raise BadInput(
        f"Stage {alias} of '{name}' has no version yet (registered models here: {known}; choose one with "
        "--registered_name): `mlflow run .` makes all, "
        f"`python -m qrl promote --stage {alias} --cell RUN` makes this one from an evaluation."
    )


def promote(
    name: str, stage: str, version: int, *, record: Mapping[str, Any], expected: int | object | None = _ANY
) -> Version:
    """Give a stage to a version that passed its gate; the stage's former version becomes `<stage>-previous`.

    Args:
        name: the registered model.
        stage: base, grpo or awq.
        version: the version number.
        record: why: `run`, `reasons`, `bounds`, and anything else that JSON holds; digest and time are added.
        expected: the version that held the stage when the gate decided (None: none did); if another one holds it by
            now, nothing is moved. By default it is not checked.

    Raises:
        BadInput: the stage or version is unknown.
        QrlError: the stage moved since the gate decided.
    """
    with locked(name):
        check_stage(stage, "to promote to")
        target = resolve(name, version)
        held_by = holder(name, stage)
        if expected is not _ANY and held_by not in (expected, version):
            raise QrlError(
                f"Stage {stage} of '{name}' moved to version {held_by} while version {version} was judged: "
                "run promote again."
            )
        _write_gate(target, stage, PASSED, record)
        if held_by != version:
            MlflowClient().set_registered_model_alias(name, stage, str(version))
            if held_by:
                MlflowClient().set_registered_model_alias(name, stage + _PREVIOUS, str(held_by))
        _mirror(name)
        pages.refresh(name, version)
    return resolve(name, stage)


def refuse(name: str, stage: str, version: int, *, record: Mapping[str, Any]) -> None:
    """Record why a version was refused; no pointer moves.

    A version that passed this gate earlier keeps that record; the refusal goes to `qrl.gate.<stage>.refused`.
    """
    with locked(name):
        _write_gate(resolve(name, version), stage, REFUSED, record)
        pages.refresh(name, version)


def rollback(name: str, stage: str) -> Version:
    """Swap a stage with `<stage>-previous`; a second rollback swaps back.

    Raises:
        BadInput: the stage had no other version before.
        QrlError: the files of that version are gone or changed; nothing is moved.
    """
    check_stage(stage, "to roll back")
    with locked(name):
        now, before = holder(name, stage), aliased(name, stage + _PREVIOUS)
        if now is None or before is None or now == int(before.version):
            raise BadInput(f"Stage {stage} of '{name}' has had no other version, so there is nothing to roll back to.")
        versions.verify(Version.of(before, stage))  # never to a version that could not be served
        MlflowClient().set_registered_model_alias(name, stage, str(before.version))
        MlflowClient().set_registered_model_alias(name, stage + _PREVIOUS, str(now))
        _mirror(name)
    return resolve(name, stage)


def holder(name: str, stage: str) -> int | None:
    """Return the number of the version that holds a stage, or None."""
    entry = aliased(name, stage)
    return int(entry.version) if entry else None


def check_stage(stage: str, use: str) -> None:
    """Raise BadInput if there is no such stage for a use, such as "to promote to"."""
    if stage not in names.STAGES:
        raise BadInput(f"There is no stage '{stage}' {use}: expected one of {', '.join(names.STAGES)}.")


def _write_gate(version: Version, stage: str, verdict: str, record: Mapping[str, Any]) -> None:
    """Write the record first, then the word that refers to it."""
    at = datetime.now(UTC).isoformat(timespec="seconds")
    entry = json.dumps({**record, "digest": version.digest, "time": at}, default=str, ensure_ascii=False)
    former = version.gate(stage)
    tags = {names.gate_record_tag(stage): entry, names.gate_tag(stage): verdict}
    if verdict == REFUSED and former and former.passed:
        tags = {f"{names.gate_tag(stage)}.{REFUSED}": entry}
    for key, value in tags.items():
        MlflowClient().set_model_version_tag(version.name, str(version.version), key, value)


def _mirror(name: str) -> None:
    """Bring MLflow's stages in line with the aliases, also after a process that was killed half-way."""
    wanted = {}
    for stage, mirrored in names.MLFLOW_STAGE.items():  # if one version holds two stages, the later one counts
        if number := holder(name, stage):
            wanted[number] = mirrored
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        for entry in sorted(versions_of(name), key=lambda entry: int(entry.version) not in wanted):
            stage = wanted.get(int(entry.version), "None" if entry.current_stage == "None" else "Archived")
            if entry.current_stage != stage:
                # Archiving in the same transaction: a reader sees the old version or the new one, never none or both.
                MlflowClient().transition_model_version_stage(name, entry.version, stage, stage in _BY_MLFLOW_STAGE)
