"""Pointers: aliases, MLflow's stages and tags, brought in line with the record of decisions.

One decision is carried out at a time, whatever the host: the next one is written only after the tag
`qrl.history.applied` says that the last one reached every pointer. A process that was killed between two of them leaves
the rest to the next command of any kind. What was changed by hand is put back, and the record says so.
"""

import json
import random
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from mlflow import MlflowException
from mlflow.entities.model_registry import ModelVersion, RegisteredModel

from qrl import names
from qrl.registry import adopt, history, pages
from qrl.registry.client import MlflowClient
from qrl.registry.history import MIRRORED, PREVIOUS, PROMOTE, REFUSE, USUAL, History, Record
from qrl.registry.versions import locked, model_of, unchanged_s, version_of, versions_of
from qrl.tracking import signals, store

LEASE = 60  # seconds after which another host takes over a decision that was recorded, but not carried out


def known(name: str) -> History:
    """Return a model's history as it is, and write nothing: without a record, what its tags and aliases say."""
    past = history.read(name, model := model_of(name))
    first = _to_adopt(past, model) if model else None
    return History(name, records=(Record.of(first),), applied=1) if first else past


def current(name: str) -> History:
    """Return a model's history, after mending what lags behind it; a user without rights to write only reads it."""
    past = history.read(name, model := model_of(name))
    if model is None or not (_to_adopt(past, model) or past.is_pending or _astray(past, model)):
        return past
    if past.is_pending and not _is_abandoned(past):
        return past  # its process carries it out at this moment
    try:
        with locked(name):
            return _turn(name, wait=False)
    except MlflowException as error:
        if error.get_http_status_code() != 403:
            raise store.sentence(error) or error from None
        return known(name)


def append(name: str, decide: Callable[[History], Mapping[str, Any]]) -> History:
    """Record a decision and carry it out; return the history after it.

    Args:
        name: a registered model that is there.
        decide: history → the fields of a `Record`; called again if another writer was first.
    """
    try:
        with locked(name):
            while True:
                past = _turn(name)
                decision = decide(past)
                if not past.run_id:
                    adopt.begin(_there(name), versions_of(name))
                elif after := history.claim(past, decision):
                    return _carry_out(after)
    except MlflowException as error:
        raise store.sentence(error) or error from None


def _turn(name: str, *, wait: bool = True) -> History:
    """Return the history once no decision is pending and every pointer shows it; it is our turn then."""
    while True:
        past = history.read(name, model := _there(name))
        if first := _to_adopt(past, model):
            begun = History(name, past.run_id or adopt.begin(model, versions_of(name)))
            if after := history.claim(begun, first):
                print(f"qrl: {name} had no record of decisions; run {begun.run_id} begins one.", file=sys.stderr)
                _carry_out(after)
        elif past.is_pending and _is_abandoned(past):
            _carry_out(past)
        elif past.is_pending:
            if not wait:
                return past
            time.sleep(random.uniform(0.02, 0.1))
        elif not (astray := _astray(past, model)):
            return past
        else:
            again = _there(name)
            seen_twice = history.read(name, again) == past and astray == _astray(past, again)  # not in between
            if past.deleted:
                MlflowClient().restore_run(past.run_id)
            if seen_twice and (after := history.claim(past, {"action": history.MEND, "reasons": astray})):
                print(f"qrl: {name} was changed by hand, which is put back: {' '.join(astray)}", file=sys.stderr)
                _carry_out(after)


def _is_abandoned(past: History) -> bool:
    """Whether whoever took the last decision no longer carries it out; call it under the lock of this machine.

    Of a process on another host, only this machine's own clock can tell: how long it has seen the decision pending.
    """
    owner = past.records[-1].owner
    return owner == signals.identity() or signals.is_dead(owner) or unchanged_s(past.name, past.chain) > LEASE


def _to_adopt(past: History, model: RegisteredModel) -> dict[str, Any] | None:
    """Return the first decision of a model of an older store, if no record holds what its tags and aliases say."""
    return None if past.records else adopt.former(model, versions_of(model.name))


def _there(name: str) -> RegisteredModel:
    return MlflowClient().get_registered_model(name)


def _astray(past: History, model: RegisteredModel) -> list[str]:
    """Return a sentence for every pointer that does not show the history."""
    aliases, shown, expected, unlike = _compared(past, model)
    wanted, ours = past.state.aliases(), _ours(past)
    differing = [alias for alias in sorted(ours) if aliases.get(alias) != wanted.get(alias)]
    tag = model.tags.get(names.TAG_HISTORY)
    if not past.records or not (differing or unlike or past.deleted or tag != past.run_id):
        return []
    there = {int(entry.version) for entry in versions_of(past.name)}  # nothing points to a version that was deleted
    moved = [(f"alias {alias}", aliases.get(alias), wanted.get(alias)) for alias in differing]
    moved += [(mirrored, shown.get(mirrored), expected.get(mirrored)) for mirrored in unlike]
    record = [f"The record, run {past.run_id}, was deleted."] if past.deleted else []
    if tag != past.run_id:
        record.append(f"The tag {names.TAG_HISTORY} named {tag or 'no run'}, the record is run {past.run_id}.")
    return record + [
        f"{what} was {f'version {was}' if was else 'nothing'}, decided is {f'version {now}' if now else 'nothing'}."
        for what, was, now in moved
        if was is not None or now in there
    ]


def _compared(
    past: History, model: RegisteredModel
) -> tuple[dict[str, int], dict[str, int], dict[str, int], list[str]]:
    """Return the aliases; what MLflow's stages show and should show; and which of these differ."""
    aliases = {alias: int(version) for alias, version in model.aliases.items()}
    shown = {entry.current_stage: int(entry.version) for entry in model.latest_versions or ()}
    expected = {mirrored: version for version, mirrored in past.state.shown().items()}
    return aliases, shown, expected, [each for each in MIRRORED if shown.get(each) != expected.get(each)]


def _ours(past: History) -> set[str]:
    """Return the aliases that stages of the model may have."""
    stages = {*USUAL, *past.state.declared}
    return stages | {stage + PREVIOUS for stage in stages}


def _carry_out(past: History) -> History:
    """Make every pointer show the last decision, and note that it does."""
    name, head, client = past.name, past.records[-1], MlflowClient()
    began = time.monotonic()
    model, state, there = _there(name), past.state, {}
    aliases, now, then, unlike = _compared(past, model)
    moving = [alias for alias, version in state.aliases().items() if aliases.get(alias) != version]
    touched = {head.version, *(state.aliases()[alias] for alias in moving)}
    touched |= {version for mirrored in unlike for version in (now.get(mirrored), then.get(mirrored)) if version}
    for number in touched - {0}:  # the others, of which there may be thousands, are as they should be
        if entry := version_of(name, number):
            there[number] = entry

    def is_ours() -> bool:
        """Whether no other host has taken over meanwhile, as it may after a minute."""
        return time.monotonic() - began < LEASE / 2 or len(history.read(name, _there(name)).records) == head.number

    if head.action in (PROMOTE, REFUSE) and head.version in there:
        _write_gate(past, there[head.version])
    wanted = {alias: version for alias, version in state.aliases().items() if alias not in moving or version in there}
    if model.tags.get(names.TAG_HISTORY) != past.run_id:
        client.set_registered_model_tag(name, names.TAG_HISTORY, past.run_id)
    for alias, version in wanted.items():
        if aliases.get(alias) != version and is_ours():
            client.set_registered_model_alias(name, alias, str(version))
    for alias in _ours(past) & aliases.keys() - wanted.keys():
        client.delete_registered_model_alias(name, alias)
    shown, moved = {version: "None" for version in state.at.values()} | state.shown(), set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        for number, entry in sorted(there.items(), key=lambda item: item[0] not in shown):
            stage = shown.get(number, "None" if entry.current_stage == "None" else "Archived")
            done = stage == "Archived" and entry.current_stage in moved
            due = entry.current_stage != stage and not done
            if due and is_ours() and _transition(client, name, entry.version, stage):
                moved.add(stage)
    if head.version in there:
        pages.refresh(past, head.version)
    if is_ours():
        client.set_registered_model_tag(name, names.TAG_APPLIED, str(head.number))
    return past


def _transition(client: MlflowClient, name: str, number: str, stage: str) -> bool:
    """Set the stage of a version; return whether the former one of Staging or Production was archived with it.

    In the same transaction: a reader sees the old version or the new one, never none or both.
    """
    try:
        client.transition_model_version_stage(name, number, stage, stage in MIRRORED)
    except MlflowException as error:
        if "operator does not exist" not in str(error):
            raise
        # MLflow's archiving fails on PostgreSQL through psycopg 3: the old version follows, a moment later.
        client.transition_model_version_stage(name, number, stage)
        return False
    return True


def _write_gate(past: History, entry: ModelVersion) -> None:
    """Show a gate's last decision in the version's tags: the reasons first, then the word that refers to them.

    A version that passed this gate earlier keeps that; a refusal goes to `qrl.gate.<stage>.refused`.
    """
    head, client = past.records[-1], MlflowClient()
    fields = {key: getattr(head, key) for key in ("run", "reasons", "bounds", "digest", "time", "by", "number")}
    text = json.dumps(fields | ({"study": head.study} if head.study else {}), default=str, ensure_ascii=False)
    verdict = "passed" if head.passed else "refused"
    tags = {names.gate_record_tag(head.stage): text, names.gate_tag(head.stage): verdict}
    former = history.best(past.gates(int(entry.version)), head.stage)
    if not head.passed and former and former.passed:
        tags = {f"{names.gate_tag(head.stage)}.refused": text}
    for key, value in tags.items():
        if entry.tags.get(key) != value:
            client.set_model_version_tag(past.name, entry.version, key, value)
