"""Runs that always end: a step's own run, or the one `mlflow run` opened for it, and a nested run per cell.

Whatever happens inside, the run is ended with a status and, unless it finished, with a sentence in the tag
`qrl.reason`. A run that a living `mlflow run` opened gets its final status from there, FINISHED or FAILED by the exit
code; the tags remain.
"""

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import mlflow
from mlflow.entities import Run

from qrl import names
from qrl.errors import BadInput, QrlError, first_line
from qrl.recipe import Recipe
from qrl.tasks import prompt
from qrl.tracking import contents, signals, store

active_id = contents.active_id
PARENT = "mlflow.parentRunId"
_KIND = "mlflow.experimentKind"  # by which the UI shows it as model development
_SYSTEM_METRICS_EVERY = 5  # seconds; a tiny step ends before MLflow's ten


@contextmanager
def step(
    name: str,
    recipe: Recipe | None = None,
    *,
    sections: tuple[str, ...] = (),
    params: Mapping[str, object] | None = None,
    tags: Mapping[str, object] | None = None,
    run_name: str | None = None,
    system_metrics: bool = False,
) -> Iterator[mlflow.ActiveRun]:
    """Yield the active run of one step: the one that MLFLOW_RUN_ID names, or a new one.

    Args:
        name: the step, for the tag qrl.step and the run's name.
        recipe: logged as params, under keys that MLflow has not logged already, and whole as recipe.yaml; its prompt
            template by hash too.
        sections: the recipe's sections that this step reads, logged with its top level; default: all.
        params: further params, e.g. `variant` and `scheme`.
        tags: further tags.
        run_name: what the UI shows; default: the step's name.
        system_metrics: record CPU, memory and GPU beside the metrics.

    Raises:
        BadInput: MLFLOW_RUN_ID names a run that the store does not hold; or the store filled up meanwhile.
        SystemExit: 130 or 143 after Ctrl-C or SIGTERM; the run is ended as KILLED.
    """
    signals.guard()
    store.sweep()
    run = _start(run_name or name, system_metrics)
    try:
        with _ended(run):
            if _KIND not in mlflow.get_experiment(run.info.experiment_id).tags:
                mlflow.MlflowClient().set_experiment_tag(run.info.experiment_id, _KIND, "custom_model_development")
            mlflow.set_tags({names.TAG_STEP: name, names.TAG_PID: signals.identity(), **(tags or {})})
            settings = {**recipe.flat(*sections), "prompt_hash": prompt.template_hash(recipe.prompt)} if recipe else {}
            contents.log_params({**settings, **(params or {})})
            if recipe:  # whole, for steps that go on from here
                mlflow.log_text(recipe.dump(), names.RECIPE)
            began = time.time()
            yield run
            mlflow.log_metrics({names.SECONDS: time.time() - began, "step/startup_s": began - signals.started()})
    except KeyboardInterrupt as stopped:
        ending = "The run is ended as KILLED; run the same command again to resume."
        print(f"{stopped or 'Stopped by Ctrl-C.'} {ending}", file=sys.stderr)
        raise SystemExit(signals.exit_code(stopped)) from None


@contextmanager
def child(
    run_name: str, *, params: Mapping[str, object] | None = None, tags: Mapping[str, object] | None = None
) -> Iterator[mlflow.ActiveRun]:
    """Yield a run nested in the active one, for a cell; an error ends it as FAILED and is raised again."""
    run = mlflow.start_run(run_name=run_name, nested=True)
    with _ended(run):
        mlflow.set_tags({names.TAG_PID: signals.identity(), **(tags or {})})
        mlflow.log_params(dict(params or {}))
        yield run


def close_opened(error: BaseException) -> None:
    """End the run that `mlflow run` opened if no step has joined it: after bad input, or a signal during imports."""
    if run_id := os.environ.pop("MLFLOW_RUN_ID", None):
        _end(run_id, error, ", from MLFLOW_RUN_ID,")  # a stale variable, maybe


def parent_id() -> str | None:
    """Return the id of the run above the active one, or above the one to be joined: a study's, for its steps."""
    run_id = active_id() if mlflow.active_run() else os.environ.get("MLFLOW_RUN_ID")
    return opened(run_id).data.tags.get(PARENT) if run_id else None


def is_launched() -> bool:
    """Return whether the active run, or the one to be joined, is a study's step and not a command of its own."""
    return parent_id() is not None


def opened(run_id: str) -> Run:
    """Return a run by its id; raise BadInput if the store does not hold it, so MLFLOW_RUN_ID is stale."""
    with _explained(run_id):
        return mlflow.get_run(run_id)


@contextmanager
def _explained(run_id: str | None) -> Iterator[None]:
    """Raise MLflow's errors as sentences; `run_id` is what MLFLOW_RUN_ID holds."""
    try:
        yield
    except mlflow.MlflowException as error:
        if run_id and error.error_code == "RESOURCE_DOES_NOT_EXIST":
            held_by = mlflow.get_tracking_uri()
            raise BadInput(f"MLFLOW_RUN_ID names run {run_id}, which {held_by} does not hold: unset it.") from None
        raise store.sentence(error) or error from None


def _start(run_name: str, system_metrics: bool) -> mlflow.ActiveRun:
    if system_metrics:
        mlflow.set_system_metrics_sampling_interval(_SYSTEM_METRICS_EVERY)
    nested = mlflow.active_run() is not None
    with _explained(os.environ.get("MLFLOW_RUN_ID")):  # which MLflow takes out of the environment
        return mlflow.start_run(run_name=run_name, nested=nested, log_system_metrics=system_metrics)


@contextmanager
def _ended(run: mlflow.ActiveRun) -> Iterator[None]:
    """End the active run with the status that fits, and pass the error on."""
    try:
        yield
    except BaseException as error:
        reported = (store.sentence(error) if isinstance(error, Exception) else None) or error
        status = _end(run.info.run_id, reported)
        with suppress(Exception):
            mlflow.end_run(status)  # takes it off MLflow's stack, too
        if reported is error:
            raise
        raise reported from error
    try:
        mlflow.end_run()
    except Exception as failure:
        raise store.sentence(failure) or failure from None


def _end(run_id: str, error: BaseException, origin: str = "") -> str:
    """End a run with the error's status, which is returned; a failure is printed, since the first error counts."""
    if isinstance(error, KeyboardInterrupt):
        status, code, reason = "KILLED", signals.exit_code(error), str(error) or "Stopped by Ctrl-C."
    else:
        status, code = "FAILED", getattr(error, "exit_code", 1)
        reason = str(error) if isinstance(error, QrlError) else f"{type(error).__name__}: {first_line(error)}"
    try:
        client = mlflow.MlflowClient()
        client.set_tag(run_id, names.TAG_REASON, reason[: contents.MAX_TAG])
        client.set_tag(run_id, names.TAG_EXIT_CODE, str(code))
        client.set_terminated(run_id, status)
    except Exception as failure:
        print(f"Run {run_id}{origin} could not be ended: {first_line(failure)}", file=sys.stderr)
    return status
