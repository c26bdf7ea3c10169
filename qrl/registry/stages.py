"""Versions, aliases and stages: the only room that knows MLflow's stages.

An alias is the truth: a stage of ours (`base`, `grpo`, `awq`) is the alias of that name, `<stage>-previous` is what a rollback
returns to, and MLflow's stage is mirrored from the aliases. Pointers move under a lock, alias first: three racing
transitions left two versions in Production, aliases never did (ran). The lock is a file beside the database, or in the
temporary folder for a remote registry, where it holds off the processes of this machine only.
"""

from __future__ import annotations

import json
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from qrl import names
from qrl.errors import BadInput, QrlError
from qrl.recipe import Recipe
from qrl.registry import versions
from qrl.registry.versions import Version
from qrl.tracking import models

if TYPE_CHECKING:
    import mlflow
    from mlflow.entities.model_registry import ModelVersion

_PREVIOUS = "-previous"
_BY_MLFLOW_STAGE = {mirrored: stage for stage, mirrored in names.MLFLOW_STAGE.items() if mirrored != "None"}
ADDRESSES = (*names.STAGES, *_BY_MLFLOW_STAGE, "a version number", *(stage + _PREVIOUS for stage in names.STAGES))
_ANY = object()
_NAME = re.compile(r"\w[\w .+-]*")  # MLflow takes no / and no :, and its search no quotes


def registered_name(recipe: Recipe) -> str:
    """The registered model of a recipe: `qrl-tiny`, `qrl-qwen2.5-1.5b-instruct`, `qrl-<folder>`.

    Raises:
        BadInput: `registered_name` of the recipe holds what MLflow cannot keep in a name.
    """
    if name := recipe.registered_name:
        if not _NAME.fullmatch(name):
            raise BadInput(
                f"registered_name is '{name}', but must begin with a letter or digit and hold letters, digits, spaces and . _ + - only."
            )
        return name
    if recipe.model == "qrl-tiny":
        return recipe.model
    last = (
        Path(recipe.model).resolve().name
        if Path(recipe.model).is_dir()
        else recipe.model.rstrip("/").rpartition("/")[2]
    )
    return "qrl-" + (re.sub(r"[^a-z0-9._-]+", "-", last.lower()).strip("-.") or "model")


def register(
    name: str,
    model_uri: str,
    *,
    digest: str,
    variant: str,
    scheme: str,
    accuracy: float,
    stderr: float,
    n: int,
    parent_version: int | None = None,
) -> Version:
    """The version with this digest: found where there is one whose files are whole, else made from the logged model.

    Args:
        name: the registered model, from `registered_name`.
        model_uri: "models:/m-…".
        digest: of the weights that were evaluated.
        accuracy, stderr, n: of that evaluation; the newest ones stand on the version.
        parent_version: the version whose weights these were made from.
    """
    client = _client()
    tags = {
        names.TAG_DIGEST: digest,
        names.TAG_VARIANT: variant,
        names.TAG_SCHEME: scheme,
        "accuracy": f"{accuracy:.4f}",
        "stderr": f"{stderr:.4f}",
        "n": str(n),
        **({names.TAG_PARENT_VERSION: str(parent_version)} if parent_version else {}),
    }
    cell = names.cell_name(variant, scheme)
    description = f"{cell}: accuracy {accuracy:.3f} ± {stderr:.3f} (standard error) on n = {n} held-out questions. Digest {digest[:12]}."
    with _locked(name):
        _make_model(client, name)
        known = (mv for mv in _versions(client, name) if mv.tags.get(names.TAG_DIGEST) == digest and _exists(mv))
        found = next((mv for mv in known if mv.source == model_uri or models.holds(mv.source, digest)), None)
        if found:
            for key, value in tags.items():
                client.set_model_version_tag(name, found.version, key, value)
            client.update_model_version(name, found.version, description)
        else:
            model_id = model_uri.removeprefix("models:/")
            run_id = client.get_logged_model(model_id).source_run_id
            found = client.create_model_version(
                name, model_uri, run_id, tags, description=description, model_id=model_id
            )
            shown = json.dumps([{"name": name, "version": found.version}])
            client.set_logged_model_tags(model_id, {"mlflow.modelVersions": shown})  # the UI's link back to the version
        return _version(client.get_model_version(name, found.version))


def resolve(name: str, stage: str | int) -> Version:
    """The version behind a stage, resolved once.

    Args:
        name: the registered model.
        stage: base, grpo, awq, one of them with `-previous`, Staging, Production, or a version number.

    Raises:
        BadInput: no such stage, model or version; the sentence says which command makes one.
    """
    asked = str(stage)
    stage = _BY_MLFLOW_STAGE.get(asked.capitalize(), asked)
    if stage.removesuffix(_PREVIOUS) not in names.STAGES and not re.fullmatch(r"[1-9][0-9]*", stage):
        hint = " (the base model's stage is `base`)" if asked.lower() == "none" else ""
        raise BadInput(f"There is no stage '{asked}'{hint}: expected one of {', '.join(ADDRESSES)}.")
    client = _client()
    if stage.isdigit():
        by_number = {int(mv.version): mv for mv in _versions(client, name)}
        if int(stage) not in by_number:
            known = (
                ", ".join(map(str, sorted(by_number))) or "none; `mlflow run .` (or `python -m qrl study`) makes them"
            )
            raise BadInput(f"'{name}' has no version {stage}: registered are {known}.")
        return _version(by_number[int(stage)])
    found = _aliased(client, name, stage)
    if found is None:
        raise BadInput(_no_version(client, name, stage))
    return _version(found, stage.removesuffix(_PREVIOUS))


def promote(
    name: str, stage: str, version: int, *, record: Mapping[str, Any], expected: int | object | None = _ANY
) -> Version:
    """Give a stage to a version whose gate let it in; the stage's former version becomes `<stage>-previous`.

    Args:
        name: the registered model.
        stage: base, grpo or awq.
        version: the version number.
        record: why, for the tag `qrl.gate.<stage>`: run, bounds, reasons; whatever JSON holds. The digest is added.
        expected: the version that held the stage when the gate decided (None: none did); where another one holds it by
            now, nothing is moved. Left out, it is not looked at.

    Raises:
        BadInput: unknown stage or version.
        QrlError: the stage moved since the gate decided.
    """
    client = _client()
    with _locked(name):
        target = _target(name, stage, version)
        held = _aliased(client, name, stage)
        held_by = int(held.version) if held else None
        if expected is not _ANY and held_by not in (expected, target.version):
            raise QrlError(
                f"Stage {stage} of '{name}' moved to version {held_by} while version {version} was judged: run promote again."
            )
        _write_gate(client, target, names.gate_tag(stage), "promoted", record)
        if held_by != target.version:
            client.set_registered_model_alias(name, stage, str(target.version))
            if held_by:
                client.set_registered_model_alias(name, stage + _PREVIOUS, str(held_by))
        _mirror(client, name)
    return resolve(name, stage)


def refuse(name: str, stage: str, version: int, *, record: Mapping[str, Any]) -> None:
    """Record why a version was not let in; no pointer moves.

    A version that was promoted to this stage earlier keeps that record, and gets the refusal beside it, in
    `qrl.gate.<stage>.refused`.
    """
    client = _client()
    with _locked(name):
        target = _target(name, stage, version)
        promoted = (target.gate(stage) or {}).get("verdict") == "promoted"
        _write_gate(client, target, names.gate_tag(stage) + (".refused" if promoted else ""), "refused", record)


def rollback(name: str, stage: str) -> Version:
    """Swap a stage with `<stage>-previous`; again, and it swaps back.

    Raises:
        BadInput: the stage had no other version before.
        QrlError: the files of that version are gone or changed; nothing is moved.
    """
    if stage not in names.STAGES:
        raise BadInput(f"There is no stage '{stage}' to roll back: expected one of {', '.join(names.STAGES)}.")
    client = _client()
    with _locked(name):
        now, before = _aliased(client, name, stage), _aliased(client, name, stage + _PREVIOUS)
        if now is None or before is None or int(now.version) == int(before.version):
            raise BadInput(f"Stage {stage} of '{name}' has had no other version, so there is nothing to roll back to.")
        versions.verify(_version(before, stage))  # never onto a version that could not be served
        client.set_registered_model_alias(name, stage, str(before.version))
        client.set_registered_model_alias(name, stage + _PREVIOUS, str(now.version))
        _mirror(client, name)
    return resolve(name, stage)


def _client() -> mlflow.MlflowClient:
    import mlflow

    return mlflow.MlflowClient()


@contextmanager
def _locked(name: str) -> Iterator[None]:
    import mlflow
    from filelock import FileLock

    address = mlflow.get_registry_uri()
    if address.startswith("sqlite:///"):
        path = unquote(address.removeprefix("sqlite:///")) + ".registry.lock"
    else:
        path = str(
            Path(tempfile.gettempdir()) / f"qrl-registry-{sha256(f'{address} {name}'.encode()).hexdigest()[:16]}.lock"
        )
    with FileLock(path, timeout=120, mode=0o666):
        yield


def _make_model(client: mlflow.MlflowClient, name: str) -> None:
    from mlflow import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _versions(client: mlflow.MlflowClient, name: str) -> list[ModelVersion]:
    return list(client.search_model_versions(f"name = '{name}'", max_results=10_000))


def _version(found: ModelVersion, stage: str | None = None) -> Version:
    tags = found.tags
    digest, variant, scheme = (tags.get(key, "") for key in (names.TAG_DIGEST, names.TAG_VARIANT, names.TAG_SCHEME))
    return Version(found.name, int(found.version), digest, variant, names.scheme(scheme), stage=stage, tags=dict(tags))


def _aliased(client: mlflow.MlflowClient, name: str, alias: str) -> ModelVersion | None:
    """The version behind an alias; a search gives no aliases, so each is asked for."""
    from mlflow import MlflowException

    try:
        return client.get_model_version_by_alias(name, alias)
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise


def _target(name: str, stage: str, version: int) -> Version:
    if stage not in names.STAGES:
        raise BadInput(f"There is no stage '{stage}' to promote to: expected one of {', '.join(names.STAGES)}.")
    return resolve(name, version)


def _write_gate(
    client: mlflow.MlflowClient, version: Version, tag: str, verdict: str, record: Mapping[str, Any]
) -> None:
    at = datetime.now(UTC).isoformat(timespec="seconds")
    entry = {**record, "verdict": verdict, "digest": version.digest, "at": at}
    text = json.dumps(entry, default=str, ensure_ascii=False)
    client.set_model_version_tag(version.name, str(version.version), tag, text)


def _mirror(client: mlflow.MlflowClient, name: str) -> None:
    """Bring MLflow's stages in line with the aliases, whatever an earlier process left half done."""
    wanted = {}
    for stage, mirrored in names.MLFLOW_STAGE.items():  # later stages win where one version holds two
        if held := _aliased(client, name, stage):
            wanted[int(held.version)] = mirrored
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        for found in sorted(_versions(client, name), key=lambda mv: int(mv.version) not in wanted):
            stage = wanted.get(int(found.version), "None" if found.current_stage == "None" else "Archived")
            if found.current_stage != stage:
                # Archiving in the same transaction: a reader sees the old version or the new one, never none and never two.
                client.transition_model_version_stage(name, found.version, stage, stage in _BY_MLFLOW_STAGE)


def _exists(found: ModelVersion) -> bool:
    """Whether the version's checkpoint is still in the store; lists, and downloads nothing."""
    from mlflow import MlflowException
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    try:
        listed = get_artifact_repository(_version(found).uri).list_artifacts("model")
    except (MlflowException, OSError):
        return False
    return any(file.path == "model/config.json" for file in listed)


def _no_version(client: mlflow.MlflowClient, name: str, stage: str) -> str:
    if stage.endswith(_PREVIOUS):
        return f"Stage {stage.removesuffix(_PREVIOUS)} of '{name}' has had no other version, so there is no {stage}."
    known = ", ".join(sorted(model.name for model in client.search_registered_models())) or "none"
    return (
        f"Stage {stage} of '{name}' has no version yet (registered models here: {known}): "
        f"`mlflow run .` makes them all, `python -m qrl promote --stage {stage} --cell RUN` this one from an evaluation."
    )
