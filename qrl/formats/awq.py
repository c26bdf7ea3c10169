"""AutoAWQ's packed 4-bit weights ("GEMM" layout) as plain matrices, so that they run where AWQ has no kernel.

A linear of O outputs and I inputs, in groups of S inputs, is stored as
    qweight  (I, O/8)    int32, eight 4-bit codes each
    qzeros   (I/S, O/8)  int32, eight 4-bit zero points each
    scales   (I/S, O)    float16
and stands for (code - zero) · scale. Nibble n of a word, counted from the lowest, belongs to output ORDER[n] of its eight.
Source: awq/utils/packing_utils.py and awq/modules/linear/gemm.py of AutoAWQ 0.2.9.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from qrl import checkpoint
from qrl.errors import BadInput

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

BITS = 4
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output, of eight, that each nibble holds
PARTS = ("qweight", "qzeros", "scales")


def unpack(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> Tensor:
    """The weight (O, I), in the scales' dtype, that a packed linear stands for; bit for bit as AutoAWQ dequantizes it.

    Args:
        qweight: (I, O/8) int32.
        qzeros: (I/S, O/8) int32.
        scales: (I/S, O), float16 as stored.
    """
    group_size = qweight.shape[0] // qzeros.shape[0]
    return (centred(qweight, qzeros, group_size) * scales.repeat_interleave(group_size, dim=0)).T.contiguous()


def centred(qweight: Tensor, qzeros: Tensor, group_size: int) -> Tensor:
    """Codes less their zero points: (I, O) int8."""
    return _nibbles(qweight) - _nibbles(qzeros).repeat_interleave(group_size, dim=0)


def unpack_checkpoint_state(path: Path | str) -> dict[str, Tensor]:
    """An AWQ checkpoint's tensors under the names of an ordinary one: each `x.qweight` and its parts become `x.weight`.

    Raises:
        BadInput: the checkpoint is not AutoAWQ's 4-bit GEMM layout.
    """
    settings = checkpoint.config(path).get("quantization_config") or {}
    layout = (settings.get("quant_method"), settings.get("bits"), str(settings.get("version", "gemm")).lower())
    if layout != ("awq", BITS, "gemm"):
        raise BadInput(
            f"{path} is not an AWQ checkpoint in 4-bit GEMM layout (found {layout}): quantize it with scheme awq."
        )
    packed: dict[str, dict[str, Tensor]] = {}
    state = {}
    for name, tensor in checkpoint.tensors(path):
        prefix, _, part = name.rpartition(".")
        if part not in PARTS:
            state[name] = tensor
            continue
        parts = packed.setdefault(prefix, {})
        parts[part] = tensor
        if len(parts) == len(PARTS):
            state[f"{prefix}.weight"] = unpack(**packed.pop(prefix))
    if packed:
        prefix = min(packed)
        absent = ", ".join(sorted(set(PARTS) - set(packed[prefix])))
        raise BadInput(f"{path} lacks {absent} of {prefix}: quantize it again.")
    return state


def load_unpacked(path: Path | str, dtype: torch.dtype) -> PreTrainedModel:
    """An AWQ checkpoint as an ordinary model on the CPU, with the values that its codes stand for.

    Args:
        path: a folder that `checkpoint.check` accepts.
        dtype: of the model; float32 and float16 hold the values exactly, bfloat16 rounds them.

    Raises:
        BadInput: not AutoAWQ's layout, or tensors that do not fit the architecture.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    settings = AutoConfig.from_pretrained(path, trust_remote_code=False)
    del settings.quantization_config
    state = {name: tensor.to(dtype) for name, tensor in unpack_checkpoint_state(path).items()}
    model = AutoModelForCausalLM.from_config(settings, dtype=dtype, trust_remote_code=False)
    missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if settings.tie_word_embeddings else set()
    wrong = sorted((set(missing) - tied) | set(unexpected))
    if wrong:
        raise BadInput(f"{path} does not fit its architecture {settings.model_type}: {wrong[0]} is missing or unknown.")
    if (Path(path) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model.eval()


def _nibbles(words: Tensor) -> Tensor:
    """Eight 4-bit values of each int32, in the order of the outputs: (R, C) → (R, 8·C) int8."""
    import torch

    shifts = torch.empty(len(ORDER), dtype=torch.int32)
    shifts[list(ORDER)] = torch.arange(0, BITS * len(ORDER), BITS, dtype=torch.int32)
    found = torch.empty(*words.shape, len(ORDER), dtype=torch.int8)
    for place, shift in enumerate(
        shifts.tolist()
    ):  # one of the eight at a time: all of them as int32 are 32 bits a code
        found[:, :, place] = (words >> shift) & (2**BITS - 1)
    return found.flatten(1)
