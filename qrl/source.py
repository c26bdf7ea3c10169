"""The folder behind a model's name: the shipped model, a checkpoint folder, or a download from the hub."""

import os
import re
from pathlib import Path

from qrl import checkpoint, tiny
from qrl.errors import BadInput

SHIPPED = {"qrl-tiny": tiny.PATH}
EXAMPLE = "Qwen/Qwen2.5-1.5B-Instruct"
HUB_FILES = [
    "*.safetensors",
    *checkpoint.CONFIGS,
    "adapter_config.json",
    *checkpoint.TEXTS,
    f"{checkpoint.TEMPLATES}/*.jinja",
]
NOT_READ = ["consolidated*"]  # Mistral's weights once more, which vLLM would prefer


def locate(model: str) -> Path:
    """Return the folder of a model; a hub id is downloaded into the hub's own cache, weights as safetensors only.

    Args:
        model: `qrl-tiny`, the path of a folder (a relative one counts from the working directory), or `owner/name`.

    Raises:
        BadInput: there is no such folder, or the hub has no such model or cannot be reached.
    """
    if model in SHIPPED:
        return SHIPPED[model]
    if Path(model).is_dir():
        return Path(model).resolve()
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", model) or model.startswith((".", "/")):
        expected = f"{', '.join(SHIPPED)}, a folder that holds a checkpoint, or a hub id such as {EXAMPLE}"
        if model.startswith("models:/"):  # which a teacher may have
            expected += ". The folder of a logged model lies in the store, as mlruns/…/models/m-…/artifacts/model"
        raise BadInput(f"There is no model '{model}': expected {expected}.{_absolute(model)}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=HUB_FILES, ignore_patterns=NOT_READ))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise BadInput(
            f"'{model}' is not a folder, and the hub did not provide it ({type(error).__name__}): check its spelling, "
            f"the network, and `hf auth login` for gated models, or give a local folder.{_absolute(model)}"
        ) from None


def short_name(model: str) -> str:
    """Return a model's name in titles: `my-model` of a folder or hub id, `qrl-tiny/3` of models:/qrl-tiny/3."""
    return model.removeprefix("models:/") if model.startswith("models:/") else Path(model).name


def _absolute(model: str) -> str:
    """Return a sentence with the absolute path to try: `mlflow run FOLDER` starts steps in FOLDER."""
    if Path(model).is_absolute() or not os.environ.get("MLFLOW_RUN_ID"):
        return ""
    rule = f" Under `mlflow run`, a relative path counts from {Path.cwd()}"
    try:
        mlflow_folder = Path(f"/proc/{os.getppid()}/cwd").resolve(
            strict=True
        )  # where the command was typed; Linux only
    except OSError:
        return f"{rule}: give an absolute path."
    if mlflow_folder == Path.cwd():
        return f"{rule}: give an absolute path."
    path = Path(os.path.normpath(mlflow_folder / model))
    note = "which exists" if path.is_dir() else "if you meant that"
    return f"{rule}: give the absolute path, {path}, {note}."
