"""The record of a registered model: every decision on its stages, append-only and hash-chained.

It is a run of MLflow's with one parameter a decision, `000017`. The record is the truth: aliases, MLflow's stages and
tags are derived from it (`registry.pointers`). MLflow writes a parameter once, since run and key are its primary key on
SQLite and PostgreSQL: of several writers, on whatever hosts, one gets the next number, and no request changes or
deletes what is there. Each decision holds the sha256 of the one before it, so a change in the database is noticed too.
"""

import getpass
import json
import os
import socket
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property, lru_cache
from hashlib import sha256
from typing import Any

from mlflow import MlflowException
from mlflow.entities import Run
from mlflow.entities.model_registry import RegisteredModel

from qrl import names
from qrl.errors import QrlError
from qrl.files import reading
from qrl.recipe.stages import DEFAULT, Stage
from qrl.registry.client import MlflowClient
from qrl.tracking import contents, signals, store

PROMOTE, REFUSE, ROLLBACK, MEND, ADOPT = "promote", "refuse", "rollback", "mend", "adopt"
PREVIOUS = "-previous"
USUAL = {stage.stage: stage for stage in DEFAULT}  # of every model, as soon as one is promoted
MIRRORED = ("Staging", "Production")
SHOWN_BY = {stage.mlflow: stage.stage for stage in DEFAULT if stage.mlflow in MIRRORED}  # unless a recipe says more
_PIECE = 5500  # characters; MLflow cuts a parameter at 6,000


@lru_cache(maxsize=1000)  # a record declares the same few stages at each decision
def _stage(text: str) -> Stage:
    return Stage.model_validate(text)


@dataclass(frozen=True)
class Record:
    """A decision: of a gate, of a rollback, or to put back what was changed by hand."""

    action: str  # promote, refuse, rollback, mend or adopt
    stage: str = ""
    version: int = 0
    run: str = ""  # of the evaluation that was judged
    digest: str = ""  # of the weights that were judged
    reasons: tuple[str, ...] = ()
    bounds: Mapping[str, Any] = field(default_factory=dict)  # the numbers and digests that were compared
    study: str = ""  # run of the study or sweep that promoted it; empty for a decision by hand
    declared: str = ""  # the stage as its recipe declares it
    adopted: Mapping[str, Any] = field(default_factory=dict)  # of an older store: `State`'s fields, and `gates`
    number: int = 0
    time: str = ""  # ISO 8601, UTC
    by: str = ""  # user@host
    owner: str = ""  # the process that carries it out
    previous: str = ""  # sha256 of the decision before

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> "Record":
        """Return a decision from what JSON made of its fields; raise TypeError or ValueError if one does not fit."""
        made, usual = cls(**{**entry, "reasons": tuple(entry.get("reasons", ()))}), cls("")
        if wrong := [name for name, value in vars(usual).items() if type(getattr(made, name)) is not type(value)]:
            raise TypeError(f"{wrong[0]} has another type")
        if not all(isinstance(reason, str) for reason in made.reasons):
            raise TypeError("a reason is no text")
        for text in (*filter(None, [made.declared]), *State.adopted(made.adopted).declared.values()):
            _stage(text)
        return made

    @property
    def passed(self) -> bool:
        """Whether a gate let the version in."""
        return self.action == PROMOTE


@dataclass(frozen=True)
class State:
    """Where the stages are after a decision."""

    at: dict[str, int] = field(default_factory=dict)  # stage → the version that holds it
    before: dict[str, int] = field(default_factory=dict)  # stage → the version that a rollback returns to
    declared: dict[str, str] = field(default_factory=dict)  # stage → the stage as its recipe declares it
    mirrors: dict[str, str] = field(default_factory=dict)  # MLflow's stage → the stage of ours that it shows

    @classmethod
    def adopted(cls, fields: Mapping[str, Any]) -> "State":
        """Return the state that was taken over from an older store; raise TypeError or ValueError if it is none."""
        state = cls(**{key: value for key, value in fields.items() if key != "gates"})
        for gate in fields.get("gates", ()):
            Record.of(gate)
        for held, kind in zip(vars(state).values(), (int, int, str, str), strict=True):
            if type(held) is not dict or not all(type(value) is kind for value in held.values()):
                raise TypeError("a stage is no text or a version no number")
        return state

    @property
    def stages(self) -> dict[str, Stage]:
        """The model's stages by name."""
        return {stage: _stage(text) for stage, text in self.declared.items()}

    def behind(self, address: str) -> str:
        """Return the stage of ours that Staging or Production shows, written in any case; any other is itself."""
        mirrored = address.capitalize()
        return self.mirrors.get(mirrored, SHOWN_BY[mirrored]) if mirrored in MIRRORED else address

    def aliases(self) -> dict[str, int]:
        """Return the aliases that show this state."""
        return self.at | {stage + PREVIOUS: version for stage, version in self.before.items()}

    def shown(self) -> dict[int, str]:
        """Return version → MLflow's stage; if one version holds both, Production counts."""
        held = {mirrored: self.at.get(self.mirrors.get(mirrored, "")) for mirrored in MIRRORED}
        return {version: mirrored for mirrored, version in held.items() if version}

    def after(self, record: Record) -> "State":
        """Return the state after one more decision."""
        stage, version, former = record.stage, record.version, self.at.get(record.stage)
        if record.action == ADOPT:
            return State.adopted(record.adopted)
        if record.action not in (PROMOTE, ROLLBACK):
            return self
        declared, mirrors = self.declared, self.mirrors
        if record.declared:
            declared = declared | {stage: record.declared}
            mirrored = _stage(record.declared).mlflow
            mirrors = mirrors | ({mirrored: stage} if mirrored in MIRRORED else {})
        before = self.before | ({stage: former} if former not in (None, version) else {})
        return State(self.at | {stage: version}, before, declared, mirrors)


@dataclass(frozen=True)
class History:
    """The decisions on a registered model, in order."""

    name: str
    run_id: str = ""  # that holds them; empty before the first
    records: tuple[Record, ...] = ()
    chain: str = ""  # sha256 of the last one
    applied: int = 0  # the last decision that pointers are known to show
    deleted: bool = False  # the run was deleted, but can be restored

    @cached_property
    def state(self) -> State:
        """Where the stages are now."""
        return self.until("9999")

    @property
    def is_pending(self) -> bool:
        """Whether the last decision may not have reached the pointers yet."""
        return self.applied < len(self.records)

    def until(self, time: str) -> State:
        """Return where the stages were at a time, ISO 8601 in UTC."""
        state = State()
        for record in self.records:
            if record.time <= time:
                state = state.after(record)
        return state

    def gates(self, version: int | None = None) -> tuple[Record, ...]:
        """Return the decisions of gates on a version, or on all, those of an older store first."""
        former = [Record.of(entry) for record in self.records for entry in record.adopted.get("gates", ())]
        judged = [*former, *(record for record in self.records if record.action in (PROMOTE, REFUSE))]
        return tuple(record for record in judged if version in (None, record.version))


def read(name: str, model: RegisteredModel | None) -> History:
    """Return the history of a registered model, its chain checked.

    A parameter of the first version's run names the run that holds it, since nobody can edit that; else the tag does.

    Args:
        name: the registered model.
        model: as MLflow has it, read before the history: then what it shows is never newer.

    Raises:
        QrlError: the record is gone, or a decision was changed or removed.
    """
    if model is None:
        return History(name)
    tag = model.tags.get(names.TAG_HISTORY, "")
    try:
        first = MlflowClient().search_model_versions(f"name = '{name}'", 1, ["version_number ASC"])
        known = named(run_of(first[0].run_id) if first else None, name)
        run = next(filter(None, map(run_of, (*known, tag))), None)
    except MlflowException as error:
        raise store.sentence(error) or error from None
    if run is None:
        if not tag:
            return History(name)
        raise QrlError(
            f"The record of decisions on '{name}', run {tag[:40]}, is gone: restore the database from a backup, or "
            f"delete the model's tag {names.TAG_HISTORY}; the next command then begins a new record from its tags."
        )
    run_id, params, records, chain = run.info.run_id, run.data.params, [], ""
    while first := params.get(f"{len(records) + 1:06}"):
        try:
            record, digest = _decision(_whole(first, params))
        except (KeyError, TypeError, ValueError):
            record, digest = Record("", previous="unreadable"), ""
        if (record.previous, record.number) != (chain, len(records) + 1):
            raise QrlError(
                f"The record of decisions on '{name}', run {run_id}, was changed: decision {len(records) + 1} does not "
                "follow from the one before it. Restore the database from a backup."
            )
        records.append(record)
        chain = digest
    applied = model.tags.get(names.TAG_APPLIED, "0")
    applied = int(applied[:18]) if applied.isdecimal() else 0
    if applied > len(records):
        raise QrlError(
            f"The record of decisions on '{name}', run {run_id}, ends at {len(records)}, but {applied} were carried "
            f"out: restore the database from a backup, or set the model's tag {names.TAG_APPLIED} to {len(records)} if "
            "somebody changed it."
        )
    return History(name, run_id, tuple(records), chain, applied, run.info.lifecycle_stage == "deleted")


def run_of(run_id: str | None) -> Run | None:
    """Return a run, deleted ones included, or None if there is none."""
    try:
        return MlflowClient().get_run(run_id) if run_id else None
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise
        return None


def named(maker: Run | None, name: str) -> list[str]:
    """Return the runs that a version's maker names as the record of a model; the first that is there holds it."""
    params = sorted(maker.data.params.items()) if maker else []
    return [value for key, value in params if key.startswith(naming(name))]


def naming(name: str) -> str:
    """Return the parameter that names the record of a model; further ones have a number behind."""
    return f"{names.TAG_HISTORY}.{sha256(name.encode()).hexdigest()[:16]}"


def claim(past: History, record: Mapping[str, Any]) -> History | None:
    """Write a decision as the next one; return the history with it, or None if another writer has that number."""
    number, client = len(past.records) + 1, MlflowClient()
    now = datetime.now(UTC).isoformat(timespec="seconds")
    latest = past.records[-1].time if past.records else ""
    user = os.environ.get("MLFLOW_TRACKING_USERNAME") or getpass.getuser()
    given = {"number": number, "time": max(now, latest), "by": f"{user}@{socket.gethostname()}"}  # clocks go backwards
    given |= {"owner": signals.identity(), "previous": past.chain}
    text = json.dumps(vars(Record(**record, **given)), default=str, ensure_ascii=False)
    nonce, pieces = uuid.uuid4().hex[:16], [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]
    for place, piece in enumerate(pieces[1:], 1):
        client.log_param(past.run_id, f"{nonce}.{place}", piece)
    key, value = f"{number:06}", f"{nonce} {len(pieces)} {pieces[0]}"
    failure = None
    try:
        client.log_param(past.run_id, key, value)
    except MlflowException as error:  # taken, or an answer that got lost
        failure = error
    there = contents.run(past.run_id).data.params.get(key)
    if there is None and failure:
        raise failure
    if there != value:
        return None
    chain = sha256(text.encode()).hexdigest()
    return History(past.name, past.run_id, (*past.records, Record.of(json.loads(text))), chain, past.applied)


@lru_cache(maxsize=20_000)  # a command reads the record several times, and a decision never changes
def _decision(text: str) -> tuple[Record, str]:
    """Return a decision from its text, and the text's sha256."""
    return Record.of(reading.parsed(text)), sha256(text.encode()).hexdigest()


def _whole(first: str, params: Mapping[str, str]) -> str:
    """Return a decision's text from its parameter and those that continue it."""
    nonce, count, text = first.split(" ", 2)
    return "".join([text, *(params[f"{nonce}.{place}"] for place in range(1, int(count)))])


def best(records: Sequence[Record], stage: str) -> Record | None:
    """Return the newest decision for a stage that let its version in, else the newest."""
    own = [record for record in records if record.stage == stage]
    return next((record for record in reversed(own) if record.passed), own[-1] if own else None)
