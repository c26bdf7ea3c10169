"""Where a model comes from, according to the store: the models that it was made from, and the training's seed."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import mlflow
from mlflow.entities import LoggedModel, Run

from qrl import names
from qrl.formats.kept import METRICS, Kept
from qrl.tracking import models

STEPS_BACK = 8  # merge, quantize and the like; no chain of qrl's is longer


@dataclass(frozen=True)
class Ancestor:
    """A model in a line: its digest, and the folder, hub id or version that it came from, empty if unknown."""

    digest: str
    address: str


def line(model_uri: str) -> list[Ancestor]:
    """Return a model and what it was made from: itself first, its base last. `model_uri` is "models:/m-…".

    A base that is not in the store is known from the training that started from it.
    """
    addresses: dict[str, str] = {}
    for model, run in _chain(model_uri):
        digest = model.params.get("digest", "")
        addresses[digest] = model.params.get("source", "") or addresses.get(digest, "")
        parent_digest = model.params.get("parent", "")
        if parent_digest:
            starts_from_base = _step(run) in ("train", "merge")
            addresses[parent_digest] = _base(run) if starts_from_base else ""

    line = []
    for digest, address in addresses.items():
        is_in_store = address.startswith("models:/m-")  # then it leads to no folder and no hub id
        line.append(Ancestor(digest, "" if is_in_store else address))
    return line


def training_seed(model_uri: str) -> int | None:
    """Return the seed of the training that made a model's weights, also if they were merged or quantized since.

    It is None for the base, and for weights that no `train` of this store made. `model_uri` is "models:/m-…".
    """
    seeds = (int(run.data.params["seed"]) for _, run in _chain(model_uri) if _step(run) == "train")
    return next(seeds, None)


def kept(model_uri: str) -> tuple[str, Kept] | None:
    """Return what a model's weights keep of their training's update, and the step that stored it: train or merge.

    It is None for weights that no such step of this store made. For quantized weights, it is what the weights before
    quantization keep. `model_uri` is "models:/m-…".
    """
    for model in _models(model_uri):
        run = mlflow.get_run(str(model.source_run_id))
        for step in ("merge", "train"):
            update_kept, moved, moved_stored = (run.data.metrics.get(f"{step}/{name}", math.nan) for name in METRICS)
            if not math.isnan(update_kept):
                return step, Kept(update_kept, moved, moved_stored, run.data.params.get(names.STORED_IN, ""))
    return None


def _base(run: Run) -> str:
    """Return the model that a training or a merge started from: a registered one with its version."""
    return run.data.tags.get(names.TAG_MODEL_VERSION) or run.data.params.get("model", "")


def _step(run: Run) -> str | None:
    return run.data.tags.get(names.TAG_STEP)


def _chain(model_uri: str) -> Iterator[tuple[LoggedModel, Run]]:
    """Yield a model and the run that made it, then the model that it was made from and its run, and so on.

    The run of a merged model is the training of its adapter, if the store has it.
    """
    for model in _models(model_uri):
        run = mlflow.get_run(str(model.source_run_id))
        adapter = run.data.params.get("adapter", "")
        if _step(run) == "merge" and adapter.startswith("runs:/"):
            run = mlflow.get_run(adapter.removeprefix("runs:/").partition("/")[0])
        yield model, run


def _models(model_uri: str) -> Iterator[LoggedModel]:
    """Yield a model and those that it was made from, each as far as a run of this store logged it."""
    try:
        model = mlflow.get_logged_model(models.id_of(model_uri))
        for _ in range(STEPS_BACK):
            if model is None or not model.source_run_id:  # a model may be logged outside of any run
                return
            yield model
            model = _parent(model)
    except mlflow.MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":  # with a failing store, two trainings would look like none
            raise


def _parent(model: LoggedModel) -> LoggedModel | None:
    """Return the model that this one was made from: the first logged with that digest, since later ones are copies."""
    digest = model.params.get("parent")
    if not digest:
        return None
    query = f"tags.`{names.TAG_DIGEST}` = '{digest}'"
    logged = mlflow.search_logged_models([model.experiment_id], query, output_format="list")
    parents = [parent for parent in logged if parent.source_run_id and parent.model_id != model.model_id]
    return min(parents, key=lambda parent: parent.creation_timestamp, default=None)
