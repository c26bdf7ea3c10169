"""Find the newest checkpoint that a killed training left whole."""

import functools
import json
import warnings
import zipfile
from pathlib import Path

import torch

from qrl import process
from qrl.errors import BadInput
from qrl.formats import header


def latest(work: Path) -> Path | None:
    """Return the newest whole `checkpoint-N` in a folder, if there is one; skip broken ones with a warning."""
    for path in sorted(work.glob("checkpoint-*"), key=step, reverse=True):
        reason = _broken(path)
        if reason is None:
            return path
        warnings.warn(f"{path.name} is broken ({reason}): the checkpoint before it is used.", stacklevel=2)
    return None


def step(checkpoint: Path) -> int:
    """Return the optimizer step of a `checkpoint-N`."""
    return int(checkpoint.name.rpartition("-")[2])


@functools.cache
def register_numbered_cpus() -> None:
    """Let torch load a checkpoint to "cpu:0", which several processes on a CPU ask for; torch knows only "cpu"."""
    torch.serialization.register_package(
        15, lambda storage: None, lambda storage, place: storage if place.startswith("cpu:") else None
    )


def _broken(path: Path) -> str | None:
    """Return why a checkpoint cannot be resumed from: a kill while saving leaves files missing or truncated."""
    world, optimizer = process.world_size(), "optimizer.bin" if process.sharded() else "optimizer.pt"
    states = [f"rng_state_{rank}.pth" for rank in range(world)] if world > 1 else ["rng_state.pth"]
    try:
        json.loads((path / "trainer_state.json").read_text())
        weights = list(path.glob("*.safetensors"))
        for file in weights:
            if not header.read(file):
                return f"{file.name} holds no weights"
        for name in (optimizer, "scheduler.pt", *states):
            if (bad := zipfile.ZipFile(path / name).testzip()) is not None:
                return f"{name} holds a damaged {bad}"
    except (OSError, ValueError, zipfile.BadZipFile, BadInput) as error:
        return str(error)
    return None if weights else "it holds no weights"
