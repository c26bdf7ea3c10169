"""Runs that always end: a step's own run, or the one `mlflow run` opened for it, and a nested run per cell.

Whatever happens inside, the run is ended with a status and, unless it finished, with a sentence in the tag `qrl.reason`.
A run that a living `mlflow run` opened gets its last status from there, FINISHED or FAILED by the exit code; the tags stay.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from qrl import names
from qrl.errors import BadInput, QrlError, first_line
from qrl.recipe import Recipe
from qrl.tasks import prompt
from qrl.tracking import contents, signals, store

if TYPE_CHECKING:
    import mlflow

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
    """The active run of one step: joins the one named by MLFLOW_RUN_ID, or starts one.

    Args:
        name: the step, for the tag qrl.step and the run's name.
        recipe: logged as params, under keys that MLflow has not logged already; its prompt template by hash too.
        sections: the recipe's sections that this step reads, logged with its top level; none named: all of it.
        params: further params, `variant` and `scheme` say.
        tags: further tags.
        run_name: what the UI shows; default: the step's name.
        system_metrics: record CPU, memory and GPU beside the metrics.

    Raises:
        BadInput: MLFLOW_RUN_ID names a run that the store does not hold; or the store filled up meanwhile.
        SystemExit: 130 or 143 after Ctrl-C or SIGTERM; the run is ended as KILLED.
    """
    import mlflow

    signals.guard()
    store.sweep()
    run = _start(run_name or name, system_metrics)
    try:
        with _ended(run):
            store.mark_experiment(run.info.experiment_id)
            mlflow.set_tags({names.TAG_STEP: name, names.TAG_PID: signals.identity(), **(tags or {})})
            asked = {**recipe.flat(*sections), "prompt_hash": prompt.template_hash(recipe.prompt)} if recipe else {}
            contents.log_params({**asked, **(params or {})})
            began = time.time()
            yield run
            mlflow.log_metrics({names.SECONDS: time.time() - began, "step/startup_s": began - signals.started()})
    except KeyboardInterrupt as stopped:
        print(
            f"{stopped or 'Stopped by Ctrl-C.'} The run is ended as KILLED; run the same command again to go on.",
            file=sys.stderr,
        )
        raise SystemExit(signals.exit_code(stopped)) from None


@contextmanager
def child(
    run_name: str, *, params: Mapping[str, object] | None = None, tags: Mapping[str, object] | None = None
) -> Iterator[mlflow.ActiveRun]:
    """A run nested in the active one, for a cell; an error ends it FAILED and goes on to the caller, who may go on as well.

    Args:
        run_name: `names.cell_name(variant, scheme)` for a cell.
        params: `variant`, `scheme`, `task`: the compare view reads params.
        tags: further tags.
    """
    import mlflow

    run = mlflow.start_run(run_name=run_name, nested=True)
    with _ended(run):
        mlflow.set_tags({names.TAG_PID: signals.identity(), **(tags or {})})
        mlflow.log_params(dict(params or {}))
        yield run


def close_opened(error: BaseException) -> None:
    """End the run that `mlflow run` opened, where no step has joined it: bad input, or a signal during imports."""
    if run_id := os.environ.pop("MLFLOW_RUN_ID", None):
        import mlflow

        try:
            _end(mlflow.MlflowClient(), run_id, error)
        except Exception as deaf:  # a stale variable, say; the first error is the one to tell
            print(
                f"The run {run_id}, which MLFLOW_RUN_ID names, could not be ended: {first_line(deaf)}", file=sys.stderr
            )


def active_id() -> str:
    """Id of the active run."""
    import mlflow

    return mlflow.active_run().info.run_id


def is_launched() -> bool:
    """Whether the active run, or the one that is to be joined, lies below another one: a study's step, not a command of its own."""
    import mlflow

    run_id = active_id() if mlflow.active_run() else os.environ.get("MLFLOW_RUN_ID")
    return bool(run_id) and "mlflow.parentRunId" in opened(run_id).data.tags


def opened(run_id: str) -> mlflow.entities.Run:
    """A run by its id.

    Raises:
        BadInput: the store does not hold it, which then was named by MLFLOW_RUN_ID.
    """
    import mlflow

    try:
        return mlflow.get_run(run_id)
    except mlflow.MlflowException as error:
        raise _unknown(error, run_id) or store.sentence(error) or error from None


def _unknown(error: mlflow.MlflowException, run_id: str) -> BadInput | None:
    import mlflow

    if error.error_code == "RESOURCE_DOES_NOT_EXIST":
        return BadInput(f"MLFLOW_RUN_ID names run {run_id}, which {mlflow.get_tracking_uri()} does not hold: unset it.")
    return None


def _start(run_name: str, system_metrics: bool) -> mlflow.ActiveRun:
    import mlflow

    if system_metrics:
        mlflow.set_system_metrics_sampling_interval(_SYSTEM_METRICS_EVERY)
    named = os.environ.get("MLFLOW_RUN_ID")
    try:
        return mlflow.start_run(
            run_name=run_name, nested=mlflow.active_run() is not None, log_system_metrics=system_metrics
        )
    except mlflow.MlflowException as error:
        raise (_unknown(error, named) if named else None) or store.sentence(error) or error from None


@contextmanager
def _ended(run: mlflow.ActiveRun) -> Iterator[None]:
    """End the active run with the status that fits, and pass the error on."""
    import mlflow

    try:
        yield
    except BaseException as error:
        told = (store.sentence(error) if isinstance(error, Exception) else None) or error
        try:
            _end(mlflow.MlflowClient(), run.info.run_id, told)
        except Exception as deaf:  # the store itself may be what failed; the first error is the one to tell
            print(f"The run {run.info.run_id} could not be ended: {first_line(deaf)}", file=sys.stderr)
        finally:
            _leave("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
        if told is error:
            raise
        raise told from error
    else:
        _leave("FINISHED")


def _leave(status: str) -> None:
    """Take the run off MLflow's stack, stop its monitor, set its status."""
    import mlflow

    try:
        mlflow.end_run(status)
    except Exception as deaf:
        if status == "FINISHED":
            raise store.sentence(deaf) or deaf from None


def _end(client: mlflow.MlflowClient, run_id: str, error: BaseException) -> None:
    stopped = isinstance(error, KeyboardInterrupt)
    code = signals.exit_code(error) if stopped else getattr(error, "exit_code", 1)
    client.set_tag(run_id, names.TAG_REASON, _reason(error))
    client.set_tag(run_id, names.TAG_EXIT_CODE, str(code))
    client.set_terminated(run_id, "KILLED" if stopped else "FAILED")


def _reason(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return str(error) or "Stopped by Ctrl-C."
    if isinstance(error, QrlError):
        return str(error)[: contents.MAX_TAG]
    return f"{type(error).__name__}: {first_line(error)}"[: contents.MAX_TAG]
