"""Registered models by name, and versions made from logged models: one per digest."""

import json
import re
from pathlib import Path

from mlflow import MlflowException
from mlflow.entities.model_registry import ModelVersion
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

from qrl import names
from qrl.errors import BadInput
from qrl.recipe import Recipe
from qrl.registry import history, pages
from qrl.registry.client import MlflowClient
from qrl.registry.history import History
from qrl.registry.versions import Version, locked, model_of, versions_of
from qrl.tracking import models

_NAME = re.compile(r"\w[\w .+-]{0,199}")  # MLflow allows no / and no :, its search no quotes


def registered_name(recipe: Recipe) -> str:
    """Return the registered model of a recipe: `qrl-tiny`, `qrl-qwen2.5-1.5b-instruct`, `qrl-<folder>`.

    Raises:
        BadInput: `registered_name` of the recipe has characters that MLflow does not allow.
    """
    if name := recipe.registered_name:
        check_name(name)
        return name
    if recipe.model == "qrl-tiny":
        return recipe.model
    path = Path(recipe.model)
    last = path.resolve().name if path.is_dir() else recipe.model.rstrip("/").rpartition("/")[2]
    return "qrl-" + (re.sub(r"[^a-z0-9._-]+", "-", last.lower()).strip("-.") or "model")


def check_name(name: str) -> None:
    """Raise BadInput if a registered model cannot have this name."""
    if not _NAME.fullmatch(name):
        raise BadInput(
            f"registered_name is '{name}', but must begin with a letter or digit and hold only letters, digits, "
            "spaces and . _ + -, 200 at most."
        )


def register(
    name: str,
    model_uri: str,
    *,
    accuracy: float,
    stderr: float,
    n: int,
    parent_version: int | None = None,
    chat: str = "{}",
    past: History | None = None,
    **cell: str,
) -> Version:
    """Return the version with this digest and rendering: one of the cell with intact files, else a new one.

    Args:
        name: the registered model, from `registered_name`.
        model_uri: "models:/m-…".
        accuracy, stderr, n: of the newest evaluation; tags of the version.
        parent_version: the version that these weights were made from.
        chat: the evaluation's `chat.template_kwargs`, as JSON.
        past: the model's history, if that was read already.
        cell: `variant`, `scheme`, and `digest` of the weights that were evaluated.
    """
    labels = {"digest": names.TAG_DIGEST, "variant": names.TAG_VARIANT, "scheme": names.TAG_SCHEME}
    tags = {tag: cell[label] for label, tag in labels.items()}
    tags |= {"accuracy": f"{accuracy:.4f}", "stderr": f"{stderr:.4f}", "n": str(n)}
    if parent_version:
        tags[names.TAG_PARENT_VERSION] = str(parent_version)
    if chat != "{}":
        tags[names.TAG_CHAT] = chat
    with locked(name):
        try:
            MlflowClient().create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        entry = _existing(name, model_uri, cell, chat)
        if entry and str(entry.version) == tags.get(names.TAG_PARENT_VERSION):  # a base promoted as its own descendant
            del tags[names.TAG_PARENT_VERSION]
        number = entry.version if entry else _new(name, model_uri, tags)
        has = dict(entry.tags) if entry else tags
        for key in (key for key, value in tags.items() if has.get(key) != value):
            MlflowClient().set_model_version_tag(name, number, key, tags[key])
        pages.refresh(past := past or history.read(name, model_of(name)), int(number))
        return Version.of(MlflowClient().get_model_version(name, number), past)


def _existing(name: str, model_uri: str, cell: dict[str, str], chat: str) -> ModelVersion | None:
    digest, in_fp8 = cell["digest"], cell["scheme"].endswith(names.KV_FP8)  # one checkpoint can be two cells
    same = f" and tags.`{names.TAG_DIGEST}` = '{digest}'"
    alike = [entry for entry in versions_of(name, same) if entry.tags.get(names.TAG_CHAT, "{}") == chat]
    alike = [entry for entry in alike if entry.tags.get(names.TAG_SCHEME, "").endswith(names.KV_FP8) == in_fp8]
    known = (entry for entry in alike if _exists(entry))
    return next(
        (entry for entry in known if entry.source == model_uri or models.holds(str(entry.source), digest)), None
    )


def _new(name: str, model_uri: str, tags: dict[str, str]) -> str:
    model_id = models.id_of(model_uri)
    run_id = MlflowClient().get_logged_model(model_id).source_run_id
    how = {"tags": tags, "model_id": model_id, "await_creation_for": None}  # its files are there: nothing to wait for
    number = MlflowClient().create_model_version(name, model_uri, run_id, **how).version
    shown = json.dumps([{"name": name, "version": number}])
    MlflowClient().set_logged_model_tags(model_id, {"mlflow.modelVersions": shown})  # the UI's link back to the version
    return number


def _exists(entry: ModelVersion) -> bool:
    """Whether the version's checkpoint is still in the store; lists, and downloads nothing."""
    try:
        files = get_artifact_repository(f"models:/{entry.name}/{entry.version}").list_artifacts("model")
    except (MlflowException, OSError):
        return False
    return any(file.path == "model/config.json" for file in files)
