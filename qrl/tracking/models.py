"""Checkpoints as MLflow models, without writing their weights twice.

`transformers.log_model` writes a checkpoint two times over. Here the files of a step's own temporary folder are hard-linked
into the model's artifact folder; a user's files are copied once, for an edit in a linked folder would change the store.

    <artifacts>/MLmodel, requirements.txt, conda.yaml, python_env.yaml   what MLflow reads
    <artifacts>/model/                  the checkpoint: a plain folder that transformers and vLLM open in place
    <artifacts>/components/tokenizer/   the tokenizer's files once more, by hard link: where MLflow's flavor looks for them
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qrl import checkpoint, names
from qrl.errors import BadInput, QrlError
from qrl.tracking import description

if TYPE_CHECKING:
    from mlflow.entities import LoggedModel

_CARDS = ("README.md", "LICENSE", "LICENSE.txt")


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
    """Log a checkpoint folder as a model of the active run.

    Killed at any moment, it leaves no model that counts as READY.

    Args:
        path: a folder that `checkpoint.check` accepts.
        name: the model's name in the UI, `grpo-awq` say.
        digest: `checkpoint.digest(path)`.
        variant, scheme, task: tags and params of the model.
        move: the folder is a step's own and is deleted afterwards, so its files may be linked; else they are copied.
        metadata: further facts (bytes, bits per weight, seconds), kept as params of the model and in its MLmodel.

    Returns:
        "models:/m-…", and the folder that holds the weights now (for a remote store, `path` itself).

    Raises:
        QrlError: what arrived in the store does not have the digest.
    """
    import mlflow

    client = mlflow.MlflowClient()
    run = mlflow.active_run()
    facts = {"variant": variant, "scheme": scheme, "task": task, "digest": digest, **(metadata or {})}
    tags = {names.TAG_VARIANT: variant, names.TAG_SCHEME: scheme, names.TAG_TASK: task, names.TAG_DIGEST: digest}
    model = mlflow.initialize_logged_model(
        name=name, source_run_id=run.info.run_id, tags=tags, params={key: str(value) for key, value in facts.items()}
    )
    mlflow.log_outputs(models=[mlflow.entities.LoggedModelOutput(model.model_id, step=0)])
    try:
        target = local(model.artifact_location)
        if target:
            _write_in_place(path, target, model, facts, link=move)
        else:
            _upload(client, path, model, facts)
        stored = target / "model" if target else path
        if (found := checkpoint.digest(stored)) != digest:
            raise QrlError(
                f"The checkpoint {path} changed while it was logged: its digest was {digest[:12]}, now it is {found[:12]}."
            )
    except BaseException:
        _discard(client, model)
        raise
    client.finalize_logged_model(model.model_id, "READY")
    return f"models:/{model.model_id}", stored


def local_path(model_uri: str, into: Path | None = None) -> Path:
    """The checkpoint folder behind a model's address, in place where the store is local.

    Args:
        model_uri: "models:/m-…", "models:/name/3", "models:/name@alias" or "runs:/…".
        into: where remote files are downloaded to; default: a new temporary folder.

    Raises:
        BadInput: there is no such model.
        QrlError: the model holds no checkpoint.
    """
    import mlflow
    from mlflow.store.artifact.models_artifact_repo import ModelsArtifactRepository
    from mlflow.store.artifact.runs_artifact_repo import RunsArtifactRepository

    underlying = model_uri
    try:
        if model_uri.startswith("models:/"):
            underlying = ModelsArtifactRepository.get_underlying_uri(model_uri)
        elif model_uri.startswith("runs:/"):
            underlying = RunsArtifactRepository.get_underlying_uri(model_uri)
    except mlflow.MlflowException as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise BadInput(
            f"There is no model '{model_uri}' in {mlflow.get_tracking_uri()} ({reason}): `mlflow ui` shows which there are."
        ) from None
    folder = local(underlying)
    if folder is None or not folder.is_dir():
        if into:
            into.mkdir(parents=True, exist_ok=True)
        folder = Path(mlflow.artifacts.download_artifacts(artifact_uri=model_uri, dst_path=into and str(into)))
    if not (folder / "model" / "config.json").is_file():
        raise QrlError(
            f"The model {model_uri} holds no checkpoint at {folder / 'model'}: log it again with the step that made it."
        )
    return folder / "model"


def find(digest: str) -> str | None:
    """Address of a model in the active experiment that holds the checkpoint with this digest, files and all, or None."""
    import mlflow
    from mlflow.tracking.fluent import _get_experiment_id

    client = mlflow.MlflowClient()
    run = mlflow.active_run()
    experiment = run.info.experiment_id if run else _get_experiment_id()
    for model in client.search_logged_models([experiment], filter_string=f"tags.`{names.TAG_DIGEST}` = '{digest}'"):
        if str(model.status) == "READY" and holds(f"models:/{model.model_id}", digest):
            return f"models:/{model.model_id}"
    return None


def child(parent: str, variant: str, scheme: str) -> str | None:
    """Address of a model in the active experiment that was made from the checkpoint with digest `parent`, or None."""
    import mlflow
    from mlflow.tracking.fluent import _get_experiment_id

    client = mlflow.MlflowClient()
    run = mlflow.active_run()
    query = f"tags.`{names.TAG_VARIANT}` = '{variant}' AND tags.`{names.TAG_SCHEME}` = '{scheme}'"
    for model in client.search_logged_models(
        [run.info.experiment_id if run else _get_experiment_id()], filter_string=query
    ):
        if str(model.status) == "READY" and model.params.get("parent") == parent:
            return f"models:/{model.model_id}"
    return None


def params(model_uri: str) -> dict[str, str]:
    """What was logged with a model: variant, scheme, digest, and the facts of the step that made it.

    Args:
        model_uri: "models:/m-…".
    """
    import mlflow

    return dict(mlflow.get_logged_model(model_uri.removeprefix("models:/")).params)


def holds(model_uri: str, digest: str) -> bool:
    """Whether a model's files are those that were logged; they are read, since disks rot without changing a date.

    Args:
        model_uri: "models:/…".
        digest: of the checkpoint that was logged.

    Returns:
        True for a remote store, whose files would have to be fetched first: they are checked when they are.
    """
    import mlflow

    try:
        model = mlflow.MlflowClient().get_logged_model(model_uri.removeprefix("models:/"))
        place = local(model.artifact_location)
        if place is None:
            return True
        files = sorted((place / "model").iterdir())
        state = tuple(
            (file.name, (found := file.stat()).st_size, found.st_mtime_ns, found.st_ctime_ns) for file in files
        )
        return _digest(place / "model", state) == digest
    except (BadInput, OSError, mlflow.MlflowException):
        return False


@cache
def _digest(folder: Path, state: tuple) -> str:
    """A checkpoint's digest; a study asks for the same one several times. `state`: names, sizes and dates of its files."""
    return checkpoint.digest(folder)


def abandon(experiment_id: str, run_id: str) -> None:
    """Discard the half-made models of a run whose process died."""
    import mlflow

    client = mlflow.MlflowClient()
    for model in client.search_logged_models([experiment_id], filter_string=f"source_run_id = '{run_id}'"):
        if str(model.status) == "PENDING":
            _discard(client, model)


def local(uri: str) -> Path | None:
    """The path behind an artifact address, or None where it is on another machine."""
    from mlflow.utils.file_utils import local_file_uri_to_path
    from mlflow.utils.uri import is_local_uri

    return Path(local_file_uri_to_path(uri)) if is_local_uri(uri) else None


def _write_in_place(source: Path, target: Path, model: LoggedModel, facts: Mapping[str, Any], *, link: bool) -> None:
    """Build the folder under another name and rename it, so that it is there whole or not at all."""
    partial = _partial(target)
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "model").mkdir(parents=True)
    for file in _files(source):
        description.put(file, partial / "model" / file.name, link=link)
    description.write(partial, model, facts)
    if target.is_dir():
        target.rmdir()  # MLflow may have made it already, empty
    partial.rename(target)


def _upload(client, source: Path, model: LoggedModel, facts: Mapping[str, Any]) -> None:
    """Send the weights from where they lie; only the small files are put together first."""
    for file in _files(source):
        client.log_model_artifact(model.model_id, str(file.resolve()), "model")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "model").mkdir()
        for file in _files(source):
            if file.suffix != ".safetensors":
                description.put(file, Path(folder) / "model" / file.name, link=False)
        size = sum(file.stat().st_size for file in _files(source))
        description.write(Path(folder), model, facts, size=size)
        client.log_model_artifacts(model.model_id, folder)


def _files(folder: Path) -> list[Path]:
    """What makes the checkpoint, and what says whose it is; a trainer's leftovers stay behind."""
    wanted = (*checkpoint.shards(folder), *checkpoint.CONFIG_FILES, *checkpoint.TOKENIZER_FILES, *_CARDS)
    return [folder / file for file in dict.fromkeys(wanted) if (folder / file).is_file()]


def _discard(client, model: LoggedModel) -> None:
    """Mark a half-made model FAILED and remove its files."""
    if target := local(model.artifact_location):
        shutil.rmtree(_partial(target), ignore_errors=True)
        shutil.rmtree(target, ignore_errors=True)
    client.finalize_logged_model(model.model_id, "FAILED")


def _partial(target: Path) -> Path:
    return target.with_name(target.name + ".partial")
