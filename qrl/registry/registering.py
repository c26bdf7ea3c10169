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
from qrl.registry import pages, pointers
from qrl.registry.client import MlflowClient
from qrl.registry.history import History, read_history
from qrl.registry.versions import Version, locked, model_of, version_of, versions_of
from qrl.tracking import models

_NAME = re.compile(r"\w[\w .+-]{0,199}")  # MLflow allows no / and no :, its search no quotes

_TAGS_OF_SCALES = {  # of a version → the fact of its model that they repeat
    names.TAG_ACTIVATION_SCALES: names.ACTIVATION_SCALES,
    names.TAG_KV_SCALES: names.KV_SCALES,
}


def registered_name(recipe: Recipe) -> str:
    """Return the registered model of a recipe: `qrl-tiny`, `qrl-qwen2.5-1.5b-instruct`, `qrl-<folder>`.

    What starts from version 2 of `qrl-tiny` is `qrl-tiny-v2`.

    Raises:
        BadInput: `registered_name` of the recipe has characters that MLflow does not allow.
    """
    if recipe.registered_name:
        check_name(recipe.registered_name)
        return recipe.registered_name
    if recipe.model == "qrl-tiny":
        return recipe.model
    version = re.fullmatch(r"models:/([^/@]+)/(\d+)", recipe.model)
    if version:  # a line of its own: its base is not the other's
        return f"qrl-{_allowed(version[1]).removeprefix('qrl-')}-v{version[2]}"
    path = Path(recipe.model)
    model_name = path.resolve().name if path.is_dir() else recipe.model.rstrip("/").rpartition("/")[2]
    return f"qrl-{_allowed(model_name)}"


def _allowed(model_name: str) -> str:
    """Return a name with the characters that a registered model may have."""
    return re.sub(r"[^a-z0-9._-]+", "-", model_name.lower()).strip("-.") or "model"


def check_name(name: str) -> None:
    """Raise BadInput if a registered model cannot have this name."""
    if not _NAME.fullmatch(name):
        raise BadInput(
            f"registered_name is '{name}', but must begin with a letter or digit and hold only letters, digits, "
            "spaces and . _ + -, 200 at most."
        )


def check_base(recipe: Recipe, digest: str) -> str:
    """Check that a recipe's base model is that of its registered model: folders and hub ids may share their last name.

    A name that is set, `registered_name`, is not checked: whoever sets it means it.

    Args:
        recipe: its model and its stages.
        digest: of the base model.

    Returns:
        A warning if the same folder or hub id held other weights before; else nothing.

    Raises:
        BadInput: the base model of the registered model is of another folder or hub id, and has other weights.
    """
    name = registered_name(recipe)
    if recipe.registered_name or model_of(name, make=True) is None:
        return ""
    history = pointers.current(name)
    number = history.state.at.get(recipe.promote.declared[0].stage)
    entry = version_of(name, number) if number else None
    if entry is None or entry.tags.get(names.TAG_DIGEST, digest) == digest:
        return ""

    origin = _origin(entry)
    held = f"The base model of '{name}' is version {number} (digest {entry.tags[names.TAG_DIGEST][:12]})"
    here = f"{recipe.model} (digest {digest[:12]})"
    if origin in ("", _resolved(recipe.model)):
        return (
            f"{held}, and {here} has other weights: what is promoted replaces it. To keep both, set registered_name, "
            f"such as registered_name={_other_name(recipe.model)}."
        )
    raise BadInput(
        f"{held} of {origin}, and {here} has other weights: two models would share one registered model. Set "
        f"registered_name, such as registered_name={_other_name(recipe.model)}, or rename the folder."
    )


def _origin(entry: ModelVersion) -> str:
    """Return the folder or hub id from which a version was logged; empty if the store does not say."""
    source = str(entry.source)
    return models.params(source).get("source", "") if source.startswith("models:/m-") else ""


def _resolved(model: str) -> str:
    """Return a model as `source` of a logged one names it: the whole path of a folder."""
    return str(Path(model).resolve()) if Path(model).is_dir() else model


def _other_name(model: str) -> str:
    """Return a name for a registered model that also says where the model's folder is, or who owns it on the hub."""
    parts = [part for part in _resolved(model).split("/") if part]
    return f"qrl-{_allowed('-'.join(parts[-2:]))}"


def register(
    name: str,
    model_uri: str,
    *,
    digest: str,
    variant: str,
    scheme: str,
    accuracy: float,
    stderr: float,
    n: int,
    parent_version: int | None = None,
    chat: str = "{}",
    history: History | None = None,
) -> Version:
    """Return the version with this digest and rendering: one of the cell with intact files, else a new one.

    Args:
        name: the registered model, from `registered_name`.
        model_uri: "models:/m-…".
        digest: of the weights that were evaluated.
        variant, scheme: the cell.
        accuracy, stderr, n: of the newest evaluation; tags of the version.
        parent_version: the version that these weights were made from.
        chat: the evaluation's `chat.template_kwargs`, as JSON.
        history: the model's, if that was read already.
    """
    tags = {
        names.TAG_DIGEST: digest,
        names.TAG_VARIANT: variant,
        names.TAG_SCHEME: scheme,
        "accuracy": f"{accuracy:.4f}",
        "stderr": f"{stderr:.4f}",
        "n": str(n),
    }
    if parent_version:
        tags[names.TAG_PARENT_VERSION] = str(parent_version)
    if chat != "{}":
        tags[names.TAG_CHAT] = chat
    facts = models.params(model_uri)
    for tag, fact in _TAGS_OF_SCALES.items():
        if fact in facts:
            tags[tag] = str(facts[fact])
    client = MlflowClient()
    with locked(name):
        _make_model(name)
        entry = _find_version(name, model_uri, digest, scheme, chat)
        if entry is None:
            number = _make_version(name, model_uri, tags)
        else:
            number = entry.version
            if str(number) == tags.get(names.TAG_PARENT_VERSION):  # a base promoted as its own descendant
                del tags[names.TAG_PARENT_VERSION]
            for key, value in tags.items():
                if entry.tags.get(key) != value:
                    client.set_model_version_tag(name, number, key, value)
        history = history or read_history(name, model_of(name))
        pages.refresh(history, int(number))
        return Version.of(client.get_model_version(name, number), history)


def _make_model(name: str) -> None:
    """Make a registered model unless there is one of this name."""
    try:
        MlflowClient().create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _find_version(name: str, model_uri: str, digest: str, scheme: str, chat: str) -> ModelVersion | None:
    """Return a version with a cell's weights and rendering and with intact files, or None."""
    is_in_fp8 = scheme.endswith(names.KV_FP8)  # one checkpoint can be two cells
    for entry in versions_of(name, f" and tags.`{names.TAG_DIGEST}` = '{digest}'"):
        has_same_chat = entry.tags.get(names.TAG_CHAT, "{}") == chat
        has_same_cache = entry.tags.get(names.TAG_SCHEME, "").endswith(names.KV_FP8) == is_in_fp8
        if not (has_same_chat and has_same_cache and _has_files(entry)):
            continue
        if entry.source == model_uri or models.holds(str(entry.source), digest):
            return entry
    return None


def _make_version(name: str, model_uri: str, tags: dict[str, str]) -> str:
    """Make a version from a logged model, and return its number."""
    client = MlflowClient()
    model_id = models.id_of(model_uri)
    run_id = client.get_logged_model(model_id).source_run_id
    version = client.create_model_version(
        name,
        model_uri,
        run_id,
        tags=tags,
        model_id=model_id,
        await_creation_for=0,  # its files are there: nothing to wait for
    )
    link = json.dumps([{"name": name, "version": version.version}])
    client.set_logged_model_tags(model_id, {"mlflow.modelVersions": link})  # the UI's link back to the version
    return version.version


def _has_files(entry: ModelVersion) -> bool:
    """Return whether the version's checkpoint is still in the store; lists, and downloads nothing."""
    try:
        files = get_artifact_repository(f"models:/{entry.name}/{entry.version}").list_artifacts("model")
    except (MlflowException, OSError):
        return False
    return any(file.path == "model/config.json" for file in files)
