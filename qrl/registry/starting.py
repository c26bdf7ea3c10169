"""A registered model as the model of a recipe: resolved to a version once, and checked like one that is served.

`model=models:/NAME@STAGE` names another version after the next promotion. So a command resolves it before it does
anything else, and its steps, its runs and its results name the version, `models:/NAME/3`.
"""

import re

import mlflow
from mlflow import MlflowException
from mlflow.store.artifact.utils.models import get_model_name_and_version

from qrl.errors import BadInput, first_line
from qrl.recipe import Recipe
from qrl.registry import pointers, signing, versions
from qrl.registry.client import MlflowClient
from qrl.registry.stages import resolve
from qrl.registry.versions import Version
from qrl.tracking import runs, store, store_errors

_REGISTERED = re.compile(r"models:/([^/@]+)[/@]([^/@]+)")  # by stage, alias or version; models:/m-… is a logged model
_LOGGED = re.compile(r"models:/m-\w+")


def with_version(recipe: Recipe) -> Recipe:
    """Return a recipe whose model is a version, if it is a registered model; any other recipe as it is.

    Its gate, files and signature are checked (`versions.verify`), but not again in a study's steps.

    Raises:
        BadInput: there is no such model, stage or version.
        GateRefused: no gate let the version in, or it lacks the signature that it must have.
        QrlError: its files are not those that were evaluated.
    """
    public_key = signing.load_public_key(recipe.promote.require_signature)
    return recipe.model_copy(update={"model": version_of(recipe.model, public_key)})


def version_of(address: str, public_key: str = "") -> str:
    """Return `models:/NAME/3` for a stage, an alias or a version of a registered model; any other address as it is.

    A model on which no gate of ours has decided is another program's: MLflow says which version an alias is.

    Args:
        address: of a model, as typed.
        public_key: the key or certificate that must have signed the version, from `signing.load_public_key`.

    Raises:
        BadInput, GateRefused, QrlError: as `with_version`.
    """
    resolved, version = _resolved(address)
    if version is not None:
        versions.verify(version, public_key)
    return resolved


def unverified_version_of(address: str) -> str:
    """Return what `version_of` does without a look at gate, files and signature, such as to ask where it comes from."""
    resolved, _ = _resolved(address)
    return resolved


def _resolved(address: str) -> tuple[str, Version | None]:
    """Return the address of a version, and the version where gates of ours have decided on its model."""
    match = _REGISTERED.fullmatch(address)
    if match is None:
        if address.startswith("models:") and not _LOGGED.fullmatch(address):
            raise BadInput(
                f"'{address}' names no version of a registered model: expected models:/NAME@STAGE, such as "
                "models:/qrl-tiny@base, or models:/NAME/3. `history` lists what there is.",
                field="model",
            )
        return address, None
    store.check_there()
    store.prepare()
    if runs.is_launched():  # the study has resolved and checked it
        return address, None
    name, stage = match.groups()
    if versions.model_of(name) is None:
        registered = ", ".join(sorted(model.name for model in MlflowClient().search_registered_models()))
        raise BadInput(
            f"There is no registered model '{name}' in {mlflow.get_registry_uri()}: registered are "
            f"{registered or 'none; `promote` registers models'}. Give one of them, or a folder."
        )
    history = pointers.current(name)
    if history.records:
        version = resolve(name, stage, history)
        return version.uri, version

    separator = "/" if stage.isdecimal() or stage.title() in ("Staging", "Production", "Archived") else "@"
    try:
        address = f"models:/{name}{separator}{stage}"
        number = get_model_name_and_version(mlflow.MlflowClient(), address)[-1]
    except MlflowException as error:
        raise store_errors.explain(error) or BadInput(
            f"'{name}' has no '{stage}' ({first_line(error).rstrip('.')}): give a version, as models:/{name}/1, or an "
            f"alias, as models:/{name}@ALIAS."
        ) from None
    return f"models:/{name}/{number}", None
