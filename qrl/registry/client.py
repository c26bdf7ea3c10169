"""Versions and aliases as MLflow's client gives them, and the lock under which they change.

The lock is a file beside the database. For a remote registry it is in the temporary folder, so it only holds off the
processes of this machine.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import mlflow
from filelock import FileLock
from mlflow import MlflowClient, MlflowException
from mlflow.entities.model_registry import ModelVersion

from qrl import names
from qrl.registry.versions import Version
from qrl.tracking import store


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold the lock of a registered model."""
    address = mlflow.get_registry_uri()
    key = sha256(f"{address} {name}".encode()).hexdigest()[:16]
    database = store.database_of(address)
    path = f"{database}.registry.lock" if database else Path(tempfile.gettempdir()) / f"qrl-registry-{key}.lock"
    with FileLock(path, timeout=120, mode=0o666):
        yield


def versions_of(name: str) -> list[ModelVersion]:
    """Return all versions of a registered model, as MLflow has them."""
    return list(MlflowClient().search_model_versions(f"name = '{name}'", max_results=10_000))


def aliased(name: str, alias: str) -> ModelVersion | None:
    """Return the version behind an alias, or None; a search gives no aliases, so each has a request of its own."""
    try:
        return MlflowClient().get_model_version_by_alias(name, alias)
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise


def as_version(entry: ModelVersion, stage: str | None = None) -> Version:
    """Return MLflow's version as ours, with the stage that it was resolved from."""
    tags = dict(entry.tags)
    digest, variant, scheme = (tags.get(key, "") for key in (names.TAG_DIGEST, names.TAG_VARIANT, names.TAG_SCHEME))
    return Version(entry.name, int(entry.version), digest, variant, names.scheme(scheme), stage=stage, tags=tags)
