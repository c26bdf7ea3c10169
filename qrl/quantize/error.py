"""How far quantization moves what a model computes, layer by layer.

Errors of weights cannot be compared over schemes: AWQ scales the weights first and undoes it in the norm before them. What
every decoder layer hands on can, whatever the scheme; it holds the error of all layers up to this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

ROWS = 8  # texts that are looked at; the mean is over their tokens


def measure(source: Path, quantized: Path, rows: Sequence[Sequence[int]], device: str) -> tuple[float, ...]:
    """`between` of two checkpoint folders, one in memory at a time, as transformers' engine runs them."""
    import torch

    from qrl.engine import device as devices
    from qrl.engine import hf

    found = []
    for folder in (source, quantized):
        model, _ = hf.load(folder, device, devices.compute_dtype("auto", device))
        found.append(states(model, rows))
        del model
        if device == "cuda":
            torch.cuda.empty_cache()
    return between(*found)


def states(model: PreTrainedModel, rows: Sequence[Sequence[int]]) -> list[Tensor]:
    """What each decoder layer hands on: a tensor (T, H) a layer, in float32 on the CPU, T tokens of the first rows in all."""
    import torch

    layers: list[list[Tensor]] = []
    with torch.inference_mode():
        for row in rows[:ROWS]:
            given = torch.tensor([list(row)], device=model.device)
            _, *after = model(given, output_hidden_states=True, use_cache=False).hidden_states
            layers.append([state[0].float().cpu() for state in after])
    return [torch.cat(states) for states in zip(*layers, strict=True)]


def between(original: Sequence[Tensor], quantized: Sequence[Tensor]) -> tuple[float, ...]:
    """||H − H'||² / ||H||² of each layer's states, dimensionless; 0 is lossless."""
    pairs = zip(original, quantized, strict=True)
    return tuple(((after - before).square().sum() / before.square().sum()).item() for before, after in pairs)
