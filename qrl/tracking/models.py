"""Checkpoints as MLflow models: logged, found again by digest, and opened in place."""

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import mlflow
from mlflow.entities import LoggedModel, LoggedModelOutput
from mlflow.store.artifact.models_artifact_repo import ModelsArtifactRepository

from qrl import checkpoint, names
from qrl.errors import BadInput, QrlError, first_line
from qrl.tracking import fetched, model_files
from qrl.tracking.description import CHAT
from qrl.tracking.model_files import local


def log_checkpoint(
    path: Path,
    *,
    name: str,
    digest: str,
    variant: str,
    scheme: str,
    task: str,
    move: bool,
    metadata: Mapping[str, Any] | None = None,
) -> tuple[str, Path]:
    """Log a checkpoint folder as a model of the active run; the run's end discards it (`abandon`) if it is half-made.

    Args:
        path: a folder that `checkpoint.check` accepts.
        name: the model's name in the UI, e.g. `grpo-awq`.
        digest: `checkpoint.digest(path)`.
        variant, scheme, task: tags and params of the model.
        move: the folder is a step's own and is deleted afterwards, so its files may be linked; else they are copied.
        metadata: further facts (bytes, bits per weight, seconds) for the model's params and its MLmodel.

    Returns:
        "models:/m-…", and the folder that holds the weights now (for a remote store, `path` itself).

    Raises:
        QrlError: the files in the store do not have the digest.
    """
    facts = {"variant": variant, "scheme": scheme, "task": task, "digest": digest, **(metadata or {})}
    model = mlflow.initialize_logged_model(
        name=name,
        tags={names.TAG_VARIANT: variant, names.TAG_SCHEME: scheme, names.TAG_TASK: task, names.TAG_DIGEST: digest},
        params={key: str(value) for key, value in facts.items()},
    )
    mlflow.log_outputs(models=[LoggedModelOutput(model.model_id, step=0)])
    stored = model_files.write(path, model, facts, link=move)
    stored_digest = checkpoint.digest(stored)
    if stored_digest != digest:
        raise QrlError(
            f"The checkpoint {path} changed while it was logged: its digest was {digest[:12]}, now it is "
            f"{stored_digest[:12]}. Run the step again."
        )
    mlflow.finalize_logged_model(model.model_id, "READY")
    return f"models:/{model.model_id}", stored


def id_of(model_uri: str) -> str:
    """Return the id in "models:/m-…"."""
    return model_uri.removeprefix("models:/")


def local_path(model_uri: str, digest: str = "") -> Path:
    """Return the checkpoint folder behind a model's address, in place if the store is local, else downloaded.

    Args:
        model_uri: "models:/m-…", "models:/name/3" or "models:/name@alias".
        digest: that a download must have; default: the one that "models:/m-…" was logged with.

    Raises:
        BadInput: the model does not exist.
        QrlError: the model holds no checkpoint, or a download is not what was logged.
    """
    try:
        address = str(ModelsArtifactRepository.get_underlying_uri(model_uri))
        if not digest and model_uri.startswith("models:/m-"):
            digest = params(model_uri).get("digest", "")
    except mlflow.MlflowException as error:
        raise BadInput(
            f"There is no model '{model_uri}' in {mlflow.get_tracking_uri()} ({first_line(error).rstrip('.')}): "
            "give one that `mlflow ui` shows."
        ) from None
    artifacts = local(address)
    path = artifacts / "model" if artifacts else fetched.get(address, digest)
    if not (path / "config.json").is_file():
        raise QrlError(f"The model {model_uri} holds no checkpoint at {path}: log it again with the step that made it.")
    return path


def find(digest: str, chat: str = "{}") -> str | None:
    """Return the address of a model in the active experiment with this digest and intact files, or None.

    `chat` is `chat.template_kwargs` as JSON, with which MLflow's flavor of the model renders chats.
    """
    for model in _finished({names.TAG_DIGEST: digest}):
        uri = f"models:/{model.model_id}"
        if model.params.get(CHAT, "{}") == chat and holds(uri, digest):
            return uri
    return None


def child(parent: str, variant: str, scheme: str) -> str | None:
    """Return the address of a model in the active experiment made from the checkpoint with digest `parent`, or None."""
    for model in _finished({names.TAG_VARIANT: variant, names.TAG_SCHEME: scheme}):
        if model.params.get("parent") == parent:
            return f"models:/{model.model_id}"
    return None


def _finished(tags: Mapping[str, str]) -> Iterator[LoggedModel]:
    """Yield the finished models of the active experiment that have these tags."""
    query = " AND ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
    models = mlflow.search_logged_models(filter_string=query, output_format="list")
    return (model for model in models if str(model.status) == "READY")


def params(model_uri: str) -> dict[str, str]:
    """Return what was logged with "models:/m-…": variant, scheme, digest, and the facts of the step that made it."""
    return dict(mlflow.get_logged_model(id_of(model_uri)).params)


def holds(model_uri: str, digest: str) -> bool:
    """Return whether a finished model's files have this digest; they are read, since disks rot without changing a date.

    It is True for a remote store: files are checked when they are fetched.
    """
    try:
        model = mlflow.get_logged_model(id_of(model_uri))
        if str(model.status) != "READY":
            return False
        artifacts = local(model.artifact_location)
        if artifacts is None:
            return True
        folder = artifacts / "model"
        return _digest(folder, tuple(checkpoint.state(folder))) == digest
    except (BadInput, OSError, mlflow.MlflowException):
        return False


@cache
def _digest(folder: Path, _state: tuple) -> str:
    """Return a checkpoint's digest; cached, since a study needs the same one several times."""
    return checkpoint.digest(folder)


def abandon(run_id: str) -> None:
    """Discard the models that a run left half-made."""
    experiment = mlflow.get_run(run_id).info.experiment_id
    for model in mlflow.search_logged_models([experiment], f"source_run_id = '{run_id}'", output_format="list"):
        if str(model.status) == "PENDING":
            model_files.discard(model)
