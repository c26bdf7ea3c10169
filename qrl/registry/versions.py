"""Registered versions: what each one is, what its gates decided, and whether it may be served.

Tags name a version's variant, scheme, digest, accuracy, stderr and n; the model's history holds the decisions on it. A
version may be served if a gate let it in and its files are still those that were judged. The commands of one machine
take turns by a lock on a file of the store (`store.lock_path`).
"""

from __future__ import annotations

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
from qrl.registry.history import History, Record, standing_decision
from qrl.tracking import models, store, store_errors
from qrl.workspace import WORK

WAIT_S = 300  # for the lock of a registered model
_seen: dict[Path, str] = {}  # file of a model → what this machine saw of it, and since when


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
    def of(cls, entry: ModelVersion, history: History, stage: str | None = None) -> Version:
        """Return MLflow's version as ours, with its decisions and the stage that it was resolved from."""
        tags = dict(entry.tags)
        return cls(
            name=entry.name,
            version=int(entry.version),
            digest=tags.get(names.TAG_DIGEST, ""),
            variant=tags.get(names.TAG_VARIANT, ""),
            scheme=names.scheme(tags.get(names.TAG_SCHEME, "")),
            stage=stage,
            tags=tags,
            records=history.gates(int(entry.version)),
        )

    @property
    def uri(self) -> str:
        """The address that MLflow loads."""
        return f"models:/{self.name}/{self.version}"

    @property
    def chat(self) -> dict[str, Any]:
        """The variables that the evaluation gave to the chat template; raises BadInput if the tag is no JSON object."""
        try:
            return dict(reading.parse_json(self.tags.get(names.TAG_CHAT, "{}")))
        except (TypeError, ValueError):
            message = f"The tag {names.TAG_CHAT} of version {self.version} of '{self.name}' is no JSON object"
            raise BadInput(f"{message}: promote its evaluation again, which makes a new version.") from None

    def gate(self, stage: str) -> Record | None:
        """Return the decision on this version for a stage, or None: the last that let it in, else the last."""
        return standing_decision(self.records, stage)

    def gates(self) -> list[Record]:
        """Return the decisions on this version: those of the usual stages first, the others by time."""
        rank = {stage: index for index, stage in enumerate(names.STAGES)}
        stages = {record.stage for record in self.records}
        decisions = [decision for decision in map(self.gate, stages) if decision]
        return sorted(decisions, key=lambda record: (rank.get(record.stage, len(rank)), record.time, record.stage))

    def __str__(self) -> str:
        cell = names.cell_name(self.variant, self.scheme)
        return f"{self.name} version {self.version} ({cell}, digest {self.digest[:12]})"


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold the lock of a registered model; raise QrlError if another command does not end."""
    address = mlflow.get_registry_uri()
    is_local = store.database_of(address) is not None
    path = store.lock_path(address, "registry" if is_local else f"registry-{_key(name)}")
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


def observe_unchanged_s(name: str, state: str) -> float:
    """Note a model's state, and return for how many seconds commands in this folder have seen it in no other.

    The clock is the one that counts from this machine's start: nobody sets it, or compares it with another machine's.
    """
    path = WORK / f"registry-{_key(name)}.seen"
    now = time.monotonic()
    with suppress(OSError):  # the file is for short commands; a process remembers by itself
        _seen.setdefault(path, path.read_text(encoding="utf-8"))
    seen_state, _, since = _seen.get(path, "").partition(" ")
    with suppress(ValueError):
        if seen_state == state and float(since) <= now:
            return now - float(since)
    _seen[path] = f"{state} {now}"
    with suppress(OSError):
        WORK.mkdir(exist_ok=True)
        path.write_text(_seen[path], encoding="utf-8")
    return 0.0


def _key(name: str) -> str:
    return sha256(f"{mlflow.get_registry_uri()} {name}".encode()).hexdigest()[:16]


def versions_of(name: str, condition: str = "", limit: int = 10_000) -> list[ModelVersion]:
    """Return versions of a registered model, as MLflow has them, the newest first.

    Args:
        name: the registered model.
        condition: further ones of MLflow's query language, beginning with ` and`.
        limit: of their number.
    """
    query = f"name = '{name}'{condition}"
    return list(MlflowClient().search_model_versions(query, max_results=limit, order_by=["version_number DESC"]))


def version_of(name: str, number: int) -> ModelVersion | None:
    """Return one version of a registered model, as MLflow has it, or None if it was deleted."""
    return next(iter(versions_of(name, f" and version_number = {number}", 1)), None)


def decided_models() -> list[str]:
    """Return the names of the registered models that have a record of decisions, sorted."""
    client = MlflowClient()
    page = client.search_registered_models()
    models = list(page)
    while page.token:
        page = client.search_registered_models(page_token=page.token)
        models += page
    return sorted(model.name for model in models if names.TAG_HISTORY in model.tags)


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
        denied = store_errors.explain(error)
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
        explained = store_errors.explain(cause)
        if isinstance(explained, BadInput):
            raise explained from None
        raise QrlError(f"The files of {version} cannot be loaded: {first_line(cause)}") from None


def verify(version: Version, public_key: str = "") -> Path:
    """Return the version's checkpoint folder, after `check_gate` and `check_files`: gate, digest and signature."""
    path = check_gate(version)
    check_files(version, path, public_key)
    return path


def check_gate(version: Version) -> Path:
    """Return the version's checkpoint folder after checking its gate; its weights are not read.

    Raises:
        GateRefused: no gate let it in, or the gate judged other weights, or chats rendered otherwise.
        BadInput, QrlError: as `folder`.
    """
    decisions = [record for record in version.gates() if version.stage in (None, record.stage)]
    passed = [record for record in decisions if record.passed]
    if not passed:
        raise _not_admitted(version, decisions)

    on_these_weights = [record for record in passed if record.digest == version.digest]
    if not on_these_weights:
        raise GateRefused(
            f"The gate of {version} judged other weights, digest {passed[0].digest[:12]}: promote it again."
        )
    # Weights alone make no cell: the same ones may answer in another chat format, or with another key-value cache.
    judged = on_these_weights[0].bounds
    if "chat" in judged:
        has_same_chat = version.tags.get(names.TAG_CHAT, "{}") == judged["chat"]
        has_same_cache = version.scheme.endswith(names.KV_FP8) == judged["cell"].endswith(names.KV_FP8)
        if not (has_same_chat and has_same_cache):
            raise GateRefused(
                f"The tags {names.TAG_CHAT} or {names.TAG_SCHEME} of {version} are not what its gate judged: promote "
                "its evaluation again."
            )
    return folder(version)


def _not_admitted(version: Version, decisions: list[Record]) -> GateRefused:
    """Return the error of a version that no gate let in; `decisions` are the refusals."""
    stage = version.stage or names.STAGES[0]
    reason = ""
    if decisions:
        stage = decisions[0].stage
        reason = " ".join(decisions[0].reasons).rstrip(".") or "it was refused"
    parenthesis = f" ({reason})" if reason else ""
    return GateRefused(
        f"No gate let {version} in{parenthesis}: `python -m qrl promote --stage {stage} --cell RUN` decides on it."
    )


def check_files(version: Version, path: Path, public_key: str = "") -> None:
    """Read all files of a version, and check its signature if one is required, or was when it was promoted.

    Args:
        version: as resolved.
        path: its folder, from `check_gate`.
        public_key: the key or certificate that must have signed it, from `signing.load_public_key`.

    Raises:
        GateRefused: it has no such signature.
        BadInput: its folder holds code, or weights that could run code, or its config.json leads to other weights.
        QrlError: its files have changed since the evaluation.
    """
    checkpoint.refuse_code(path)
    checkpoint.config(path)
    digest = checkpoint.digest(path)
    if digest != version.digest:
        raise QrlError(
            f"The files of {version} have changed, their digest is {digest[:12]} now: run the study again, which makes "
            "a new version."
        )
    signers = [record.bounds["signer"] for record in version.records if record.passed and "signer" in record.bounds]
    required_key = public_key or (signers[-1] if signers else "")
    if required_key:
        signing.verify(str(version), version.uri, path, required_key)
