"""History: every decision on a stage, and which version held it on a day."""

from datetime import UTC, date, datetime, time

import click

from qrl import process, registry
from qrl.errors import BadInput
from qrl.recipe import Recipe
from qrl.registry import pointers
from qrl.registry.history import ADOPT, MIRRORED, PROMOTE, ROLLBACK, USUAL, History, Record, best
from qrl.tracking import store


def show(recipe: Recipe, stage: str, day: str | None) -> None:
    """Print the decisions on a stage, or which version held it at a day's end; `day` is as `at` accepts it."""
    name = registry.registered_name(recipe)
    store.check_there()
    store.prepare()
    past = pointers.current(name)
    if not past.records:
        made = f"a study makes some, and so does `{process.command('promote', {})}`"
        raise BadInput(f"There is no decision on '{name}' yet: {made}; --registered_name chooses another model.")
    own, there = past.state.behind(stage), USUAL | past.state.stages
    if own not in there:
        raise BadInput(f"There is no stage '{stage}': expected one of {', '.join([*there, *MIRRORED])}.")
    if day:
        click.echo(at(past, stage, day))
        return
    former = [record for record in past.gates() if not record.number]
    decisions = [record for record in (*former, *past.records) if record.stage in ("", own)]
    count = f"{len(decisions)} decision{'s' * (len(decisions) != 1)}"
    click.echo(f"{name}, stage {own}: {count}, in run {past.run_id or 'none yet'}.")
    for record in decisions:
        click.echo(_told(record))


def at(past: History, stage: str, day: str) -> str:
    """Return in words which version held a stage at a time, and why.

    Args:
        past: the model's history.
        stage: one of ours, or Staging or Production in any case.
        day: ISO 8601; a date means its end, a time without a zone UTC.

    Raises:
        BadInput: `day` is no date.
    """
    try:
        asked = datetime.fromisoformat(day)
        if _is_date(day):
            asked = datetime.combine(asked, time(23, 59, 59))
        until = asked.replace(tzinfo=asked.tzinfo or UTC).astimezone(UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError):  # the latter of a year that is 0 or 10,000 in UTC
        raise BadInput(f"--at is '{day}', but must be a date such as 2026-11-22, or 2026-11-22T10:00:00.") from None
    state, first = past.until(until), past.records[0]
    own = state.behind(stage)
    version, what = state.at.get(own), stage if own == stage else f"{stage.capitalize()} (stage {own})"
    if first.action == ADOPT and until < first.time:
        gates = [each for each in past.gates() if each.time <= until and each.stage == own]
        unknown = f"{until}: which version {what} of {past.name} was is not known, since its record begins {first.time}"
        return "\n".join([f"{unknown}; gates had decided by then:", *map(_told, gates)] if gates else [f"{unknown}."])
    if version is None:
        return f"{until}: {what} of {past.name} had no version."
    held = [each for each in (*past.gates(version), *past.records) if each.time <= until and each.stage in ("", own)]
    moved = [each for each in held if each.action in (PROMOTE, ROLLBACK) and each.version == version][-1:]
    earned = best([each for each in held if each.version == version], own)
    why = [earned] if earned and earned not in moved and moved[-1].action != PROMOTE else []
    return "\n".join([f"{until}: {what} of {past.name} was version {version}, by", *map(_told, [*why, *moved])])


def _is_date(day: str) -> bool:
    try:
        return bool(date.fromisoformat(day))
    except ValueError:
        return False


def _told(record: Record) -> str:
    number = f"{record.number:4}" if record.number else "   -"
    what = f"{record.action} {record.stage}".strip() + (f" version {record.version}" if record.version else "")
    facts = {"run": record.run, "digest": record.digest[:12], "study": record.study}
    facts = ", ".join(f"{key} {value}" for key, value in facts.items() if value)
    lines = [f"{number}  {record.time}  {what}, {record.by or 'before records'}{f', {facts}' if facts else ''}"]
    return "\n".join([*lines, *(f"        {reason}" for reason in record.reasons)])
