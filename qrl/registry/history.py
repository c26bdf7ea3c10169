"""The record of a registered model: every decision on its stages, append-only and hash-chained.

It is a run of MLflow's with one parameter a decision, `000017`. The record is the truth: aliases, MLflow's stages and
tags are derived from it (`registry.pointers`). MLflow writes a parameter once, since run and key are its primary key on
SQLite and PostgreSQL: of several writers, on whatever hosts, one gets the next number, and no request changes or
deletes what is there. Each decision holds the sha256 of the one before it, so a change in the database is noticed too.

A decision may be longer than a parameter. Its first piece is the value of `000017`, and names the parameters of the
others by a random word. They are written first, so that a decision is whole as soon as its number exists.
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
from qrl.tracking import contents, owners, store_errors

PROMOTE, REFUSE, ROLLBACK, MEND, ADOPT = "promote", "refuse", "rollback", "mend", "adopt"
PREVIOUS = "-previous"
USUAL = {stage.stage: stage for stage in DEFAULT}  # of every model, as soon as one is promoted
MIRRORED = ("Staging", "Production")
SHOWN_BY = {stage.mlflow: stage.stage for stage in DEFAULT if stage.mlflow in MIRRORED}  # unless a recipe says more
_PIECE_LENGTH = 5500  # characters; MLflow cuts a parameter at 6,000
_MAX_NUMBER_DIGITS = 18  # of the last decision carried out, in a tag that anybody may have edited


@lru_cache(maxsize=1000)  # a record declares the same few stages at each decision
def _parse_stage(text: str) -> Stage:
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
    adopted: Mapping[str, Any] = field(default_factory=dict)  # at the begin of a record: `State`'s fields, and `gates`
    number: int = 0
    time: str = ""  # ISO 8601, UTC
    by: str = ""  # user@host
    owner: str = ""  # the process that carries it out
    previous: str = ""  # sha256 of the decision before

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> "Record":
        """Return a decision from what JSON made of its fields; raise TypeError or ValueError if one does not fit."""
        record = cls(**{**entry, "reasons": tuple(entry.get("reasons", ()))})
        for name, default in vars(cls("")).items():
            if type(getattr(record, name)) is not type(default):
                raise TypeError(f"{name} has another type")
        if not all(isinstance(reason, str) for reason in record.reasons):
            raise TypeError("a reason is no text")

        declared_stages = [*State.adopted(record.adopted).declared.values()]
        if record.declared:
            declared_stages.append(record.declared)
        for text in declared_stages:
            _parse_stage(text)
        return record

    @property
    def passed(self) -> bool:
        """Whether a gate let the version in."""
        return self.action == PROMOTE


@dataclass(frozen=True)
class State:
    """Where the stages are after a decision. Records hold the fields by these names."""

    at: dict[str, int] = field(default_factory=dict)  # stage → the version that holds it
    before: dict[str, int] = field(default_factory=dict)  # stage → the version that a rollback returns to
    declared: dict[str, str] = field(default_factory=dict)  # stage → the stage as its recipe declares it
    mirrors: dict[str, str] = field(default_factory=dict)  # MLflow's stage → the stage of ours that it shows

    @classmethod
    def adopted(cls, fields: Mapping[str, Any]) -> "State":
        """Return the state with which a record began; raise TypeError or ValueError if the fields are no state."""
        state = cls(**{key: value for key, value in fields.items() if key != "gates"})
        for gate in fields.get("gates", ()):
            Record.of(gate)
        for mapping, value_type in ((state.at, int), (state.before, int), (state.declared, str), (state.mirrors, str)):
            if type(mapping) is not dict or not all(type(value) is value_type for value in mapping.values()):
                raise TypeError("a stage is no text or a version no number")
        return state

    @property
    def stages(self) -> dict[str, Stage]:
        """The model's stages by name."""
        return {stage: _parse_stage(text) for stage, text in self.declared.items()}

    def behind(self, address: str) -> str:
        """Return the stage of ours that Staging or Production shows, written in any case; any other is itself."""
        mirrored = address.capitalize()
        if mirrored not in MIRRORED:
            return address
        return self.mirrors.get(mirrored, SHOWN_BY[mirrored])

    def aliases(self) -> dict[str, int]:
        """Return the aliases that show this state."""
        previous = {stage + PREVIOUS: version for stage, version in self.before.items()}
        return self.at | previous

    def shown(self) -> dict[int, str]:
        """Return version → MLflow's stage; if one version holds both, Production counts."""
        shown = {}
        for mirrored in MIRRORED:
            version = self.at.get(self.mirrors.get(mirrored, ""))
            if version:
                shown[version] = mirrored
        return shown

    def after(self, record: Record) -> "State":
        """Return the state after one more decision."""
        if record.action == ADOPT:
            return State.adopted(record.adopted)
        if record.action not in (PROMOTE, ROLLBACK):
            return self

        stage = record.stage
        declared = self.declared
        mirrors = self.mirrors
        if record.declared:
            declared = declared | {stage: record.declared}
            mirrored = _parse_stage(record.declared).mlflow
            if mirrored in MIRRORED:
                mirrors = mirrors | {mirrored: stage}

        before = self.before
        replaced = self.at.get(stage)
        if replaced not in (None, record.version):
            before = before | {stage: replaced}
        return State(self.at | {stage: record.version}, before, declared, mirrors)


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
        """Return the decisions of gates on a version, or on all, those from before the record first."""
        gates = []
        for record in self.records:
            gates += [Record.of(entry) for entry in record.adopted.get("gates", ())]
        gates += [record for record in self.records if record.action in (PROMOTE, REFUSE)]
        return tuple(record for record in gates if version in (None, record.version))


def read_history(name: str, model: RegisteredModel | None) -> History:
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
    run = _find_record(name, model)
    if run is None:
        return History(name)
    records, chain = _read_chain(name, run)
    applied = _applied(model)
    if applied > len(records):
        raise QrlError(
            f"The record of decisions on '{name}', run {run.info.run_id}, ends at {len(records)}, but {applied} were "
            f"carried out: restore the database from a backup, or set the model's tag {names.TAG_APPLIED} to "
            f"{len(records)} if somebody changed it."
        )
    is_deleted = run.info.lifecycle_stage == "deleted"
    return History(name, run.info.run_id, tuple(records), chain, applied, is_deleted)


def _find_record(name: str, model: RegisteredModel) -> Run | None:
    """Return the run that holds a model's record; None if there is none yet.

    Raises:
        QrlError: the model's tag names one that is gone.
    """
    tag = model.tags.get(names.TAG_HISTORY, "")
    try:
        oldest = MlflowClient().search_model_versions(f"name = '{name}'", 1, ["version_number ASC"])
        maker = find_run(oldest[0].run_id) if oldest else None
        for run_id in (*record_runs(maker, name), tag):
            run = find_run(run_id)
            if run:
                return run
    except MlflowException as error:
        raise store_errors.explain(error) or error from None
    if tag:
        raise QrlError(
            f"The record of decisions on '{name}', run {tag[:40]}, is gone: restore the database from a backup, or "
            f"delete the model's tag {names.TAG_HISTORY}; the next command then begins a new record from its tags."
        )
    return None


def _read_chain(name: str, run: Run) -> tuple[list[Record], str]:
    """Return the decisions that a run holds, and the sha256 of the last one.

    Raises:
        QrlError: one does not follow from the one before it.
    """
    params = run.data.params
    records: list[Record] = []
    chain = ""
    while True:
        number = len(records) + 1
        first_piece = params.get(f"{number:06}")
        if not first_piece:
            return records, chain
        try:
            record, digest = _parse_decision(_join(first_piece, params))
            follows = (record.previous, record.number) == (chain, number)
        except (KeyError, TypeError, ValueError):
            follows = False
        if not follows:
            raise QrlError(
                f"The record of decisions on '{name}', run {run.info.run_id}, was changed: decision {number} does not "
                "follow from the one before it. Restore the database from a backup."
            )
        records.append(record)
        chain = digest


def _applied(model: RegisteredModel) -> int:
    """Return the number of the last decision that was carried out, as the model's tag says; 0 if it says nothing."""
    tag = model.tags.get(names.TAG_APPLIED, "0")
    return int(tag[:_MAX_NUMBER_DIGITS]) if tag.isdecimal() else 0


def find_run(run_id: str | None) -> Run | None:
    """Return a run, deleted ones included, or None if there is none."""
    if not run_id:
        return None
    try:
        return MlflowClient().get_run(run_id)
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise
        return None


def record_runs(maker: Run | None, name: str) -> list[str]:
    """Return the runs that a version's maker names as the record of a model; the first that is there holds it."""
    if maker is None:
        return []
    prefix = record_param(name)
    return [value for key, value in sorted(maker.data.params.items()) if key.startswith(prefix)]


def record_param(name: str) -> str:
    """Return the parameter that names the record of a model; further ones end with a number."""
    return f"{names.TAG_HISTORY}.{sha256(name.encode()).hexdigest()[:16]}"


def claim_next(history: History, decision: Mapping[str, Any]) -> History | None:
    """Write a decision as the next one; return the history with it, or None if another writer has that number.

    Args:
        history: as it was just read.
        decision: fields of a `Record`; number, time, user, process and chain are added.
    """
    number = len(history.records) + 1
    text = json.dumps(vars(_complete(history, number, decision)), default=str, ensure_ascii=False)
    pieces = [text[start : start + _PIECE_LENGTH] for start in range(0, len(text), _PIECE_LENGTH)]
    nonce = uuid.uuid4().hex[:16]
    client = MlflowClient()
    for index, piece in enumerate(pieces[1:], 1):
        client.log_param(history.run_id, f"{nonce}.{index}", piece)

    # The moment of decision: MLflow writes a parameter once.
    key = f"{number:06}"
    value = f"{nonce} {len(pieces)} {pieces[0]}"
    failure = None
    try:
        client.log_param(history.run_id, key, value)
    except MlflowException as error:  # the number is taken, or an answer that got lost
        failure = error
    stored_value = contents.run(history.run_id).data.params.get(key)
    if stored_value is None and failure:
        raise failure
    if stored_value != value:  # another writer's
        return None
    records = (*history.records, Record.of(json.loads(text)))
    return History(history.name, history.run_id, records, sha256(text.encode()).hexdigest(), history.applied)


def _complete(history: History, number: int, decision: Mapping[str, Any]) -> Record:
    """Return a decision with its number, time, user, process and the sha256 of the one before it."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    latest = history.records[-1].time if history.records else ""
    user = os.environ.get("MLFLOW_TRACKING_USERNAME") or getpass.getuser()
    return Record(
        **decision,
        number=number,
        time=max(now, latest),  # a clock may be set back
        by=f"{user}@{socket.gethostname()}",
        owner=owners.this_process(),
        previous=history.chain,
    )


@lru_cache(maxsize=20_000)  # a command reads the record several times, and a decision never changes
def _parse_decision(text: str) -> tuple[Record, str]:
    """Return a decision from its text, and the text's sha256."""
    return Record.of(reading.parse_json(text)), sha256(text.encode()).hexdigest()


def _join(first_piece: str, params: Mapping[str, str]) -> str:
    """Return a decision's text from its parameter and those that continue it."""
    nonce, count, text = first_piece.split(" ", 2)
    further_pieces = [params[f"{nonce}.{index}"] for index in range(1, int(count))]
    return "".join([text, *further_pieces])


def standing_decision(records: Sequence[Record], stage: str) -> Record | None:
    """Return the newest decision for a stage that let its version in, else the newest."""
    on_stage = [record for record in records if record.stage == stage]
    for record in reversed(on_stage):
        if record.passed:
            return record
    return on_stage[-1] if on_stage else None
