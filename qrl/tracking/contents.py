"""What a run holds: written into the active one, read back from any."""

import atexit
import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import mlflow
import pandas as pd
from mlflow.artifacts import download_artifacts
from mlflow.data.code_dataset_source import CodeDatasetSource
from mlflow.data.dataset import Dataset
from mlflow.data.meta_dataset import MetaDataset
from mlflow.entities import LoggedModelInput, Run, RunTag
from mlflow.exceptions import MlflowException

from qrl import names
from qrl.errors import BadInput, first_line
from qrl.tasks import own
from qrl.tracking import models
from qrl.workspace import Scratch

FILE = "file "  # begins the params that hold the digests of the user's own files, by label
MAX_TAG = 5000  # characters that every store accepts
_TRIES = 3  # of a write


def active_id() -> str:
    """Return the id of the active run; raise RuntimeError if there is none."""
    active = mlflow.active_run()
    if active is None:
        raise RuntimeError("No run is active: call this inside a step.")
    return active.info.run_id


def log_params(params: Mapping[str, object]) -> None:
    """Log params of the active run under keys that it does not hold yet: MLflow refuses `1e-6` after `1e-06`."""
    logged = mlflow.get_run(active_id()).data.params
    new_params = {key: value for key, value in params.items() if key not in logged}
    write_with_retries(lambda: mlflow.log_params(new_params))


def live_log(file: Path | None = None) -> Callable[[Mapping[str, float], int], None]:
    """Return a `log(metrics, step)` into the active run, for rooms that know no MLflow; it works from any thread.

    Args:
        file: JSON Lines to append the metrics to, with `step` and `time` in seconds since 1970; a line that a killed
            process left unfinished is removed.
    """
    run_id = active_id()
    if file:
        _drop_unfinished_line(file)

    def log(metrics: Mapping[str, float], step: int) -> None:
        floats = {key: float(value) for key, value in metrics.items()}
        if file:
            _append_row(file, {"step": step, "time": round(time.time(), 3)} | floats)
        write_with_retries(lambda: mlflow.log_metrics(floats, step=step, run_id=run_id))

    return log


def _drop_unfinished_line(file: Path) -> None:
    if file.is_file():
        text = file.read_bytes()
        if not text.endswith(b"\n"):
            file.write_bytes(text[: text.rfind(b"\n") + 1])


def _append_row(file: Path, row: Mapping[str, float]) -> None:
    """Append a row; NaN and infinity, which JSON does not have, become null."""
    finite_or_null = {key: value if math.isfinite(value) else None for key, value in row.items()}
    with contextlib.suppress(OSError), file.open("a", encoding="utf-8") as lines:  # the run has the metrics, too
        lines.write(json.dumps(finite_or_null) + "\n")


def log_scores(metrics: Mapping[str, float], *, model_uri: str | None = None, dataset: Dataset | None = None) -> None:
    """Log metrics of a model on a data set, so that the UI shows them on the pages of both.

    Args:
        metrics: name → value.
        model_uri: "models:/m-…", from `models.log_checkpoint`; becomes an input of the active run.
        dataset: from `log_dataset`.
    """
    model_id = models.id_of(model_uri) if model_uri else None
    if model_id:
        scored = [LoggedModelInput(model_id=model_id)]
        write_with_retries(lambda: mlflow.MlflowClient().log_inputs(active_id(), models=scored))
    floats = {key: float(value) for key, value in metrics.items()}
    write_with_retries(lambda: mlflow.log_metrics(floats, model_id=model_id, dataset=dataset))


def log_dataset(name: str, *, digest: str, context: str, n: int, source: str) -> Dataset:
    """Record a set of questions as an input of the active run, and return what `log_scores` accepts.

    Args:
        name: the task and split, e.g. `arithmetic-heldout`.
        digest: sha256 of the questions; MLflow keeps its first 36 characters, the tag `digest` all of it.
        context: `train`, `calibration` or `heldout`.
        n: number of questions.
        source: where they come from, in words or as an address.
    """
    dataset = MetaDataset(CodeDatasetSource(tags={"mlflow.source.name": source}), name=name, digest=digest[:36])
    write_with_retries(lambda: mlflow.log_input(dataset, context=context, tags={"n": str(n), "digest": digest}))
    return dataset


def log_table(frame: pd.DataFrame, name: str) -> None:
    """Log a table of samples for the UI; `name` has no suffix."""
    mlflow.log_table(frame, f"{name}.json")


def log_folder(folder: Path, into: str | None = None) -> None:
    """Log all files of a folder as artifacts of the active run, below `into`."""
    mlflow.log_artifacts(str(folder), into)


def log_files(paths: Sequence[str]) -> None:
    """Keep the user's own files with the active run, below files/, and their digests as params."""
    for path in filter(os.path.isfile, paths):  # a step that needs one that is gone refuses to begin
        mlflow.log_artifact(path, f"{names.FILES}/{own.label(path)}")
        log_params({f"{FILE}{own.label(path)}": own.digest(path)})


def tag(key: str, text: str) -> None:
    """Set a tag of the active run."""
    write_with_retries(lambda: mlflow.set_tag(key, text[:MAX_TAG]))


def tag_run(run_id: str, tags: Mapping[str, str]) -> None:
    """Set tags of any run, cut to the length that every store accepts."""
    cut_tags = [RunTag(name, text[:MAX_TAG]) for name, text in tags.items()]
    if cut_tags:
        write_with_retries(lambda: mlflow.MlflowClient().log_batch(run_id, tags=cut_tags))


def write_with_retries(write: Callable[[], object]) -> None:
    """Write to the store, again if other processes were in the way.

    SQLite gives up a write that finds it locked for MLflow's 20 s, as a busy machine can keep it; and of two processes
    that insert the same row both may find it missing first.
    """
    # MLflow's own retries do not cover these two codes.
    for attempt in range(1, _TRIES + 1):
        try:
            write()
            return
        except MlflowException as error:
            is_passing = error.error_code in ("TEMPORARILY_UNAVAILABLE", "BAD_REQUEST")
            if attempt == _TRIES or not is_passing:
                raise


def note(tags: Mapping[str, str], metrics: Mapping[str, float], *, step: int) -> None:
    """Log tags and metrics of something that must continue if the store fails; print the failure instead."""
    try:
        mlflow.set_tags({key: text[:MAX_TAG] for key, text in tags.items()})
        mlflow.log_metrics(dict(metrics), step=step)
    except Exception as failure:
        print(f"The store did not record what happened: {first_line(failure)}", file=sys.stderr)


def describe(markdown: str) -> None:
    """Set the description that the UI shows above the active run."""
    write_with_retries(lambda: mlflow.set_tag("mlflow.note.content", markdown))


def run(run_id: str, expected: str = "a run that `mlflow ui` shows") -> Run:
    """Return a run; raise BadInput, which names what was expected, if the store does not hold it."""
    try:
        return mlflow.get_run(run_id)
    except mlflow.MlflowException as error:
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise
        address = mlflow.get_tracking_uri()
        raise BadInput(f"There is no run '{run_id}' in {address}: give the id of {expected}.") from None


def find_runs(condition: str = "", status: str = "RUNNING") -> list[Run]:
    """Return the runs of all experiments that have a status and meet a condition in MLflow's query language."""
    query = f"attributes.status = '{status}'"
    if condition:
        query += f" and {condition}"
    return mlflow.search_runs(filter_string=query, search_all_experiments=True, output_format="list")


@cache
def _downloads() -> str:
    """Return a folder for what a remote store's runs hold, deleted at the end of this process."""
    scratch = Scratch("qrl-artifacts-")
    atexit.register(scratch.cleanup)
    return str(scratch.path)


def artifact(run_id: str, path: str) -> Path:
    """Return a run's artifact as a local path: in place if the store is local, else downloaded.

    Raises:
        BadInput: the run does not exist, or has no such artifact.
    """
    root = models.local(run(run_id).info.artifact_uri)
    missing = BadInput(f"Run {run_id} holds no artifact '{path}': give a run that made one, or run its step again.")
    if root:
        local_path = root / path
    else:
        try:
            folder = f"{_downloads()}/{run_id}"
            local_path = Path(download_artifacts(run_id=run_id, artifact_path=path, dst_path=folder))
        except (mlflow.MlflowException, OSError):
            raise missing from None
    if not local_path.exists():
        raise missing
    return local_path
