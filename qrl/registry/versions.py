"""Registered versions: what each one is, what its gates decided, and whether it may be served.

Tags name a version's variant, scheme, digest, accuracy, stderr and n; the model's history holds the decisions on it. A
version may be served if a gate let it in and its files are still those that were judged. The commands of one machine
take turns by a lock: a file beside the database, or in the temporary folder if the registry is remote.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import mlflow
from filelock import FileLock, Timeout
from mlflow import MlflowException
from mlflow.entities.model_registry import ModelVersion, RegisteredModel

from qrl import checkpoint, names
from qrl.errors import BadInput, GateRefused, QrlError, first_line
from qrl.files import reading
from qrl.registry import signing
from qrl.registry.client import MlflowClient
from qrl.registry.history import History, Record, best
from qrl.tracking import models, store
from qrl.workspace import WORK

WAIT_S = 300  # for the lock of a registered model
_seen: dict[Path, str] = {}


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
    records: tuple[Record, ...] = field(default=(), compare=False)  # the decisions of gates on it

    @classmethod
    def of(cls, entry: ModelVersion, past: History, stage: str | None = None) -> Version:
        """Return MLflow's version as ours, with its decisions and the stage that it was resolved from."""
        tags, number = dict(entry.tags), int(entry.version)
        digest, variant, scheme = (tags.get(key, "") for key in (names.TAG_DIGEST, names.TAG_VARIANT, names.TAG_SCHEME))
        return cls(entry.name, number, digest, variant, names.scheme(scheme), stage, tags, past.gates(number))

    @property
    def uri(self) -> str:
        """The address that MLflow loads."""
        return f"models:/{self.name}/{self.version}"

    @property
    def chat(self) -> dict[str, Any]:
        """The variables that the evaluation gave to the chat template; raises BadInput if the tag is no JSON object."""
        try:
            return dict(reading.parsed(self.tags.get(names.TAG_CHAT, "{}")))
        except (TypeError, ValueError):
            wrong = f"The tag {names.TAG_CHAT} of version {self.version} of '{self.name}' is no JSON object"
            raise BadInput(f"{wrong}: promote its evaluation again, which makes a new version.") from None

    def gate(self, stage: str) -> Record | None:
        """Return the decision on this version for a stage, or None: the last that let it in, else the last."""
        return best(self.records, stage)

    def gates(self) -> list[Record]:
        """Return the decisions on this version: those of the usual stages first, the others by time."""
        records = [record for stage in {each.stage for each in self.records} if (record := self.gate(stage))]
        usual = {stage: place for place, stage in enumerate(names.STAGES)}
        return sorted(records, key=lambda each: (usual.get(each.stage, len(usual)), each.time, each.stage))

    def __str__(self) -> str:
        cell = names.cell_name(self.variant, self.scheme)
        return f"{self.name} version {self.version} ({cell}, digest {self.digest[:12]})"


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold the lock of a registered model; raise QrlError if another command does not end."""
    address = mlflow.get_registry_uri()
    database = store.database_of(address)
    path = f"{database}.registry.lock" if database else Path(tempfile.gettempdir()) / f"qrl-registry-{_key(name)}.lock"
    lock = FileLock(path, timeout=WAIT_S, mode=0o666)
    try:
        lock.acquire()
    except Timeout:
        raise QrlError(
            f"Other commands have held the registry's lock {path} for {WAIT_S} s: wait for them, or end them."
        ) from None
    try:
        yield
    finally:
        lock.release()


def unchanged_s(name: str, what: str) -> float:
    """Return for how many seconds commands in this folder have seen `what` of a model, and nothing else.

    The clock is the one that counts from this machine's start: nobody sets it, or compares it with another machine's.
    """
    path, now = WORK / f"registry-{_key(name)}.seen", time.monotonic()
    with suppress(OSError):  # the file is for short commands; a process remembers by itself
        _seen.setdefault(path, path.read_text(encoding="utf-8"))
    former, _, since = _seen.get(path, "").partition(" ")
    with suppress(ValueError):
        if former == what and float(since) <= now:
            return now - float(since)
    _seen[path] = f"{what} {now}"
    with suppress(OSError):
        WORK.mkdir(exist_ok=True)
        path.write_text(_seen[path], encoding="utf-8")
    return 0.0


def _key(name: str) -> str:
    return sha256(f"{mlflow.get_registry_uri()} {name}".encode()).hexdigest()[:16]


def versions_of(name: str, more: str = "", most: int = 10_000) -> list[ModelVersion]:
    """Return the versions of a registered model, as MLflow has them: all, or the newest `most` that `more` asks for."""
    query, order = f"name = '{name}'{more}", ["version_number DESC"]
    return list(MlflowClient().search_model_versions(query, max_results=most, order_by=order))


def version_of(name: str, number: int) -> ModelVersion | None:
    """Return one version of a registered model, as MLflow has it, or None if it was deleted."""
    return next(iter(versions_of(name, f" and version_number = {number}", 1)), None)


def model_of(name: str, *, make: bool = False) -> RegisteredModel | None:
    """Return a registered model as MLflow has it, with its tags and aliases; None if there is none of this name.

    With `make`, a model that a server denies is made if it can be: a server that gives no right by default denies what
    does not exist, too, and only whoever makes a model has rights on it.
    """
    try:
        return MlflowClient().get_registered_model(name)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        denied = store.sentence(error)
        if make and denied:
            with suppress(MlflowException):
                return MlflowClient().create_registered_model(name)
        raise denied or error from None


def folder(version: Version) -> Path:
    """Return the version's checkpoint folder, in place if the store is local.

    Raises:
        BadInput: this user may not read it, or this machine's disk is full.
        QrlError: its files are gone, or not as they were logged.
    """
    try:
        return models.local_path(version.uri, version.digest)
    except (QrlError, MlflowException, OSError) as error:
        cause = (error.__context__ if isinstance(error, QrlError) else None) or error
        if isinstance(known := store.sentence(cause), BadInput):
            raise known from None
        raise QrlError(f"The files of {version} cannot be loaded: {first_line(cause)}") from None


def verify(version: Version, public: str = "") -> Path:
    """Return the version's checkpoint folder after checking gate, digest and signature, as `admit` and `whole` do."""
    whole(version, path := admit(version), public)
    return path


def admit(version: Version) -> Path:
    """Return the version's checkpoint folder after checking its gate; its weights are not read.

    Raises:
        GateRefused: no gate let it in, or the gate judged other weights, or chats rendered otherwise.
        BadInput, QrlError: as `folder`.
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
    judged = next((record.bounds for record in passed if record.digest == version.digest), None)
    if judged is None:
        raise GateRefused(
            f"The gate of {version} judged other weights, digest {passed[0].digest[:12]}: promote it again."
        )
    tags = {"chat": version.tags.get(names.TAG_CHAT, "{}"), "kv": version.scheme.endswith(names.KV_FP8)}
    if "chat" in judged and tags != {"chat": judged["chat"], "kv": judged["cell"].endswith(names.KV_FP8)}:
        raise GateRefused(
            f"The tags {names.TAG_CHAT} or {names.TAG_SCHEME} of {version} are not what its gate judged: promote its "
            "evaluation again."
        )
    return folder(version)


def whole(version: Version, path: Path, public: str = "") -> None:
    """Read all files of a version, and check its signature if one is required, or was when it was promoted.

    Args:
        version: as resolved.
        path: its folder, from `admit`.
        public: the key or certificate that must have signed it, from `signing.trusted`.

    Raises:
        GateRefused: it has no such signature.
        BadInput: code, or weights that could run code, lie beside its files, or its config.json leads to other weights.
        QrlError: its files have changed since the evaluation.
    """
    checkpoint.refuse_code(path)
    checkpoint.config(path)
    if (digest := checkpoint.digest(path)) != version.digest:
        raise QrlError(
            f"The files of {version} have changed, their digest is {digest[:12]} now: run the study again, which makes "
            "a new version."
        )
    recorded = [record.bounds["signer"] for record in version.records if record.passed and "signer" in record.bounds]
    if public or recorded:
        signing.verify(version, path, public or recorded[-1])
