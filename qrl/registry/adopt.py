"""A record for models that have none: begun in one place whoever begins it, with what the model's tags say so far.

A new model has no tags yet. A model whose record was lost still has its aliases, and the gates' decisions in tags of
its versions (`qrl.gate.<stage>`, `qrl.gate.<stage>.record`): its new record begins with these.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mlflow import MlflowException
from mlflow.entities import Run
from mlflow.entities.model_registry import ModelVersion, RegisteredModel

from qrl import names
from qrl.errors import BadInput, QrlError
from qrl.files import reading
from qrl.registry import history
from qrl.registry.client import MlflowClient
from qrl.registry.history import ADOPT, MIRRORED, PREVIOUS, PROMOTE, REFUSE, USUAL
from qrl.tracking import owners, signals


def begin(model: RegisteredModel, versions: Sequence[ModelVersion]) -> str:
    """Return the run that holds a model's record, made if there is none; two hosts that begin at once get the same.

    A parameter of the run that made the first version names it: MLflow writes a parameter once. So the record is found
    again if the model's tag was deleted.
    """
    client = MlflowClient()
    oldest_first = sorted(versions, key=lambda entry: int(entry.version))
    makers = [run for run in (history.find_run(entry.run_id) for entry in oldest_first) if run]
    named_run_ids: list[str] = []
    for maker in makers:
        named_run_ids += history.record_runs(maker, model.name)
    run_id = next(filter(history.find_run, named_run_ids), None)
    if run_id is None:
        # It may count decisions of a lost record. First of all: a kill after the maker's parameter leaves a record that
        # the next command finds, and would refuse as cut off if more had been carried out than it holds.
        client.set_registered_model_tag(model.name, names.TAG_APPLIED, "0")
        run_id = _make_record(model.name, makers, len(named_run_ids))
    client.set_registered_model_tag(model.name, names.TAG_HISTORY, run_id)
    return run_id


def _make_record(name: str, makers: Sequence[Run], lost_records: int) -> str:
    """Make a run for a model's record, and let the oldest maker's run name it; return the run that it names.

    Args:
        name: the registered model.
        makers: the runs that made its versions, oldest first.
        lost_records: how many runs were named before and are gone.
    """
    client = MlflowClient()
    maker = next((run for run in makers if run.info.lifecycle_stage == "active"), None)
    experiment = maker.info.experiment_id if maker else "0"
    started = maker.info.start_time if maker else None
    tags = {names.TAG_STEP: "registry", names.TAG_PID: owners.this_process()}
    signals.note_run()
    run_id = client.create_run(experiment, started, tags, run_name=f"decisions on {name}").info.run_id
    client.set_terminated(run_id, "FINISHED", started)
    if maker is None:
        return run_id

    param = history.record_param(name)
    if lost_records:
        param += f".{lost_records}"
    failure = None
    try:
        client.log_param(maker.info.run_id, param, run_id)
    except MlflowException as error:  # another host was first, or it may not be written
        failure = error
    named_run_id = client.get_run(maker.info.run_id).data.params.get(param)
    if named_run_id != run_id:
        client.delete_run(run_id)
    if named_run_id is None:
        raise failure or QrlError(f"The record of '{name}' was not written: run the command again.")
    return named_run_id


def first_decision(model: RegisteredModel, versions: Sequence[ModelVersion]) -> dict[str, Any] | None:
    """Return the decision that takes over what a model's tags and aliases say; None if they say nothing.

    An alias counts only if the gate of its stage let the version in.
    """
    gates = [gate for entry in versions for gate in _gates(entry)]
    passed = {(gate["stage"], gate["version"]) for gate in gates if gate["action"] == PROMOTE}
    aliases = {alias: int(version) for alias, version in model.aliases.items()}
    stage_of = {alias: alias.removesuffix(PREVIOUS) for alias in aliases if alias.removesuffix(PREVIOUS) in USUAL}
    if not (gates or stage_of):
        return None

    earned = {alias: stage for alias, stage in stage_of.items() if (stage, aliases[alias]) in passed}
    adopted = {  # the fields of `State`
        "at": {alias: aliases[alias] for alias in earned if alias in USUAL},
        "before": {
            stage: aliases[alias] for alias, stage in earned.items() if alias == stage + PREVIOUS and stage in earned
        },
        "declared": {name: str(stage) for name, stage in USUAL.items() if name in earned},
        "mirrors": {stage.mlflow: stage.stage for stage in USUAL.values() if stage.mlflow in MIRRORED},
        "gates": gates,
    }

    reasons = ["Taken over from a store without a record."]
    unearned = [f"{alias} (version {aliases[alias]})" for alias in stage_of if alias not in earned]
    if unearned:
        reasons.append(f"No gate let these in, so they are no longer pointers: {', '.join(unearned)}.")
    return {"action": ADOPT, "reasons": reasons, "adopted": adopted}


def _gates(entry: ModelVersion) -> list[dict[str, Any]]:
    """Return a version's decisions, as `Record` takes them.

    Raises:
        BadInput: a tag cannot be read.
    """
    gates = []
    for tag, verdict in entry.tags.items():
        stage = names.judged_stage(tag)
        if stage is None:
            continue
        record_tag = names.gate_record_tag(stage)
        if verdict not in ("passed", "refused"):
            raise _unreadable(tag, entry)
        try:
            record = reading.parse_json(entry.tags.get(record_tag, "{}"))
            gate = _gate(stage, int(entry.version), verdict, record)
            history.Record.of(gate)
        except (AttributeError, TypeError, ValueError):
            raise _unreadable(record_tag, entry) from None
        gates.append(gate)
    return gates


def _unreadable(tag: str, entry: ModelVersion) -> BadInput:
    message = f"The tag {tag} of version {entry.version} of '{entry.name}' cannot be read"
    return BadInput(f"{message}: delete it, and promote the version again.")


def _gate(stage: str, version: int, verdict: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a decision from the tags that show it."""
    return {
        "action": PROMOTE if verdict == "passed" else REFUSE,
        "stage": stage,
        "version": version,
        "run": record.get("run", ""),
        "digest": record.get("digest", ""),
        "reasons": tuple(record.get("reasons", ())),
        "bounds": dict(record.get("bounds", {})),
        "time": record.get("time", ""),
        "study": record.get("study", ""),
    }
