"""Writing a trained model as a checkpoint folder that appears whole."""

from __future__ import annotations

import shutil
from pathlib import Path

from qrl import checkpoint


def write(model, base: Path, out: Path, *, dtype: str | None) -> None:
    """Saves weights, with the base's own tokenizer files, so that prompts stay identical; by rename.

    Args:
        model: a transformers model, or a PEFT model of which the adapter alone is written.
        base: folder whose tokenizer, chat template and generation settings come along.
        out: folder to make; must not exist.
        dtype: name of the dtype to store, e.g. "bfloat16"; None leaves the weights as they are.
    """
    import torch

    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    if dtype is not None:
        model = model.to(getattr(torch, dtype))
    model.save_pretrained(partial)
    for name in (*checkpoint.TOKENIZER_FILES, "generation_config.json"):
        (partial / name).unlink(missing_ok=True)
        if (base / name).is_file():
            shutil.copy2(base / name, partial / name)
    partial.rename(out)
