"""History: every decision on a stage, and which version held it on a day."""

from datetime import UTC, date, datetime, time

import click

from qrl import process, registry
from qrl.errors import BadInput
from qrl.recipe import Recipe
from qrl.registry import pointers, versions
from qrl.registry.history import ADOPT, MIRRORED, PROMOTE, ROLLBACK, USUAL, History, Record, standing_decision
from qrl.tracking import store


def show(recipe: Recipe, stage: str | None, day: str | None, *, is_chosen: bool = True) -> None:
    """Print the decisions on a stage, or which version held it at a day's end.

    Args:
        recipe: its model's history is shown.
        stage: as for `at`; None for all stages of the model.
        day: as for `at`; None for every decision.
        is_chosen: whether the user named the model; else the store's only one with decisions is shown, if the recipe's
            has none.

    Raises:
        BadInput: the model has no decision, or no such stage.
    """
    store.check_there()
    store.prepare()
    history = _history_of(registry.registered_name(recipe), is_chosen=is_chosen)
    stages = USUAL | history.state.stages
    own_stage = history.state.behind(stage) if stage else None
    if own_stage and own_stage not in stages:
        raise BadInput(f"There is no stage '{stage}': expected one of {', '.join([*stages, *MIRRORED])}.")

    if day:
        shown_stages = [stage] if stage else list(history.state.stages or USUAL)
        click.echo("\n".join(at(history, shown_stage, day) for shown_stage in shown_stages))
        return

    # Gates that decided before there was a record have no number; they are older than everything in it.
    unnumbered = [record for record in history.gates() if not record.number]
    decisions = [*unnumbered, *history.records]
    if own_stage:
        decisions = [record for record in decisions if record.stage in ("", own_stage)]
    subject = f"stage {own_stage}" if own_stage else "all stages"
    count = f"{len(decisions)} decision{'s' * (len(decisions) != 1)}"
    click.echo(f"{history.name}, {subject}: {count}, in run {history.run_id or 'none yet'}.")
    for record in decisions:
        click.echo(_described(record))


def _history_of(name: str, *, is_chosen: bool) -> History:
    """Return the history of a model with decisions: of this one, or if it was not chosen, of the store's only one."""
    history = pointers.current(name)
    if history.records:
        return history
    decided_models = versions.decided_models()
    if len(decided_models) == 1 and not is_chosen:
        return pointers.current(decided_models[0])
    if decided_models:
        listed = ", ".join(decided_models)
        remedy = f"the models with decisions here are {listed}: name one with --registered_name, or its recipe"
    else:
        remedy = f"a study makes some, and so does `{process.command('promote', {})}`"
    raise BadInput(f"There is no decision on '{name}' yet; {remedy}.")


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
