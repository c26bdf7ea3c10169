"""History: every decision on a stage, and which version held it on a day."""

from datetime import UTC, date, datetime, time

import click

from qrl import process, registry
from qrl.errors import BadInput
from qrl.recipe import Recipe
from qrl.registry import pointers
from qrl.registry.history import ADOPT, MIRRORED, PROMOTE, ROLLBACK, USUAL, History, Record, standing_decision
from qrl.tracking import store


def show(recipe: Recipe, stage: str, day: str | None) -> None:
    """Print the decisions on a stage, or which version held it at a day's end; `day` is as `at` accepts it."""
    name = registry.registered_name(recipe)
    store.check_there()
    store.prepare()
    history = pointers.current(name)
    if not history.records:
        remedy = f"a study makes some, and so does `{process.command('promote', {})}`"
        raise BadInput(f"There is no decision on '{name}' yet: {remedy}; --registered_name chooses another model.")
    own_stage = history.state.behind(stage)
    stages = USUAL | history.state.stages
    if own_stage not in stages:
        raise BadInput(f"There is no stage '{stage}': expected one of {', '.join([*stages, *MIRRORED])}.")

    if day:
        click.echo(at(history, stage, day))
        return

    # Gates that decided before there was a record have no number; they are older than everything in it.
    unnumbered = [record for record in history.gates() if not record.number]
    decisions = [record for record in (*unnumbered, *history.records) if record.stage in ("", own_stage)]
    count = f"{len(decisions)} decision{'s' * (len(decisions) != 1)}"
    click.echo(f"{name}, stage {own_stage}: {count}, in run {history.run_id or 'none yet'}.")
    for record in decisions:
        click.echo(_described(record))


def at(history: History, stage: str, day: str) -> str:
    """Return in words which version held a stage at a time, and why.

    Args:
        history: of the model.
        stage: one of ours, or Staging or Production in any case.
        day: ISO 8601; a date means its end, a time without a zone UTC.

    Raises:
        BadInput: `day` is no date.
    """
    time_utc = _utc(day)
    state = history.until(time_utc)
    own_stage = state.behind(stage)
    stage_label = stage if own_stage == stage else f"{stage.capitalize()} (stage {own_stage})"
    first = history.records[0]

    if first.action == ADOPT and time_utc < first.time:
        unknown = (
            f"{time_utc}: which version {stage_label} of {history.name} was is not known, "
            f"since its record begins {first.time}"
        )
        gates = [record for record in history.gates() if record.time <= time_utc and record.stage == own_stage]
        if not gates:
            return f"{unknown}."
        return "\n".join([f"{unknown}; gates had decided by then:", *map(_described, gates)])

    version = state.at.get(own_stage)
    if version is None:
        return f"{time_utc}: {stage_label} of {history.name} had no version."
    decisions = _decisions_that_placed(history, version, own_stage, time_utc)
    heading = f"{time_utc}: {stage_label} of {history.name} was version {version}, by"
    return "\n".join([heading, *map(_described, decisions)])


def _decisions_that_placed(history: History, version: int, stage: str, time_utc: str) -> list[Record]:
    """Return the decision that moved the stage to a version, after the one by which the version had passed its gate."""
    on_version = [
        record
        for record in (*history.gates(version), *history.records)
        if record.time <= time_utc and record.stage in ("", stage) and record.version == version
    ]
    gate = standing_decision(on_version, stage)
    moves = [record for record in on_version if record.action in (PROMOTE, ROLLBACK)]
    if not moves:  # taken over from an older store, perhaps with its gate
        return [gate] if gate else []

    last_move = moves[-1]
    if last_move.action == PROMOTE or gate in (None, last_move):
        return [last_move]
    # A rollback does not say why the version was good enough; its gate does.
    return [gate, last_move]


def _utc(day: str) -> str:
    """Return a day's end, or a time, in UTC and ISO 8601; raise BadInput for anything else."""
    try:
        moment = datetime.fromisoformat(day)
        if _is_date(day):
            moment = datetime.combine(moment, time(23, 59, 59))
        return moment.replace(tzinfo=moment.tzinfo or UTC).astimezone(UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError):  # the latter for a year that is 0 or 10,000 in UTC
        raise BadInput(f"--at is '{day}', but must be a date such as 2026-11-22, or 2026-11-22T10:00:00.") from None


def _is_date(day: str) -> bool:
    try:
        date.fromisoformat(day)
    except ValueError:
        return False
    return True


def _described(record: Record) -> str:
    """Return a decision in a line, and its reasons in a line each."""
    number = f"{record.number:4}" if record.number else "   -"
    decision = f"{record.action} {record.stage}".strip()
    if record.version:
        decision += f" version {record.version}"
    author = record.by or "before records"

    facts = {"run": record.run, "digest": record.digest[:12], "study": record.study}
    details = [author, *(f"{key} {value}" for key, value in facts.items() if value)]
    lines = [f"{number}  {record.time}  {decision}, {', '.join(details)}"]
    lines += [f"        {reason}" for reason in record.reasons]
    return "\n".join(lines)
