"""Writing a trained model as a checkpoint folder that appears whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from qrl import checkpoint
from qrl.errors import QrlError
from qrl.formats import header

if TYPE_CHECKING:
    import torch


def write(
    model,
    base: Path,
    out: Path,
    *,
    dtype: str | None,
    state: dict[str, torch.Tensor] | None = None,
    note: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Saves weights, with the base's own tokenizer files, so that prompts stay identical; by rename.

    Args:
        model: a transformers model, or a PEFT model of which the adapter alone is written.
        base: folder whose tokenizer, chat template and generation settings come along.
        out: folder to make; must not exist.
        dtype: name of the dtype to store, e.g. "bfloat16"; None leaves the weights as they are.
        state: the weights by name, where several processes hold parts of the model; None takes the model's own.
        note: writes what else belongs into the folder before it appears.

    Raises:
        QrlError: an adapter's weights were not found in the model.
    """
    import torch

    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    if dtype is not None and state is None:
        model = model.to(getattr(torch, dtype))
    elif (
        dtype is not None
    ):  # the model's own weights are parts, laid out for several processes; a tied one is gathered twice
        state = {
            name: weight.to(getattr(torch, dtype))
            for name, weight in state.items()
            if name not in model.all_tied_weights_keys
        }
    model.save_pretrained(partial, state_dict=state)
    if dtype is None:
        _settle_adapter(partial)
    if dtype is not None and state is not None:  # it wrote the dtype of those parts
        config = json.loads((partial / "config.json").read_text())
        (partial / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2) + "\n")
    for name in (*checkpoint.TOKENIZER_FILES, "generation_config.json"):
        (partial / name).unlink(missing_ok=True)
        if (base / name).is_file():
            shutil.copy2(base / name, partial / name)
    note(partial)
    partial.rename(out)


def _settle_adapter(folder: Path) -> None:
    """Refuses an adapter without weights, and writes the names of its matrices in one order: PEFT keeps a set, which has another in every process."""
    if not header.read(folder / "adapter_model.safetensors"):
        raise QrlError(
            "The adapter was written without any weight: this is a fault of qrl or of a library; train.method=full is not concerned."
        )
    config = json.loads((folder / "adapter_config.json").read_text())
    if isinstance(config["target_modules"], list):
        config["target_modules"].sort()
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
