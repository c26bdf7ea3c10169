"""How far quantization moves a model's hidden states, layer by layer; states that SpinQuant turned are turned back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qrl import checkpoint
from qrl.formats import rotation

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

_LAST_NORM = "model.norm.weight"
ROWS = 8  # texts to measure on; the mean is over their tokens


def measure(source: Path, quantized: Path, rows: Sequence[Sequence[int]], device: str) -> tuple[float, ...]:
    """Return `between` of two checkpoint folders in transformers' engine, loaded one after the other."""
    import torch

    from qrl.engine import device as devices
    from qrl.engine import hf

    hidden = []
    for folder in (source, quantized):
        model, _ = hf.load(folder, device, devices.compute_dtype("auto", device))
        hidden.append(states(model, rows))
        del model
        if device == "cuda":
            torch.cuda.empty_cache()
    original, moved = hidden
    quantization = checkpoint.config(quantized).get("quantization_config") or {}
    if stream := rotation.of(quantization).get(rotation.STREAM):
        moved = [rotation.turned(layer, stream["head_dim"]) for layer in moved]
        moved[-1] *= dict(checkpoint.tensors(source, [_LAST_NORM]))[_LAST_NORM].float()  # the head holds it there
    return between(original, moved)


def states(model: PreTrainedModel, rows: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return each decoder layer's output, (T, H) in float32 on the CPU; T tokens in the first `ROWS` rows together."""
    import torch

    layers: list[list[Tensor]] = []
    with torch.inference_mode():
        for row in rows[:ROWS]:
            ids = torch.tensor([list(row)], device=model.device)
            _, *outputs = model(ids, output_hidden_states=True, use_cache=False).hidden_states
            layers.append([output[0].float().cpu() for output in outputs])
    return [torch.cat(states) for states in zip(*layers, strict=True)]


def between(original: Sequence[Tensor], quantized: Sequence[Tensor]) -> tuple[float, ...]:
    """Return ||H − H'||² / ||H||² of each layer's states, dimensionless; 0 is lossless."""
    pairs = zip(original, quantized, strict=True)
    return tuple(((after - before).square().sum() / before.square().sum()).item() for before, after in pairs)
