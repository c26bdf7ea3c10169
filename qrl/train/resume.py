"""The newest checkpoint that a killed training can go on from."""

from __future__ import annotations

import json
import warnings
import zipfile
from pathlib import Path

from qrl import process
from qrl.errors import BadInput
from qrl.formats import header

STATE = "trainer_state.json"
_NUMBERED: list[bool] = []  # whether torch knows numbered CPUs


def latest(work: Path) -> Path | None:
    """The newest whole `checkpoint-N` below a folder; broken ones are skipped with a warning.

    Args:
        work: the trainer's output folder; need not exist.
    """
    found = sorted(work.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)
    for path in found:
        reason = _broken(path)
        if reason is None:
            return path
        warnings.warn(f"{path.name} is broken ({reason}) and is skipped for the one before it.", stacklevel=2)
    return None


def read_to_cpus() -> None:
    """Lets torch load a checkpoint to a device named "cpu:0": the trainer of one of several processes on a CPU asks for that, and torch knows "cpu" alone."""
    import torch

    if not _NUMBERED:
        torch.serialization.register_package(
            15, lambda storage: None, lambda storage, place: storage if place.startswith("cpu:") else None
        )
        _NUMBERED.append(True)


def _broken(path: Path) -> str | None:
    """Why a checkpoint cannot be resumed from; a kill in the middle of saving leaves files missing or cut."""
    try:
        json.loads((path / STATE).read_text())
        weights = list(path.glob("*.safetensors"))
        for file in weights:
            if not header.read(file):
                return f"{file.name} holds no weights"
        states = (
            [f"rng_state_{rank}.pth" for rank in range(world)]
            if (world := process.world_size()) > 1
            else ["rng_state.pth"]
        )
        optimizer = "optimizer.bin" if process.sharded() else "optimizer.pt"
        for name in (optimizer, "scheduler.pt", *states):
            if (bad := zipfile.ZipFile(path / name).testzip()) is not None:
                return f"{name} holds a damaged {bad}"
    except (OSError, ValueError, zipfile.BadZipFile, BadInput) as error:
        return str(error)
    return None if weights else "it holds no weights"
