"""Pointers: aliases, MLflow's stages and tags, brought in line with the record of decisions.

A decision is one write, and carrying it out takes many. One decision is carried out at a time, whatever the host. These
are the states between the writes at which a process may die:

    AT REST     record 1…N,   tag qrl.history.applied = N     every pointer shows decision N
       │  claim_next: long decisions begin with parameters for their further pieces, which nobody reads alone
       │  claim_next: parameter N+1, the moment of decision: MLflow writes a parameter once
    PENDING     record 1…N+1, applied = N                     pointers show N, N+1, or some of each
       │  _carry_out: gate's tags → tag qrl.history → aliases → MLflow's stages → descriptions
    SHOWN       record 1…N+1, applied = N                     every pointer shows N+1
       │  _carry_out: tag applied = N+1, the last write
    AT REST     record 1…N+1, applied = N+1

    killed      what is left               who repairs it
    AT REST     nothing, or some pieces    nobody needs to: the decision was not taken, and the pieces are not read
    PENDING     pointers behind the record the next command that reads or decides (`current`, `append`): at once if the
                                           owner is a dead process of this host, else once commands on one host have
                                           seen it pending for LEASE_S seconds; the first that looks starts the clock
    SHOWN       the tag one behind         the same: it finds every pointer in place, and sets the tag

Meanwhile `registry.resolve` answers from the record, so a stage never has two versions. Until the first decision a
model has no record:

    NO RECORD   _begin_record → adopt.begin: a run for the record, then a parameter of the first version's run that
       │        names it (written once: of two hosts one wins), then the model's tags. Killed in between, the next
       │        command finds the run by that parameter, or makes another; a run that no parameter names is never read.
    AT REST     record empty, applied = 0; what the model's tags and aliases said becomes decision 1

    BY HAND     at rest, but a pointer shows something else: the next command that decides or reads looks twice, records
                a decision `mend`, and carries it out, which puts the pointer back.
"""

import json
import random
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mlflow import MlflowException
from mlflow.entities.model_registry import ModelVersion, RegisteredModel

from qrl import names
from qrl.registry import adopt, pages
from qrl.registry.client import MlflowClient
from qrl.registry.history import (
    MEND,
    MIRRORED,
    PREVIOUS,
    PROMOTE,
    REFUSE,
    USUAL,
    History,
    Record,
    claim_next,
    read_history,
    standing_decision,
)
from qrl.registry.versions import locked, model_of, observe_unchanged_s, version_of, versions_of
from qrl.tracking import owners, store_errors

LEASE_S = 60  # after which another host takes over a decision that was recorded, but not carried out
_POLL_S = (0.02, 0.1)  # least and most between looks at a decision that another process carries out


def read_only(name: str) -> History:
    """Return a model's history as it is, and write nothing: without a record, what its tags and aliases say."""
    model = model_of(name)
    history = read_history(name, model)
    first = _first_decision(history, model) if model else None
    if first is None:
        return history
    return History(name, records=(Record.of(first),), applied=1)


def current(name: str) -> History:
    """Return a model's history, after mending what lags behind it; a user without rights to write only reads it."""
    model = model_of(name)
    history = read_history(name, model)
    if model is None or _is_in_order(history, model):
        return history
    if history.is_pending and not _is_abandoned(history):
        return history  # its process carries it out at this moment
    try:
        with locked(name):
            return _settle(name, wait=False)
    except MlflowException as error:
        if error.get_http_status_code() != 403:
            raise store_errors.explain(error) or error from None
        return read_only(name)


def append(name: str, decide: Callable[[History], Mapping[str, Any]]) -> History:
    """Record a decision and carry it out; return the history after it.

    Args:
        name: a registered model that is there.
        decide: history → the fields of a `Record`; called again if another writer was first.
    """
    try:
        with locked(name):
            while True:
                history = _settle(name)
                decision = decide(history)
                if not history.run_id:
                    adopt.begin(_model(name), versions_of(name))
                    continue  # to read the empty record that is there now
                decided = claim_next(history, decision)
                if decided:
                    return _carry_out(decided)
    except MlflowException as error:
        raise store_errors.explain(error) or error from None


def _settle(name: str, *, wait: bool = True) -> History:
    """Return the history once no decision is pending and every pointer shows it; the next decision is ours then.

    Without `wait`, a decision that another process carries out is returned as it is.
    """
    while True:
        model = _model(name)
        history = read_history(name, model)
        first = _first_decision(history, model)
        if first:
            _begin_record(history, model, first)
        elif history.is_pending and _is_abandoned(history):
            _carry_out(history)
        elif history.is_pending:
            if not wait:
                return history
            time.sleep(random.uniform(*_POLL_S))
        else:
            changes = _changes_by_hand(history, model)
            if not changes:
                return history
            _put_back(history, changes)


def _begin_record(history: History, model: RegisteredModel, first: Mapping[str, Any]) -> None:
    """Begin a model's record with what its tags and aliases say."""
    name = history.name
    run_id = history.run_id or adopt.begin(model, versions_of(name))
    decided = claim_next(History(name, run_id), first)
    if decided:
        print(f"qrl: {name} had no record of decisions; run {run_id} begins one.", file=sys.stderr)
        _carry_out(decided)


def _put_back(history: History, changes: list[str]) -> None:
    """Undo changes by hand, and record them, unless somebody else undid them since they were seen."""
    name = history.name
    model = _model(name)
    is_confirmed = read_history(name, model) == history and _changes_by_hand(history, model) == changes
    if history.deleted:
        MlflowClient().restore_run(history.run_id)
    if not is_confirmed:
        return
    decided = claim_next(history, {"action": MEND, "reasons": changes})
    if decided:
        print(f"qrl: {name} was changed by hand, which is put back: {' '.join(changes)}", file=sys.stderr)
        _carry_out(decided)


def _is_in_order(history: History, model: RegisteredModel) -> bool:
    """Return whether the record holds what the model says, and every pointer shows the record."""
    if _first_decision(history, model) or history.is_pending:
        return False
    return not _changes_by_hand(history, model)


def _is_abandoned(history: History) -> bool:
    """Return whether whoever took the last decision no longer carries it out.

    Without this machine's lock the answer is a hint; under the lock it is asked again before anything is written.

    Of a process on another host, only this machine's own clock can tell: how long it has seen the decision pending.
    """
    owner = history.records[-1].owner
    if owner == owners.this_process() or owners.is_dead(owner):
        return True
    return observe_unchanged_s(history.name, history.chain) > LEASE_S


def _first_decision(history: History, model: RegisteredModel) -> dict[str, Any] | None:
    """Return the decision with which a record begins; None if there are decisions, or the model's tags say nothing."""
    if history.records:
        return None
    return adopt.first_decision(model, versions_of(model.name))


def _model(name: str) -> RegisteredModel:
    return MlflowClient().get_registered_model(name)


@dataclass(frozen=True)
class _Pointers:
    """The aliases and MLflow's stages of a model: as they are, and as its history says that they should be."""

    aliases: dict[str, int]
    required_aliases: dict[str, int]
    mirrored: dict[str, int]  # MLflow's stage → version
    required_mirrored: dict[str, int]

    @classmethod
    def of(cls, history: History, model: RegisteredModel) -> "_Pointers":
        return cls(
            aliases={alias: int(version) for alias, version in model.aliases.items()},
            required_aliases=history.state.aliases(),
            mirrored={entry.current_stage: int(entry.version) for entry in model.latest_versions or ()},
            required_mirrored={mirrored: version for version, mirrored in history.state.shown().items()},
        )

    @property
    def differing_mirrored(self) -> list[str]:
        """MLflow's stages that show another version than they should."""
        return [stage for stage in MIRRORED if self.mirrored.get(stage) != self.required_mirrored.get(stage)]


def _changes_by_hand(history: History, model: RegisteredModel) -> list[str]:
    """Return a sentence for every pointer that does not show the history."""
    if not history.records:
        return []
    pointers = _Pointers.of(history, model)
    moved = [
        (f"alias {alias}", pointers.aliases.get(alias), pointers.required_aliases.get(alias))
        for alias in sorted(_aliases_of_stages(history))
        if pointers.aliases.get(alias) != pointers.required_aliases.get(alias)
    ]
    moved += [
        (stage, pointers.mirrored.get(stage), pointers.required_mirrored.get(stage))
        for stage in pointers.differing_mirrored
    ]
    tag = model.tags.get(names.TAG_HISTORY)
    changes = []
    if history.deleted:
        changes.append(f"The record, run {history.run_id}, was deleted.")
    if tag != history.run_id:
        changes.append(f"The tag {names.TAG_HISTORY} named {tag or 'no run'}, the record is run {history.run_id}.")
    if moved:
        registered = {int(entry.version) for entry in versions_of(history.name)}
        for pointer, actual, required in moved:
            # MLflow deletes the pointers to a version with it: that is no change by hand, and cannot be put back.
            if actual is not None or required in registered:
                changes.append(f"{pointer} was {_version(actual)}, decided is {_version(required)}.")
    return changes


def _version(number: int | None) -> str:
    return f"version {number}" if number else "nothing"


def _aliases_of_stages(history: History) -> set[str]:
    """Return the aliases that stages of the model may have; all others are the user's."""
    stages = {*USUAL, *history.state.declared}
    return stages | {stage + PREVIOUS for stage in stages}


def _carry_out(history: History) -> History:
    """Make every pointer show the last decision, and note that it does.

    Each write is repeated without harm, so that whoever finds the decision pending calls this again.
    """
    name = history.name
    decision = history.records[-1]
    client = MlflowClient()
    started = time.monotonic()
    model = _model(name)
    pointers = _Pointers.of(history, model)
    entries = _entries_to_write(history, pointers)

    def is_ours() -> bool:
        """Return whether no other host has taken over meanwhile, as it may after a minute."""
        if time.monotonic() - started < LEASE_S / 2:
            return True
        return len(read_history(name, _model(name)).records) == decision.number

    if decision.action in (PROMOTE, REFUSE) and decision.version in entries:
        _write_gate(history, entries[decision.version])
    if model.tags.get(names.TAG_HISTORY) != history.run_id:
        client.set_registered_model_tag(name, names.TAG_HISTORY, history.run_id)
    _write_aliases(history, pointers, entries, is_ours)
    _write_mirrored(history, entries, is_ours)
    if decision.version in entries:
        pages.refresh(history, decision.version)
    if is_ours():
        client.set_registered_model_tag(name, names.TAG_APPLIED, str(decision.number))
    return history


def _entries_to_write(history: History, pointers: _Pointers) -> dict[int, ModelVersion]:
    """Return MLflow's entries of the versions that a decision concerns, by number, if they are there.

    All others are as they should be; there may be thousands.
    """
    numbers = {history.records[-1].version}
    for alias, version in pointers.required_aliases.items():
        if pointers.aliases.get(alias) != version:
            numbers.add(version)
    for stage in pointers.differing_mirrored:
        numbers.add(pointers.mirrored.get(stage, 0))
        numbers.add(pointers.required_mirrored.get(stage, 0))

    entries = {}
    for number in numbers - {0}:
        entry = version_of(history.name, number)
        if entry:
            entries[number] = entry
    return entries


def _write_aliases(
    history: History, pointers: _Pointers, entries: Mapping[int, ModelVersion], is_ours: Callable[[], bool]
) -> None:
    """Set the aliases that differ, and delete those of stages that have no version."""
    client = MlflowClient()
    required = {
        alias: version
        for alias, version in pointers.required_aliases.items()
        if pointers.aliases.get(alias) == version or version in entries  # else it was deleted
    }
    for alias, version in required.items():
        if pointers.aliases.get(alias) != version and is_ours():
            client.set_registered_model_alias(history.name, alias, str(version))
    stale = pointers.aliases.keys() - required.keys()
    for alias in stale & _aliases_of_stages(history):
        client.delete_registered_model_alias(history.name, alias)


def _write_mirrored(history: History, entries: Mapping[int, ModelVersion], is_ours: Callable[[], bool]) -> None:
    """Set MLflow's stages: Staging and Production as decided, None for other versions of our stages, else Archived."""
    required = dict.fromkeys(history.state.at.values(), "None") | history.state.shown()
    taken_over: set[str] = set()  # MLflow's stages that a version got, and with it MLflow archived the former holder
    # Versions with a decided stage come first: MLflow archives the former holder in the same transaction.
    ordered = sorted(entries.items(), key=lambda item: item[0] not in required)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        for number, entry in ordered:
            # A version that had a stage is archived when it loses it; one that never had a stage keeps none.
            without_stage = "None" if entry.current_stage == "None" else "Archived"
            stage = required.get(number, without_stage)
            # MLflow has archived it by now, when another version got its stage; `entry` was read before.
            is_archived = stage == "Archived" and entry.current_stage in taken_over
            if entry.current_stage == stage or is_archived or not is_ours():
                continue
            if _transition(history.name, entry.version, stage):
                taken_over.add(stage)


def _transition(name: str, number: str, stage: str) -> bool:
    """Set the stage of a version; return whether the former one of Staging or Production was archived with it.

    In the same transaction: a reader sees the old version or the new one, never none or both.
    """
    client = MlflowClient()
    try:
        client.transition_model_version_stage(name, number, stage, archive_existing_versions=stage in MIRRORED)
    except MlflowException as error:
        if "operator does not exist" not in str(error):
            raise
        # MLflow's archiving fails on PostgreSQL through psycopg 3: the old version follows, a moment later.
        client.transition_model_version_stage(name, number, stage)
        return False
    return True


def _write_gate(history: History, entry: ModelVersion) -> None:
    """Show a gate's last decision in the version's tags: the reasons first, then the word that refers to them.

    A version that passed this gate earlier keeps that; a refusal goes to `qrl.gate.<stage>.refused`.
    """
    decision = history.records[-1]
    fields = {key: getattr(decision, key) for key in ("run", "reasons", "bounds", "digest", "time", "by", "number")}
    if decision.study:
        fields["study"] = decision.study
    text = json.dumps(fields, default=str, ensure_ascii=False)

    standing = standing_decision(history.gates(int(entry.version)), decision.stage)
    if not decision.passed and standing and standing.passed:
        tags = {f"{names.gate_tag(decision.stage)}.refused": text}
    else:
        verdict = "passed" if decision.passed else "refused"
        tags = {names.gate_record_tag(decision.stage): text, names.gate_tag(decision.stage): verdict}
    for key, value in tags.items():
        if entry.tags.get(key) != value:
            MlflowClient().set_model_version_tag(history.name, entry.version, key, value)
