"""Which training made a model: asked of the store, so that users' own folders simply have no answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qrl import names

if TYPE_CHECKING:
    from mlflow.entities import Run

STEPS_BACK = 8  # merge, quantize and the like; more is no chain of qrl's


def training_seed(model_uri: str) -> int | None:
    """The seed of the training that made a model's weights, also where they were merged or quantized since.

    Args:
        model_uri: "models:/m-…".

    Returns:
        None for the base, and for weights that no `train` of this store made.
    """
    import mlflow

    client = mlflow.MlflowClient()
    digest = None
    try:
        model = mlflow.get_logged_model(model_uri.removeprefix("models:/"))
        for _ in range(STEPS_BACK):
            if not model.source_run_id:  # somebody logged it outside of any run
                return None
            made = client.get_run(model.source_run_id)
            if (trained := _training(client, made)) is not None:
                return int(trained.data.params["seed"])
            digest = model.params.get("parent")
            if not digest:
                return None
            found = client.search_logged_models(
                [model.experiment_id], filter_string=f"tags.`{names.TAG_DIGEST}` = '{digest}'"
            )
            parents = [each for each in found if each.source_run_id and each.model_id != model.model_id]
            if not parents:
                return None
            model = min(
                parents, key=lambda each: each.creation_timestamp
            )  # the first that was logged was made, not given
    except mlflow.MlflowException as error:
        if (
            error.error_code != "RESOURCE_DOES_NOT_EXIST"
        ):  # a store that fails must not make two trainings look like none
            raise
    return None


def _training(client, run: Run) -> Run | None:
    """The run that trained, where this one did, or merged an adapter of one that did."""
    step = run.data.tags.get(names.TAG_STEP)
    adapter = run.data.params.get("adapter", "")
    if step == "merge" and adapter.startswith("runs:/"):
        return client.get_run(adapter.removeprefix("runs:/").partition("/")[0])
    return run if step == "train" else None
