"""The device and the dtype that models run in, decided once and recorded in every run."""

import os
import socket
import sys
from pathlib import Path

from qrl.errors import BadInput

ASKED = "QRL_GPUS"  # set in a job of a cluster: how many GPUs its node has to show


def choose(wanted: str) -> str:
    """Return `cpu` or `cuda` for the recipe's `device`; `auto` means a GPU if torch sees one.

    Raises:
        BadInput: the recipe says `cuda` and torch sees no GPU, or a cluster's node shows fewer than the job asked for.
    """
    asked = int(os.environ.get(ASKED) or 0) if wanted != "cpu" else 0
    if asked > (seen := gpus("cuda") if asked else 0):  # `auto` would compute on what is left, or on a CPU
        raise BadInput(
            f"cluster.yaml asks for {asked} GPU{'s' * (asked > 1)}, but torch sees {seen} on node "
            f"{socket.gethostname()}: compare with `nvidia-smi` there, or set device=cpu."
        )
    available = wanted != "cpu" and _sees_gpu()
    if wanted == "cuda" and not available:
        raise BadInput("device is 'cuda', but torch sees no GPU here: run on a machine with one, or set device=cpu.")
    return "cuda" if wanted == "cuda" or (wanted == "auto" and available) else "cpu"


def gpus(device: str) -> int:
    """Return how many GPUs torch sees; 0 on the device `cpu`."""
    if device == "cpu":
        return 0
    import torch

    return torch.cuda.device_count()


def _sees_gpu() -> bool:
    if "torch" not in sys.modules and not any(any(Path("/dev").glob(name)) for name in ("nvidia*", "kfd", "dxg")):
        return False  # the import would take seconds
    import torch

    return torch.cuda.is_available()


def compute_dtype(wanted: str, device: str):
    """Return the torch dtype of activations; `auto` is bf16 on a GPU, and fp32 on a CPU: bf16 varies by CPU."""
    import torch

    if wanted == "auto":
        wanted = "bf16" if device == "cuda" else "fp32"
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[wanted]
