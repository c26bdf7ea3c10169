"""Which training made a model, according to the store; a user's own folders have no answer."""

import mlflow
from mlflow.entities import LoggedModel

from qrl import names
from qrl.tracking import models

STEPS_BACK = 8  # merge, quantize and the like; no chain of qrl's is longer


def training_seed(model_uri: str) -> int | None:
    """Return the seed of the training that made a model's weights, also if they were merged or quantized since.

    It is None for the base, and for weights that no `train` of this store made. `model_uri` is "models:/m-…".
    """
    client = mlflow.MlflowClient()
    try:
        model = client.get_logged_model(models.id_of(model_uri))
        for _ in range(STEPS_BACK):
            if model is None or not model.source_run_id:  # a model may be logged outside of any run
                return None
            run = client.get_run(model.source_run_id)
            step, adapter = run.data.tags.get(names.TAG_STEP), run.data.params.get("adapter", "")
            if step == "merge" and adapter.startswith("runs:/"):  # of the run that trained the adapter
                run = client.get_run(adapter.removeprefix("runs:/").partition("/")[0])
            elif step != "train":
                model = _parent(client, model)
                continue
            return int(run.data.params["seed"])
    except mlflow.MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":  # with a failing store, two trainings would look like none
            raise
    return None


def _parent(client: mlflow.MlflowClient, model: LoggedModel) -> LoggedModel | None:
    """Return the model that this one was made from: the first logged with that digest, since later ones are copies."""
    digest = model.params.get("parent")
    if not digest:
        return None
    query = f"tags.`{names.TAG_DIGEST}` = '{digest}'"
    logged = client.search_logged_models([model.experiment_id], filter_string=query)
    parents = [other for other in logged if other.source_run_id and other.model_id != model.model_id]
    return min(parents, key=lambda parent: parent.creation_timestamp, default=None)
