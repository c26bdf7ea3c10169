"""The files of a logged model: linked, copied or uploaded, and removed if the model stays half-made.

`transformers.log_model` writes a checkpoint twice. Here the files of a step's own temporary folder are hard-linked into
the model's artifact folder. A user's files are copied once, since an edit in a linked folder would change the store.

    <artifacts>/MLmodel, requirements.txt, conda.yaml, python_env.yaml   what MLflow reads
    <artifacts>/model/                  the checkpoint: a plain folder that transformers and vLLM open in place
    <artifacts>/components/tokenizer/   the tokenizer's files again, by hard link: where MLflow's flavor looks for them
"""

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlflow
from mlflow.entities import LoggedModel
from mlflow.utils.file_utils import local_file_uri_to_path
from mlflow.utils.uri import is_local_uri

from qrl import checkpoint
from qrl.tracking import description, fetched
from qrl.workspace import check_space, partials, write_atomically

_CARDS = ("README.md", "LICENSE", "LICENSE.txt")


def local(uri: str | None) -> Path | None:
    """Return the path behind an artifact address, or None if it is on another machine."""
    return Path(local_file_uri_to_path(uri)) if uri and is_local_uri(uri) else None


def write(source: Path, model: LoggedModel, facts: Mapping[str, Any], *, link: bool) -> Path:
    """Write a checkpoint and MLflow's files about it into the store, and return the folder that holds the weights.

    `facts` go into MLmodel. With `link`, files of a local store are hard-linked if possible; else they are copied.

    Raises:
        BadInput: the store's disk lacks the space for a copy.
    """
    names = _names(source)
    target = local(model.artifact_location)
    if target:
        existing = next(path for path in target.parents if path.exists())
        is_other_disk = existing.stat().st_dev != source.stat().st_dev
        if not link or is_other_disk:
            check_space(
                target, sum((source / name).stat().st_size for name in names), "A copy of the model in the store"
            )
        with write_atomically(target) as partial:  # replaces the empty folder that MLflow may have made
            for name in names:
                (partial / "model" / name).parent.mkdir(parents=True, exist_ok=True)
                description.put(source / name, partial / "model" / name, link=link)
            description.write(partial, model, facts)
        return target / "model"
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            (Path(folder) / "model" / name).parent.mkdir(parents=True, exist_ok=True)
            (Path(folder) / "model" / name).symlink_to((source / name).resolve())
        description.write(Path(folder), model, facts)
        mlflow.MlflowClient().log_model_artifacts(model.model_id, folder)  # a file at a time, in parts
    fetched.check_sizes(model.artifact_location, source, names)
    if link:
        fetched.keep_uploaded(model.artifact_location, source, names)
    return source


def discard(model: LoggedModel) -> None:
    """Mark a half-made model FAILED and remove its files."""
    target = local(model.artifact_location)
    if target:
        for folder in (target, *partials(target)):
            shutil.rmtree(folder, ignore_errors=True)
    mlflow.finalize_logged_model(model.model_id, "FAILED")


def _names(folder: Path) -> list[str]:
    """Return the files of the checkpoint, its card and its licence; a trainer's leftovers stay behind."""
    return [*checkpoint.files(folder), *(name for name in _CARDS if (folder / name).is_file())]
