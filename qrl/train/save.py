"""Writing a trained model as a checkpoint folder that appears whole."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from qrl import checkpoint

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
    """
    import torch

    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    if dtype is not None:
        model = model.to(getattr(torch, dtype))
        state = {name: weight.to(getattr(torch, dtype)) for name, weight in state.items()} if state else None
    model.save_pretrained(partial, state_dict=state)
    for name in (*checkpoint.TOKENIZER_FILES, "generation_config.json"):
        (partial / name).unlink(missing_ok=True)
        if (base / name).is_file():
            shutil.copy2(base / name, partial / name)
    note(partial)
    partial.rename(out)
