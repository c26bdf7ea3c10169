"""A record for models that have none: begun in one place whoever begins it, with what the model's tags say so far.

Stores of before kept decisions in tags of versions (`qrl.gate.<stage>`, `qrl.gate.<stage>.record`), stages in
`qrl.stages` and `qrl.mirror.<MLflow's stage>`, and pointers in aliases alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mlflow import MlflowException
from mlflow.entities.model_registry import ModelVersion, RegisteredModel
from pydantic import ValidationError

from qrl import names
from qrl.errors import BadInput, QrlError
from qrl.files import reading
from qrl.recipe.stages import Stage
from qrl.registry import history
from qrl.registry.client import MlflowClient
from qrl.registry.history import ADOPT, MIRRORED, PREVIOUS, PROMOTE, REFUSE, USUAL
from qrl.tracking import signals


def begin(model: RegisteredModel, versions: Sequence[ModelVersion]) -> str:
    """Return the run that holds a model's record, made if there is none; two hosts that begin at once get the same.

    A parameter of the run that made the first version names it: MLflow writes a parameter once. So the record is found
    again if the model's tag was deleted.
    """
    client, key = MlflowClient(), history.naming(model.name)
    ordered = sorted(versions, key=lambda entry: int(entry.version))
    made_by = [run for entry in ordered if (run := history.run_of(entry.run_id))]
    known = [run_id for run in made_by for run_id in history.named(run, model.name)]
    chosen = next(filter(history.run_of, known), None)
    if chosen is None:
        key += f".{len(known)}" if known else ""  # those that were named are gone
        origin = next((run for run in made_by if run.info.lifecycle_stage == "active"), None)
        tags = {names.TAG_STEP: "registry", names.TAG_PID: signals.identity()}
        experiment, began = (origin.info.experiment_id, origin.info.start_time) if origin else ("0", None)
        signals.note_run()
        run = client.create_run(experiment, began, tags, run_name=f"decisions on {model.name}")
        client.set_terminated(run.info.run_id, "FINISHED", began)
        chosen = run.info.run_id
        if origin:
            failure = None
            try:
                client.log_param(origin.info.run_id, key, chosen)
            except MlflowException as error:  # another host was first, or it may not be written
                failure = error
            chosen = client.get_run(origin.info.run_id).data.params.get(key)
            if chosen != run.info.run_id:
                client.delete_run(run.info.run_id)
            if chosen is None:
                raise failure or QrlError(f"The record of '{model.name}' was not written: run the command again.")
        client.set_registered_model_tag(model.name, names.TAG_APPLIED, "0")  # of a record that is gone
    client.set_registered_model_tag(model.name, names.TAG_HISTORY, chosen)
    return chosen


def former(model: RegisteredModel, versions: Sequence[ModelVersion]) -> dict[str, Any] | None:
    """Return the decision that takes over what a model's tags and aliases say; None if they say nothing.

    An alias counts only if the gate of its stage let the version in.
    """
    listed = _listed(model)
    stages = USUAL | listed
    gates = [gate for entry in versions for gate in _gates(entry)]
    passed = {(gate["stage"], gate["version"]) for gate in gates if gate["action"] == PROMOTE}
    aliases = {alias: int(version) for alias, version in model.aliases.items()}
    ours = {alias: alias.removesuffix(PREVIOUS) for alias in aliases if alias.removesuffix(PREVIOUS) in stages}
    if not (gates or ours or listed):
        return None
    kept = {alias: stage for alias, stage in ours.items() if (stage, aliases[alias]) in passed}
    usual = {stage.mlflow: stage.stage for stage in USUAL.values() if stage.mlflow in MIRRORED}
    adopted = {
        "at": {stage: aliases[alias] for alias, stage in kept.items() if alias == stage},
        "before": {stage: aliases[alias] for alias, stage in kept.items() if alias != stage and stage in kept},
        "declared": {stage: str(each) for stage, each in stages.items() if stage in kept or stage in listed},
        "mirrors": {each: model.tags.get(names.TAG_MIRROR + each, usual[each]) for each in MIRRORED},
        "gates": gates,
    }
    reasons = ["Taken over from a store without a record."]
    left = ", ".join(f"{alias} (version {aliases[alias]})" for alias in ours if alias not in kept)
    reasons += [f"No gate let these in, so they are no longer pointers: {left}."] if left else []
    return {"action": ADOPT, "reasons": reasons, "adopted": adopted}


def _listed(model: RegisteredModel) -> dict[str, Stage]:
    """Return the stages that a model's tag lists; raise BadInput if it cannot be read."""
    texts = [text for text in model.tags.get(names.TAG_STAGES, "").split(",") if text]
    try:
        return {stage.stage: stage for stage in map(Stage.model_validate, texts)}
    except ValidationError as error:
        wrong = f"The tag {names.TAG_STAGES} of '{model.name}' cannot be read ({error.errors()[0]['msg']})"
        raise BadInput(f"{wrong}: set it to STAGE=VARIANT:SCHEME,… as in promote.stages, or delete it.") from None


def _gates(entry: ModelVersion) -> list[dict[str, Any]]:
    """Return a version's decisions, as `Record` takes them.

    Raises:
        BadInput: a tag cannot be read.
    """
    gates = []
    for tag, verdict in entry.tags.items():
        if (stage := names.judged_stage(tag)) is None:
            continue
        simple = verdict in ("passed", "refused")
        text = entry.tags.get(names.gate_record_tag(stage), "{}") if simple else verdict  # once one tag held both
        try:
            record = reading.parsed(text)
            gate = _gate(stage, int(entry.version), verdict if simple else record.get("verdict", ""), record)
            history.Record.of(gate)
            gates.append(gate)
        except (AttributeError, TypeError, ValueError):
            wrong = f"The tag {tag} of version {entry.version} of '{entry.name}' cannot be read"
            raise BadInput(f"{wrong}: delete it, and promote the version again.") from None
    return gates


def _gate(stage: str, version: int, verdict: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a decision from its JSON, in the last form or the one before it (`cell`, `why`, `facts`, `at`)."""
    return {
        "action": PROMOTE if verdict in ("passed", "promoted") else REFUSE,
        "stage": stage,
        "version": version,
        "run": record.get("run") or record.get("cell", ""),
        "digest": record.get("digest", ""),
        "reasons": tuple(record.get("reasons") or filter(None, [record.get("why")])),
        "bounds": dict(record.get("bounds") or record.get("facts", {})),
        "time": record.get("time") or record.get("at", ""),
        "study": record.get("study", ""),
    }
