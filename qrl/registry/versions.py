"""Registered versions: what each one is, what its gates decided, and whether it may be served.

Tags name a version's variant, scheme, digest, accuracy, stderr and n. `qrl.gate.<stage>` is `passed` or `refused`, and
`qrl.gate.<stage>.record` says why, for the weights with the version's digest. A version may be served if a gate let it
in and its files are still those that were judged. Pointers to versions change under a lock: a file beside the database,
or, for a remote registry, in the temporary folder, where it only holds off the processes of this machine.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import mlflow
from filelock import FileLock
from mlflow import MlflowClient, MlflowException
from mlflow.entities.model_registry import ModelVersion

from qrl import checkpoint, names
from qrl.errors import GateRefused, QrlError, first_line
from qrl.tracking import models, store

PASSED, REFUSED = "passed", "refused"


@dataclass(frozen=True)
class Record:
    """A gate's recorded decision."""

    stage: str
    passed: bool
    run: str  # of the evaluation that was judged
    digest: str  # of the weights that were judged
    reasons: tuple[str, ...]
    bounds: Mapping[str, Any]  # the numbers and digests that were compared
    time: str  # ISO 8601, UTC
    study: str = ""  # run of the study or sweep that promoted it; empty for a promotion by hand

    @classmethod
    def read(cls, stage: str, verdict: str, entry: Mapping[str, Any]) -> Record:
        """Return a record from its JSON, in the present form or the one of stores before it (`cell`, `why`, `at`)."""
        return cls(
            stage,
            passed=verdict in (PASSED, "promoted"),
            run=entry.get("run") or entry.get("cell", ""),
            digest=entry.get("digest", ""),
            reasons=tuple(entry.get("reasons") or filter(None, [entry.get("why")])),
            bounds=entry.get("bounds") or entry.get("facts", {}),
            time=entry.get("time") or entry.get("at", ""),
            study=entry.get("study", ""),
        )


@dataclass(frozen=True)
class Version:
    """One registered version, and the stage that it was resolved from (None: by number)."""

    name: str
    version: int
    digest: str
    variant: str
    scheme: str
    stage: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, entry: ModelVersion, stage: str | None = None) -> Version:
        """Return MLflow's version as ours, with the stage that it was resolved from."""
        tags = dict(entry.tags)
        digest, variant, scheme = (tags.get(key, "") for key in (names.TAG_DIGEST, names.TAG_VARIANT, names.TAG_SCHEME))
        return cls(entry.name, int(entry.version), digest, variant, names.scheme(scheme), stage=stage, tags=tags)

    @property
    def uri(self) -> str:
        """The address that MLflow loads."""
        return f"models:/{self.name}/{self.version}"

    @property
    def chat(self) -> dict[str, Any]:
        """The variables that the evaluation gave to the chat template."""
        return json.loads(self.tags.get(names.TAG_CHAT, "{}"))

    def gate(self, stage: str) -> Record | None:
        """Return the recorded decision on this version for a stage, or None without one."""
        verdict = self.tags.get(names.gate_tag(stage))
        if verdict in (PASSED, REFUSED):
            return Record.read(stage, verdict, json.loads(self.tags.get(names.gate_record_tag(stage), "{}")))
        if verdict is None:
            return None
        entry = json.loads(verdict)  # a version of an earlier store holds the record in the tag itself
        return Record.read(stage, entry.get("verdict", REFUSED), entry)

    def gates(self) -> list[Record]:
        """Return the decisions on this version: those of the usual stages first, the others by time."""
        judged = [stage for tag in self.tags if (stage := names.judged_stage(tag))]
        records = [record for stage in judged if (record := self.gate(stage))]
        usual = {stage: place for place, stage in enumerate(names.STAGES)}
        return sorted(records, key=lambda each: (usual.get(each.stage, len(usual)), each.time, each.stage))

    def __str__(self) -> str:
        cell = names.cell_name(self.variant, self.scheme)
        return f"{self.name} version {self.version} ({cell}, digest {self.digest[:12]})"


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold the lock of a registered model."""
    address = mlflow.get_registry_uri()
    key = sha256(f"{address} {name}".encode()).hexdigest()[:16]
    database = store.database_of(address)
    path = f"{database}.registry.lock" if database else Path(tempfile.gettempdir()) / f"qrl-registry-{key}.lock"
    with FileLock(path, timeout=120, mode=0o666):
        yield


def versions_of(name: str) -> list[ModelVersion]:
    """Return all versions of a registered model, as MLflow has them."""
    return list(MlflowClient().search_model_versions(f"name = '{name}'", max_results=10_000))


def aliased(name: str, alias: str) -> ModelVersion | None:
    """Return the version behind an alias, or None; a search gives no aliases, so each has a request of its own."""
    try:
        return MlflowClient().get_model_version_by_alias(name, alias)
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise store.sentence(error) or error from None


def folder(version: Version) -> Path:
    """Return the version's checkpoint folder, in place if the store is local; raise QrlError if its files are gone."""
    try:
        return models.local_path(version.uri, version.digest)
    except (QrlError, MlflowException, OSError) as error:
        reason = first_line(error).rstrip(".")
        raise QrlError(f"The files of {version} are gone, or not as they were logged ({reason}).") from None


def verify(version: Version) -> Path:
    """Return the version's checkpoint folder after checking gate and digest; raises as `admit` and `whole` do."""
    whole(version, path := admit(version))
    return path


def admit(version: Version) -> Path:
    """Return the version's checkpoint folder after checking its gate; its weights are not read.

    Raises:
        GateRefused: no gate let it in, or the gate judged other weights.
        QrlError: the files are gone.
    """
    records = [record for record in version.gates() if version.stage in (None, record.stage)]
    passed = [record for record in records if record.passed]
    if not passed:
        stage = records[0].stage if records else version.stage or names.STAGES[0]
        why = " ".join(records[0].reasons).rstrip(".") or "it was refused" if records else ""
        raise GateRefused(
            f"No gate let {version} in{f' ({why})' if why else ''}: `python -m qrl promote --stage {stage} --cell RUN` "
            "decides on it."
        )
    if version.digest not in [record.digest for record in passed]:
        raise GateRefused(
            f"The gate of {version} judged other weights, digest {passed[0].digest[:12]}: promote it again."
        )
    return folder(version)


def whole(version: Version, path: Path) -> None:
    """Read all files of a version, from `admit`; raise QrlError if they have changed since the evaluation."""
    if (digest := checkpoint.digest(path)) != version.digest:
        raise QrlError(
            f"The files of {version} have changed, their digest is {digest[:12]} now: run the study again, which makes "
            "a new version."
        )
