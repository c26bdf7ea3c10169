"""The device and the dtype that models run in, decided once and recorded in every run."""

import os
import socket
import sys
from pathlib import Path

from qrl.errors import BadInput

GPUS_VARIABLE = "QRL_GPUS"  # environment variable of a cluster's job: the GPUs that its node must show


def choose(setting: str) -> str:
    """Return `cpu` or `cuda` for the recipe's `device`; `auto` means a GPU if torch sees one.

    Raises:
        BadInput: the recipe says `cuda` and torch sees no GPU, or a cluster's node shows fewer than the job asked for.
    """
    if setting == "cpu":
        return "cpu"
    _check_cluster_gpus()
    if _sees_gpu():
        return "cuda"
    if setting == "cuda":
        raise BadInput("device is 'cuda', but torch sees no GPU here: run on a machine with one, or set device=cpu.")
    return "cpu"


def _check_cluster_gpus() -> None:
    """Raise BadInput if a cluster's node shows fewer GPUs than the job asked for."""
    required = int(os.environ.get(GPUS_VARIABLE) or 0)
    if not required:
        return
    visible = gpus("cuda")
    if visible < required:  # `auto` would silently compute on fewer GPUs, or on the CPU
        plural = "s" if required > 1 else ""
        raise BadInput(
            f"cluster.yaml asks for {required} GPU{plural}, but torch sees {visible} on node "
            f"{socket.gethostname()}: compare with `nvidia-smi` there, or set device=cpu."
        )


def gpus(device: str) -> int:
    """Return how many GPUs torch sees; 0 on the device `cpu`."""
    if device == "cpu":
        return 0
    import torch

    return torch.cuda.device_count()


def _sees_gpu() -> bool:
    # Importing torch takes seconds. Without a device file of NVIDIA, AMD or WSL there is no GPU to find.
    device_files = [file for pattern in ("nvidia*", "kfd", "dxg") for file in Path("/dev").glob(pattern)]
    if "torch" not in sys.modules and not device_files:
        return False
    import torch

    return torch.cuda.is_available()


def compute_dtype(setting: str, device: str):
    """Return the torch dtype of activations; `auto` is bf16 on a GPU, and fp32 on a CPU: bf16 varies by CPU."""
    import torch

    if setting == "auto":
        setting = "bf16" if device == "cuda" else "fp32"
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[setting]
