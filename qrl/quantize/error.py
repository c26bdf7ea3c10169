"""How far quantization moves a model's hidden states, layer by layer, and its logits.

SpinQuant's rotation of hidden states is undone first; logits are not rotated.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qrl import checkpoint
from qrl.formats import rotation
from qrl.quantize.verify import LAST_NORM

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

ROWS = 8  # texts to measure on; the mean is over their tokens
LAST_TOKENS = 16  # of a text whose logits are kept, which limits memory


@dataclass(frozen=True)
class Outputs:
    """What a model computes over the first `ROWS` texts, in float32 on the CPU."""

    layers: list[Tensor]  # each decoder layer's output, (T, H); T tokens together
    logits: Tensor  # (L, vocabulary) at the last `LAST_TOKENS` tokens of each text, L in all


@dataclass(frozen=True)
class Errors:
    """Relative squared errors of a quantized model's outputs, dimensionless; 0 is lossless."""

    layers: tuple[float, ...]  # ‖H − H'‖² / ‖H‖² of each decoder layer's output, the first layer first
    logits: float  # the same of logits, so that the head counts, too


def measure(source: Path, quantized: Path, rows: Sequence[Sequence[int]], device: str) -> Errors:
    """Return `between` of two checkpoint folders in transformers' engine, loaded one after the other."""
    texts = tuple(tuple(row) for row in rows[:ROWS])
    original_outputs = _of_original(source, tuple(checkpoint.state(source)), texts, device)
    quantized_outputs = _of_folder(quantized, texts, device)
    layers = quantized_outputs.layers
    quantization = checkpoint.config(quantized).get("quantization_config") or {}
    stream = rotation.of(quantization).get(rotation.STREAM)
    if stream:
        layers = [rotation.turned(layer, stream["head_dim"]) for layer in layers]
        # SpinQuant has moved the last norm's weight into the head.
        layers[-1] *= dict(checkpoint.tensors(source, [LAST_NORM]))[LAST_NORM].float()
    return between(original_outputs, Outputs(layers, quantized_outputs.logits))


@functools.lru_cache(maxsize=2)  # a step quantizes the base and a trained variant under one scheme after another
def _of_original(source: Path, _state: tuple, rows: tuple[tuple[int, ...], ...], device: str) -> Outputs:
    """Return the outputs of a folder in this state, computed once for all schemes."""
    return _of_folder(source, rows, device)


def _of_folder(folder: Path, rows: Sequence[Sequence[int]], device: str) -> Outputs:
    import torch

    from qrl.engine import device as devices
    from qrl.engine import hf

    model, _ = hf.load(folder, device, devices.compute_dtype("auto", device))
    computed = outputs(model, rows)
    del model  # before the next one is loaded
    if device == "cuda":
        torch.cuda.empty_cache()
    return computed


def outputs(model: PreTrainedModel, rows: Sequence[Sequence[int]]) -> Outputs:
    """Return what a model computes over the first `ROWS` rows of token ids."""
    import torch

    layers_of_rows: list[list[Tensor]] = []
    logits: list[Tensor] = []
    with torch.inference_mode():
        for row in rows[:ROWS]:
            ids = torch.tensor([list(row)], device=model.device)
            computed = model(ids, output_hidden_states=True, use_cache=False)
            _, *states = computed.hidden_states
            layers_of_rows.append([state[0].float().cpu() for state in states])
            logits.append(computed.logits[0, -LAST_TOKENS:].float().cpu())
    layers = [torch.cat(states) for states in zip(*layers_of_rows, strict=True)]
    return Outputs(layers, torch.cat(logits))


def between(original: Outputs, quantized: Outputs) -> Errors:
    """Return how far a quantized model's outputs are from the original's."""
    layers = [_relative(layer, other) for layer, other in zip(original.layers, quantized.layers, strict=True)]
    return Errors(tuple(layers), _relative(original.logits, quantized.logits))


def _relative(expected: Tensor, found: Tensor) -> float:
    return ((found - expected).square().sum() / expected.square().sum()).item()
