"""Where models run, and in which dtype: decided once, said in every run."""

from __future__ import annotations

from qrl.errors import BadInput


def choose(wanted: str) -> str:
    """`cpu` or `cuda`, from the recipe's `device`.

    Args:
        wanted: `auto` takes a GPU if there is one; `cpu` and `cuda` are taken at their word.

    Raises:
        BadInput: `cuda` on a machine where torch sees no GPU.
    """
    import torch

    found = torch.cuda.is_available()
    if wanted == "cuda" and not found:
        raise BadInput(
            "The recipe asks for device 'cuda', but torch sees no GPU here: run on a machine with one, or set device=cpu."
        )
    return "cuda" if wanted == "cuda" or (wanted == "auto" and found) else "cpu"


def compute_dtype(wanted: str, device: str):
    """The torch dtype of activations: `auto` is bf16 on a GPU and fp32 on a CPU, where bf16 kernels vary by machine."""
    import torch

    if wanted == "auto":
        wanted = "bf16" if device == "cuda" else "fp32"
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[wanted]
