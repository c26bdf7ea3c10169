"""Stages: resolved once to a version, moved by promotion and rollback.

A stage of ours (`base`, `grpo`, `awq`, or as a recipe declares them) is where the record of decisions says that it is.
`<stage>-previous` is the version that a rollback returns to. Aliases show both, and MLflow's own stages show two of
them; if two studies mirror the same one, it shows the stage that was promoted last.
"""

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from mlflow import MlflowException

from qrl import names
from qrl.errors import BadInput, QrlError
from qrl.recipe.stages import Stage
from qrl.registry import pointers, versions
from qrl.registry.client import MlflowClient
from qrl.registry.history import MIRRORED, PREVIOUS, PROMOTE, REFUSE, ROLLBACK, USUAL, History
from qrl.registry.versions import Version, versions_of
from qrl.tracking import store_errors


def resolve(name: str, stage: str | int, history: History | None = None) -> Version:
    """Return the version behind a stage, resolved once.

    Args:
        name: the registered model.
        stage: one that it has (`stages_of`), one of them with `-previous`, Staging, Production, or a version number.
        history: the model's, if that was read already.

    Raises:
        BadInput: the stage, model or version is unknown.
    """
    return _resolve(history or pointers.current(name), stage)


def _resolve(history: History, address: str | int) -> Version:
    alias = history.state.behind(str(address))
    if re.fullmatch(r"[1-9][0-9]*", alias):
        return _version_by_number(history, int(alias))
    stage = alias.removesuffix(PREVIOUS)
    if stage not in names.STAGES and stage not in _declared_stages(history):
        raise _unknown_stage(history, str(address))
    number = history.state.aliases().get(alias)
    if number is None:
        raise _no_version(history, stage, alias)
    try:
        entry = MlflowClient().get_model_version(history.name, str(number))
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise store_errors.explain(error) or error from None
        raise BadInput(
            f"Version {number} of '{history.name}', which holds {alias}, was deleted: promote another one to {stage}, "
            "or roll it back."
        ) from None
    return Version.of(entry, history, stage)


def _version_by_number(history: History, number: int) -> Version:
    entry = versions.version_of(history.name, number)
    if entry:
        return Version.of(entry, history)
    registered = sorted(int(entry.version) for entry in versions_of(history.name))
    listed = ", ".join(map(str, registered)) or "none; `mlflow run .` or `python -m qrl study` makes them"
    raise BadInput(f"'{history.name}' has no version {number}: registered are {listed}.")


def _unknown_stage(history: History, address: str) -> BadInput:
    declared_stages = _declared_stages(history)
    previous = [stage + PREVIOUS for stage in declared_stages]
    expected = (*declared_stages, *MIRRORED, "a version number", *previous)
    hint = " (the base model's stage is `base`)" if address.lower() == "none" else ""
    return BadInput(f"There is no stage '{address}'{hint}: expected one of {', '.join(expected)}.")


def _no_version(history: History, stage: str, alias: str) -> BadInput:
    """Return the error of a stage that no version holds, with the stages and models that there are."""
    if alias != stage:
        return BadInput(f"Stage {stage} of '{history.name}' has had no other version, so there is no {alias}.")
    held_stages = [stage for stage in _declared_stages(history) if stage in history.state.at]
    clause = f"it has {', '.join(held_stages)}; " if held_stages else ""
    models = ", ".join(sorted(model.name for model in MlflowClient().search_registered_models())) or "none"
    return BadInput(
        f"Stage {alias} of '{history.name}' has no version yet ({clause}registered models here: {models}; choose one "
        "with --registered_name): `mlflow run .` makes all, "
        f"`python -m qrl promote --stage {alias} --cell RUN` makes this one from an evaluation."
    )


def stages_of(name: str) -> dict[str, Stage]:
    """Return the stages of a registered model by name: those that were declared for it, or else base, grpo and awq."""
    return _declared_stages(pointers.current(name))


def _declared_stages(history: History) -> dict[str, Stage]:
    return history.state.stages or dict(USUAL)


def check_stages(name: str, stages: Iterable[Stage]) -> dict[str, Stage]:
    """Return a model's stages by name, as `stages_of`.

    Raises:
        BadInput: a stage of the recipe, which `stages` are, is one of the model's but of another cell.
    """
    versions.model_of(name, make=True)
    history = pointers.current(name)
    for stage in stages:
        declared = history.state.stages.get(stage.stage)
        if declared and declared.cell != stage.cell:
            conflict = f"is the cell {declared.cell}, but this recipe declares {stage.cell}"
            raise BadInput(
                f"Stage {stage.stage} of '{name}' {conflict}: give the stage another name in promote.stages, or set "
                "registered_name."
            )
    return _declared_stages(history)


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
    digest = _digest(name, version)

    def decide(history: History) -> dict[str, Any]:
        promoted = (USUAL | history.state.stages).get(stage) if isinstance(stage, str) else stage
        if promoted is None:
            raise _no_stage(str(stage), "to promote to", _declared_stages(history))
        _check_unmoved(history, promoted.stage, version, expected or {})
        return {
            **record,
            "action": PROMOTE,
            "stage": promoted.stage,
            "declared": str(promoted),
            "version": version,
            "digest": digest,
        }

    history = pointers.append(name, decide)
    return _resolve(history, stage.stage if isinstance(stage, Stage) else stage)


def _check_unmoved(history: History, promoted: str, version: int, expected: Mapping[str, int | None]) -> None:
    """Raise QrlError if a stage that the gate looked at has moved to another version since."""
    for stage, judged_version in expected.items():
        actual = history.state.at.get(stage)
        is_done = stage == promoted and actual == version
        if actual != judged_version and not is_done:
            message = f"Stage {stage} of '{history.name}' moved to version {actual} while version {version} was judged"
            raise QrlError(f"{message}: run promote again.")


def refuse(name: str, stage: str, version: int, *, record: Mapping[str, Any]) -> None:
    """Record why a version was refused; no pointer moves."""
    decision = {"action": REFUSE, "stage": stage, "version": version, "digest": _digest(name, version)}
    pointers.append(name, lambda _history: {**record, **decision})


def rollback(name: str, stage: str, public_key: str = "") -> Version:
    """Swap a stage with `<stage>-previous`; a second rollback swaps back.

    Args:
        name: the registered model.
        stage: one that it has.
        public_key: the key or certificate that must have signed the version, from `signing.load_public_key`.

    Raises:
        BadInput: the model has no such stage, or the stage had no other version before.
        GateRefused: it has no such signature.
        QrlError: the files of that version are gone or changed; nothing is moved.
    """

    def decide(history: History) -> dict[str, Any]:
        declared_stages = _declared_stages(history)
        if stage not in names.STAGES and stage not in declared_stages:
            raise _no_stage(stage, "to roll back", declared_stages)
        current = history.state.at.get(stage)
        previous = history.state.before.get(stage)
        if current is None or previous is None or current == previous:
            raise BadInput(f"Stage {stage} of '{name}' has had no other version, so there is nothing to roll back to.")
        target = _resolve(history, stage + PREVIOUS)
        versions.verify(target, public_key)  # never to a version that could not be served
        gate = target.gate(stage)
        return {
            "action": ROLLBACK,
            "stage": stage,
            "version": previous,
            "digest": target.digest,
            "run": gate.run if gate else "",
            "reasons": [f"Returned from version {current}."],
        }

    if versions.model_of(name) is None:
        raise BadInput(f"There is no registered model '{name}', so there is nothing to roll back to.")
    return _resolve(pointers.append(name, decide), stage)


def _digest(name: str, version: int) -> str:
    """Return the digest of a version, which no decision changes."""
    return _resolve(History(name), version).digest


def check_stage(stage: str, stages: Iterable[Stage], name: str | None = None) -> None:
    """Check that a stage is one of a recipe or of a registered model.

    Args:
        stage: its name.
        stages: those of the recipe.
        name: the registered model; None: any.

    Raises:
        BadInput: neither has it.
    """
    recipe_stages = [declared.stage for declared in stages]
    if stage in recipe_stages:
        return
    model_stages: dict[str, Stage] = {}
    if name:
        model_stages = _declared_stages(pointers.read_only(name))
    else:
        for model in MlflowClient().search_registered_models():
            with suppress(QrlError):  # somebody else's record may be damaged
                model_stages |= _declared_stages(pointers.read_only(model.name))
    if stage not in model_stages:
        raise _no_stage(stage, "to promote to", model_stages or recipe_stages)


def _no_stage(stage: str, use: str, stages: Iterable[str]) -> BadInput:
    return BadInput(
        f"There is no stage '{stage}' {use}: expected one of {', '.join(stages)}, or one that promote.stages declares, "
        f"such as {names.BASE}=base:full,{stage}=VARIANT:SCHEME."
    )
