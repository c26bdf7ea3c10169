"""Stages: resolved once to a version, moved by promotion and rollback.

A stage of ours (`base`, `grpo`, `awq`, or as a recipe declares them) is where the record of decisions says that it is.
`<stage>-previous` is the version that a rollback returns to. Aliases show both, and MLflow's own stages show two of
them; if two studies mirror the same one, it shows the stage that was promoted last.
"""

import re
from collections.abc import Iterable, Mapping
from contextlib import nullcontext, suppress
from typing import Any

from mlflow import MlflowException

from qrl import names
from qrl.errors import BadInput, QrlError
from qrl.recipe.stages import Stage
from qrl.registry import history, pointers, versions
from qrl.registry.client import MlflowClient
from qrl.registry.history import MIRRORED, PREVIOUS, USUAL, History
from qrl.registry.versions import Version, versions_of
from qrl.tracking import store


def resolve(name: str, stage: str | int, past: History | None = None) -> Version:
    """Return the version behind a stage, resolved once.

    Args:
        name: the registered model.
        stage: one that it has (`known`), one of them with `-previous`, Staging, Production, or a version number.
        past: its history, if that was read already.

    Raises:
        BadInput: the stage, model or version is unknown.
    """
    return _resolve(past or pointers.current(name), stage)


def _resolve(past: History, stage: str | int) -> Version:
    name, address, state = past.name, str(stage), past.state
    alias = state.behind(address)
    if re.fullmatch(r"[1-9][0-9]*", alias):
        if entry := versions.version_of(name, int(alias)):
            return Version.of(entry, past)
        known_numbers = ", ".join(map(str, sorted(int(entry.version) for entry in versions_of(name))))
        known_numbers = known_numbers or "none; `mlflow run .` or `python -m qrl study` makes them"
        raise BadInput(f"'{name}' has no version {alias}: registered are {known_numbers}.")
    own, there = alias.removesuffix(PREVIOUS), _known(past)
    if own not in names.STAGES and own not in there:
        hint = " (the base model's stage is `base`)" if address.lower() == "none" else ""
        expected = (*there, *MIRRORED, "a version number", *(stage + PREVIOUS for stage in there))
        raise BadInput(f"There is no stage '{address}'{hint}: expected one of {', '.join(expected)}.")
    if number := state.aliases().get(alias):
        try:
            return Version.of(MlflowClient().get_model_version(name, str(number)), past, own)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise store.sentence(error) or error from None
            raise BadInput(
                f"Version {number} of '{name}', which holds {alias}, was deleted: promote another one to {own}, or "
                "roll it back."
            ) from None
    if alias != own:
        raise BadInput(f"Stage {own} of '{name}' has had no other version, so there is no {alias}.")
    models = ", ".join(sorted(model.name for model in MlflowClient().search_registered_models())) or "none"
    others = [stage for stage in there if stage in state.at]
    has = f"it has {', '.join(others)}; " if others else ""
    raise BadInput(
        f"Stage {alias} of '{name}' has no version yet ({has}registered models here: {models}; choose one with "
        "--registered_name): `mlflow run .` makes all, "
        f"`python -m qrl promote --stage {alias} --cell RUN` makes this one from an evaluation."
    )


def known(name: str) -> dict[str, Stage]:
    """Return the stages of a registered model by name: those that were declared for it, or else base, grpo and awq."""
    return _known(pointers.current(name))


def _known(past: History) -> dict[str, Stage]:
    return past.state.stages or dict(USUAL)


def check_declared(name: str, stages: Iterable[Stage]) -> dict[str, Stage]:
    """Return a model's stages by name, as `known`; raise BadInput if a recipe's is one of them, but of another cell."""
    versions.model_of(name, make=True)
    there = _known(past := pointers.current(name))
    for stage in stages:
        if (other := past.state.stages.get(stage.stage)) and other.cell != stage.cell:
            taken = f"Stage {stage.stage} of '{name}' is the cell {other.cell}, but this recipe declares {stage.cell}"
            raise BadInput(f"{taken}: give the stage another name in promote.stages, or set registered_name.")
    return there


def promote(
    name: str,
    stage: str | Stage,
    version: int,
    *,
    record: Mapping[str, Any],
    expected: Mapping[str, int | None] | None = None,
) -> Version:
    """Give a stage to a version that passed its gate; the stage's former version becomes `<stage>-previous`.

    Args:
        name: the registered model.
        stage: one that the model has, or as a recipe declares it, complete.
        version: the version number.
        record: why: `run`, `reasons`, `bounds`, `study`; digest, time, user and process are added.
        expected: stage → the version that held it when the gate decided (None: none did). If another one holds it by
            now, nothing is moved, unless the stage is the one to be promoted and the version holds it already.

    Raises:
        BadInput: the stage or version is unknown.
        QrlError: a stage moved since the gate decided.
    """
    target = _resolve(History(name), version)  # its digest, which no decision changes

    def decide(past: History) -> dict[str, Any]:
        earned = stage if isinstance(stage, Stage) else (USUAL | past.state.stages).get(stage)
        if earned is None:
            raise _no_stage(str(stage), "to promote to", _known(past))
        for other, held in (expected or {}).items():
            now = past.state.at.get(other)
            if now != held and not (other == earned.stage and now == version):
                moved = f"Stage {other} of '{name}' moved to version {now} while version {version} was judged"
                raise QrlError(f"{moved}: run promote again.")
        decision = {"action": history.PROMOTE, "stage": earned.stage, "declared": str(earned)}
        return {**record, **decision, "version": version, "digest": target.digest}

    past = pointers.append(name, decide)
    return _resolve(past, str(stage.stage if isinstance(stage, Stage) else stage))


def refuse(name: str, stage: str, version: int, *, record: Mapping[str, Any]) -> None:
    """Record why a version was refused; no pointer moves."""
    decision = {
        "action": history.REFUSE,
        "stage": stage,
        "version": version,
        "digest": _resolve(History(name), version).digest,
    }
    pointers.append(name, lambda _past: {**record, **decision})


def rollback(name: str, stage: str, public: str = "") -> Version:
    """Swap a stage with `<stage>-previous`; a second rollback swaps back.

    Args:
        name: the registered model.
        stage: one that it has.
        public: the key or certificate that must have signed the version, from `signing.trusted`.

    Raises:
        BadInput: the model has no such stage, or the stage had no other version before.
        GateRefused: it has no such signature.
        QrlError: the files of that version are gone or changed; nothing is moved.
    """

    def decide(past: History) -> dict[str, Any]:
        if stage not in names.STAGES and stage not in _known(past):
            raise _no_stage(stage, "to roll back", _known(past))
        now, before = past.state.at.get(stage), past.state.before.get(stage)
        if now is None or before is None or now == before:
            raise BadInput(f"Stage {stage} of '{name}' has had no other version, so there is nothing to roll back to.")
        target = _resolve(past, stage + PREVIOUS)
        versions.verify(target, public)  # never to a version that could not be served
        earned = target.gate(stage)
        decision = {"action": history.ROLLBACK, "stage": stage, "version": before, "digest": target.digest}
        return {**decision, "run": earned.run if earned else "", "reasons": [f"Returned from version {now}."]}

    if versions.model_of(name) is None:
        raise BadInput(f"There is no registered model '{name}', so there is nothing to roll back to.")
    return _resolve(pointers.append(name, decide), stage)


def check_stage(stage: str, stages: Iterable[Stage], name: str | None = None) -> None:
    """Raise BadInput if neither a recipe, whose `stages` these are, nor a registered model (None: any) has a stage."""
    if stage in {each.stage for each in stages}:
        return
    models = [name] if name else [model.name for model in MlflowClient().search_registered_models()]
    there: dict[str, Stage] = {}
    for model in models:
        with nullcontext() if name else suppress(QrlError):  # somebody else's record may be damaged
            there |= _known(pointers.known(model))
    if stage not in there:
        raise _no_stage(stage, "to promote to", there or [each.stage for each in stages])


def _no_stage(stage: str, use: str, there: Iterable[str]) -> BadInput:
    return BadInput(f"There is no stage '{stage}' {use}: expected one of {', '.join(there)}.")
