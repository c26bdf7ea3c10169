"""Stages: resolved once to a version, moved by promotion and rollback.

An alias is the truth. A stage of ours (`base`, `grpo`, `awq`, or as a recipe declares them) is the alias of that name,
`<stage>-previous` is the version that a rollback returns to, and MLflow's own stages are mirrored from the aliases. If
two studies mirror the same one, it shows the stage that was promoted last. Pointers move under a lock, the alias first:
three racing transitions left two versions in Production, aliases never did (tried).
"""

import json
import re
import warnings
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from mlflow import MlflowClient

from qrl import names
from qrl.errors import BadInput, QrlError
from qrl.recipe.stages import Stage
from qrl.registry import declared, pages, versions
from qrl.registry.versions import PASSED, REFUSED, Version, aliased, locked, versions_of

_PREVIOUS = "-previous"
_ANY = object()


def resolve(name: str, stage: str | int) -> Version:
    """Return the version behind a stage, resolved once.

    Args:
        name: the registered model.
        stage: one that it has (`known`), one of them with `-previous`, Staging, Production, or a version number.

    Raises:
        BadInput: the stage, model or version is unknown.
    """
    address = str(stage)
    alias = address
    if address.capitalize() in declared.MIRRORED:
        alias = declared.mirrors(declared.model_of(name))[address.capitalize()]
    if re.fullmatch(r"[1-9][0-9]*", alias):
        by_number = {int(entry.version): entry for entry in versions_of(name)}
        if int(alias) in by_number:
            return Version.of(by_number[int(alias)])
        known_numbers = ", ".join(map(str, sorted(by_number)))
        known_numbers = known_numbers or "none; `mlflow run .` or `python -m qrl study` makes them"
        raise BadInput(f"'{name}' has no version {alias}: registered are {known_numbers}.")
    own = alias.removesuffix(_PREVIOUS)
    if own not in names.STAGES and own not in (there := declared.known(name)):
        hint = " (the base model's stage is `base`)" if address.lower() == "none" else ""
        expected = (*there, *declared.MIRRORED, "a version number", *(stage + _PREVIOUS for stage in there))
        raise BadInput(f"There is no stage '{address}'{hint}: expected one of {', '.join(expected)}.")
    if entry := aliased(name, alias):
        return Version.of(entry, own)
    if alias != own:
        raise BadInput(f"Stage {own} of '{name}' has had no other version, so there is no {alias}.")
    models = ", ".join(sorted(model.name for model in MlflowClient().search_registered_models())) or "none"
    others = [stage for stage in declared.known(name) if holder(name, stage)]
    has = f"it has {', '.join(others)}; " if others else ""
    raise BadInput(
        f"Stage {alias} of '{name}' has no version yet ({has}registered models here: {models}; choose one with "
        "--registered_name): `mlflow run .` makes all, "
        f"`python -m qrl promote --stage {alias} --cell RUN` makes this one from an evaluation."
    )


def promote(
    name: str, stage: str | Stage, version: int, *, record: Mapping[str, Any], expected: int | object | None = _ANY
) -> Version:
    """Give a stage to a version that passed its gate; the stage's former version becomes `<stage>-previous`.

    Args:
        name: the registered model.
        stage: one that the model has, or as a recipe declares it, complete.
        version: the version number.
        record: why: `run`, `reasons`, `bounds`, and anything else that JSON holds; digest and time are added.
        expected: the version that held the stage when the gate decided (None: none did); if another one holds it by
            now, nothing is moved. By default it is not checked.

    Raises:
        BadInput: the stage or version is unknown.
        QrlError: the stage moved since the gate decided.
    """
    with locked(name):
        earned = stage if isinstance(stage, Stage) else (declared.USUAL | declared.known(name)).get(stage)
        if earned is None:
            raise _no_stage(str(stage), "to promote to", declared.known(name))
        stage, target = earned.stage, resolve(name, version)
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
        declared.declare(name, earned)
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
    if stage not in names.STAGES and stage not in declared.known(name):
        raise _no_stage(stage, "to roll back", declared.known(name))
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


def check_stage(stage: str, stages: Iterable[Stage], name: str | None = None) -> None:
    """Raise BadInput if neither a recipe, whose `stages` these are, nor a registered model (None: any) has a stage."""
    models = [name] if name else [model.name for model in MlflowClient().search_registered_models()]
    there = {each.stage for each in stages}
    if stage not in there and stage not in (known := {each: 0 for model in models for each in declared.known(model)}):
        raise _no_stage(stage, "to promote to", known or [each.stage for each in stages])


def _no_stage(stage: str, use: str, there: Iterable[str]) -> BadInput:
    return BadInput(f"There is no stage '{stage}' {use}: expected one of {', '.join(there)}.")


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
    model = declared.model_of(name)
    aliases = {alias: int(number) for alias, number in model.aliases.items()} if model else {}
    wanted = {aliases[stage]: "None" for stage in declared.listed(model) if stage in aliases}
    for mirrored, stage in declared.mirrors(model).items():  # if one version holds both, Production counts
        wanted |= {aliases[stage]: mirrored} if stage in aliases else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        for entry in sorted(versions_of(name), key=lambda entry: int(entry.version) not in wanted):
            stage = wanted.get(int(entry.version), "None" if entry.current_stage == "None" else "Archived")
            if entry.current_stage != stage:
                # Archiving in the same transaction: a reader sees the old version or the new one, never none or both.
                MlflowClient().transition_model_version_stage(name, entry.version, stage, stage in declared.MIRRORED)
