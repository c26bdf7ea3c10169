"""Runs that always end: a step's own run, or the one `mlflow run` opened for it, and a nested run per cell.

Whatever happens inside, the run is ended with a status and, unless it finished, with a sentence in the tag
`qrl.reason`. A gate's refusal is a result: the run is FINISHED, and the tag `qrl.verdict` is `refused`. A run that a
living `mlflow run` opened gets its final status from there, FINISHED or FAILED by the exit code; the tags remain.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import NoReturn

import mlflow
from mlflow.entities import Run

from qrl import names
from qrl.errors import BadInput, GateRefused, QrlError, first_line
from qrl.recipe import Recipe
from qrl.tasks import own, prompt
from qrl.tracking import contents, dead_runs, models, owners, signals, store, store_errors

active_id = contents.active_id
PARENT = "mlflow.parentRunId"
NOTE = "mlflow.note.content"
_KIND = "mlflow.experimentKind"  # of an experiment, for the UI
_STOPPED = "Stopped by Ctrl-C."
_SYSTEM_METRICS_EVERY_S = 5  # a tiny step ends before MLflow's ten


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
        system_metrics: record CPU, memory and GPU as metrics, too.

    Raises:
        BadInput: MLFLOW_RUN_ID names a run that the store does not hold; or the store filled up meanwhile.
        SystemExit: 130 or 143 after Ctrl-C or SIGTERM; the run is ended as KILLED.
    """
    signals.guard()
    dead_runs.sweep()
    joined = "MLFLOW_RUN_ID" in os.environ
    run = _start(run_name or name, {names.TAG_STEP: name, **(tags or {})}, system_metrics)
    try:
        with _ended(run):
            _mark_experiment(run.info.experiment_id)
            _log_settings(recipe, sections, params or {})
            started_at = time.time()
            yield run
            durations = {names.SECONDS: time.time() - started_at, "step/startup_s": started_at - owners.started_at()}
            contents.write_with_retries(partial(mlflow.log_metrics, durations))
    except KeyboardInterrupt as stopped:
        is_of_study = PARENT in run.data.tags  # which prints this itself
        if not is_of_study:
            ending = "The run is ended as KILLED; run the same command again to resume."
            print(f"{stopped or _STOPPED} {ending}", file=sys.stderr)
        raise SystemExit(signals.exit_code(stopped)) from None
    finally:
        if not joined:
            show_page(run.info.run_id)


def _mark_experiment(experiment_id: str) -> None:
    """Let the UI show an experiment as model development, unless somebody chose another kind."""
    if _KIND not in mlflow.get_experiment(experiment_id).tags:
        mlflow.MlflowClient().set_experiment_tag(experiment_id, _KIND, "custom_model_development")


def _log_settings(recipe: Recipe | None, sections: tuple[str, ...], params: Mapping[str, object]) -> None:
    """Log a step's params into the active run, and the whole recipe for the steps that use its result."""
    if recipe is None:
        contents.log_params(params)
        return
    settings = {**recipe.flat(*sections), "prompt_hash": prompt.template_hash(prompt.of_recipe(recipe))}
    contents.log_params({**settings, **params})
    if recipe.model.startswith("models:/"):  # `mlflow run` may have logged the stage, as typed, for the param
        contents.tag(names.TAG_MODEL_VERSION, recipe.model)
    mlflow.log_text(recipe.dump(), names.RECIPE)
    contents.log_files(own.files(recipe.task, recipe.train.rewards))


def show_page(run_id: str) -> None:
    """Print the address of a run's page, if a server has it."""
    server = mlflow.get_tracking_uri().rstrip("/")
    if server.startswith("http"):
        with suppress(mlflow.MlflowException):
            print(f"Look    {server}{page_of(run_id)}")


def page_of(run_id: str) -> str:
    """Return where MLflow's UI shows a run, after the address of its server."""
    return f"/#/experiments/{mlflow.get_run(run_id).info.experiment_id}/runs/{run_id}"


@contextmanager
def child(
    run_name: str, *, params: Mapping[str, object] | None = None, tags: Mapping[str, object] | None = None
) -> Iterator[mlflow.ActiveRun]:
    """Yield a run nested in the active one, for a cell; an error ends it as FAILED and is raised again."""
    run = _start(run_name, tags or {})
    with _ended(run):
        contents.write_with_retries(lambda: mlflow.log_params(dict(params or {})))
        yield run


def close_opened(error: BaseException) -> None:
    """End the run that `mlflow run` opened if no step has joined it: after bad input, or a signal during imports."""
    run_id = os.environ.pop("MLFLOW_RUN_ID", None)
    if run_id:
        _end(run_id, error, partial(mlflow.MlflowClient().set_terminated, run_id))  # the variable may be stale


def close_stopped(signum: int) -> NoReturn:
    """End as KILLED the runs of this process, which `signals.end_now` has replaced by a fresh interpreter, and exit."""
    stopped = signals.Stopped(signum)
    signals.bury_children()  # their runs are swept below
    try:
        store.prepare()
        for run in contents.find_runs(f"tags.`{names.TAG_PID}` = '{owners.this_process()}'"):
            _end(run.info.run_id, stopped, partial(mlflow.MlflowClient().set_terminated, run.info.run_id))
        close_opened(stopped)
        dead_runs.sweep()  # of the processes that were killed with this one
    except Exception as failure:
        print(f"The run could not be ended ({first_line(failure)}); the next command ends it.", file=sys.stderr)
    sys.exit(stopped.code)


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
            address = mlflow.get_tracking_uri()
            raise BadInput(f"MLFLOW_RUN_ID names run {run_id}, which {address} does not hold: unset it.") from None
        raise store_errors.explain(error) or error from None


def _start(run_name: str, tags: Mapping[str, object], system_metrics: bool = False) -> mlflow.ActiveRun:
    """Begin a run that has its process's identity from the first moment, or join the one that MLFLOW_RUN_ID names."""
    mlflow.set_system_metrics_sampling_interval(_SYSTEM_METRICS_EVERY_S)
    signals.note_run()
    with _explained(os.environ.get("MLFLOW_RUN_ID")):  # which MLflow takes out of the environment
        return mlflow.start_run(
            run_name=run_name,
            nested=mlflow.active_run() is not None,
            tags={names.TAG_PID: owners.this_process(), **tags},
            log_system_metrics=system_metrics,
        )


@contextmanager
def _ended(run: mlflow.ActiveRun) -> Iterator[None]:
    """End the active run with the status that fits, and pass the error on."""
    try:
        yield
    except BaseException as error:
        reported = error
        if isinstance(error, Exception):
            reported = store_errors.explain(error) or error
        _end(run.info.run_id, reported, partial(_end_active, run.info.run_id))
        if reported is error:
            raise
        raise reported from error
    try:
        _end_active(run.info.run_id, "FINISHED")
    except Exception as failure:
        raise store_errors.explain(failure) or failure from None


def _end_active(run_id: str, status: str) -> None:
    """End the active run; MLflow forgets which it is before it writes, so a second try must name it."""
    try:
        mlflow.end_run(status)
    except mlflow.MlflowException:
        contents.write_with_retries(partial(mlflow.MlflowClient().set_terminated, run_id, status))


def _end(run_id: str, error: BaseException, end: Callable[[str], object]) -> None:
    """Discard a run's half-made models, tag it with the error's reason and `end` it with its status.

    A failure is printed: the first error counts.
    """
    status, code, reason = _outcome(error)
    tags = {names.TAG_REASON: reason, names.TAG_EXIT_CODE: str(code)}
    # Each of the three is tried: a store that refuses one may accept the next.
    try:
        models.abandon(run_id)  # first: a run that has its reason is not swept
    except Exception as failure:
        print(f"The half-made models of run {run_id} were not discarded: {first_line(failure)}", file=sys.stderr)
    try:
        if isinstance(error, GateRefused):
            status = "FINISHED"
            tags |= _refusal_tags(run_id, reason)
        if status == "KILLED" and dead_runs.TAG_JOB in mlflow.get_run(run_id).data.tags:
            tags = {}  # the cluster knows why, and whoever asks it may have written that already
        contents.tag_run(run_id, tags)
    except Exception as failure:
        print(f"Run {run_id} was not told its reason: {first_line(failure)}", file=sys.stderr)
    try:
        end(status)
    except Exception as failure:
        print(f"Run {run_id} could not be ended: {first_line(failure)}", file=sys.stderr)


def _outcome(error: BaseException) -> tuple[str, int, str]:
    """Return the status of a run that an error ended, its exit code, and the reason in a sentence."""
    if isinstance(error, KeyboardInterrupt):
        return "KILLED", signals.exit_code(error), str(error) or _STOPPED
    code = getattr(error, "exit_code", 1)
    if isinstance(error, QrlError):
        return "FAILED", code, str(error)
    return "FAILED", code, f"{type(error).__name__}: {first_line(error)}"


def _refusal_tags(run_id: str, reason: str) -> dict[str, str]:
    """Return the tags of a refused run; its description begins with the reason, and explains MLflow's FAILED."""
    tags = mlflow.get_run(run_id).data.tags
    explanation = ""
    if "mlflow.project.env" in tags and PARENT not in tags:  # `mlflow run` will overwrite the status
        explanation = f" MLflow calls this run FAILED because the command ended with exit code {GateRefused.exit_code}."
    return {names.TAG_VERDICT: "refused", NOTE: f"**{reason}**{explanation}\n\n{tags.get(NOTE, '')}"}
