"""How far quantization moves a model's hidden states, layer by layer; SpinQuant's rotation of them is undone first."""

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

    def states_of(folder: Path) -> list[Tensor]:
        model, _ = hf.load(folder, device, devices.compute_dtype("auto", device))
        hidden = states(model, rows)
        del model  # before the next one is loaded
        if device == "cuda":
            torch.cuda.empty_cache()
        return hidden

    original_states = states_of(source)
    quantized_states = states_of(quantized)
    quantization = checkpoint.config(quantized).get("quantization_config") or {}
    stream = rotation.of(quantization).get(rotation.STREAM)
    if stream:
        quantized_states = [rotation.turned(layer, stream["head_dim"]) for layer in quantized_states]
        # SpinQuant has moved the last norm's weight into the head.
        quantized_states[-1] *= dict(checkpoint.tensors(source, [_LAST_NORM]))[_LAST_NORM].float()
    return between(original_states, quantized_states)


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
    errors = []
    for layer, quantized_layer in zip(original, quantized, strict=True):
        error = (quantized_layer - layer).square().sum() / layer.square().sum()
        errors.append(error.item())
    return tuple(errors)
