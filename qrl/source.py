"""Where a model's name leads: the shipped model, a checkpoint folder, or the hub."""

from __future__ import annotations

import re
from pathlib import Path

from qrl import tiny
from qrl.errors import BadInput

SHIPPED = {"qrl-tiny": tiny.PATH}
HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "merges.txt", "vocab.txt", "*.jinja", "*.model"]


def locate(model: str) -> Path:
    """The folder of a model; a hub id is downloaded into the hub's own cache, weights as safetensors only.

    Args:
        model: `qrl-tiny`, the path of a folder (relative ones count from the working directory), or `owner/name`.

    Raises:
        BadInput: no such folder, or the hub has no such model or cannot be reached.
    """
    if model in SHIPPED:
        return SHIPPED[model]
    if Path(model).is_dir():
        return Path(model).resolve()
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", model) or model.startswith((".", "/")):
        raise BadInput(
            f"There is no model '{model}': expected {', '.join(SHIPPED)}, a folder that holds a checkpoint, "
            "or a hub id such as Qwen/Qwen2.5-1.5B-Instruct."
        )
    return _download(model)


def _download(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=HUB_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise BadInput(
            f"'{model}' is no folder here and could not be had from the hub ({reason}): check its spelling, "
            "the network, and `hf auth login` for gated models."
        ) from None
