"""Fake quantization: the values that a matrix has once it was stored in few bits and read back, in floating point.

The arithmetic is compressed-tensors' own, so that what a training sees is what llm-compressor stores: scales from the
largest |w| of a channel, group or block, codes by rounding to the nearest, ties to even. Its integer grid is the whole
one: scale = max|w| / (2^bits - 1) · 2, codes -8..7 for four bits, so that a group's largest weight, if positive, is cut
from 7.5 to 7; refitting scales to values that were quantized already therefore moves integers once more.

Shapes: O output features, I input features, S inputs that share a scale, G = I / S groups of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qrl.errors import BadInput

if TYPE_CHECKING:
    import torch
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from torch import Tensor

# Recipe's name → the field's name for it, as compressed-tensors and vLLM know it; int8 is none of their presets.
PRESETS = {
    "int8": None,  # per output channel, activations untouched
    "int8-attention": None,  # the same in attention alone, the scope of seed 002's straight-through arm
    "int4": "W4A16",  # groups of 128
    "nvfp4-a16": "NVFP4A16",  # blocks of 16, FP8 block scales, one scale a tensor; activations untouched
    "nvfp4-a4": "NVFP4",  # activations too: blocks of 16 scaled as they come, one calibrated scale a tensor
    "fp8": "FP8_DYNAMIC",  # per output channel; activations per token, scaled as they come
    "mxfp4": "MXFP4A16",  # blocks of 32, scales powers of two; activations untouched
}
FORMATS = tuple(PRESETS)


@dataclass(frozen=True)
class Scales:
    """What codes are multiplied by; for NVFP4 `scale / global_scale` is."""

    scale: Tensor  # (O, 1) per channel, (O, G) per group
    global_scale: Tensor | None  # (1,) float32, the inverse of a tensor's scale, as compressed-tensors stores it


def scheme(name: str) -> QuantizationScheme:
    """How a format stores weights and feeds activations, in compressed-tensors' words.

    Raises:
        BadInput: an unknown format, or compressed-tensors is not installed.
    """
    if name not in PRESETS:
        raise BadInput(f"There is no format '{name}' to train in: expected one of {', '.join(FORMATS)}.")
    quantization = library()
    if (preset := PRESETS[name]) is not None:
        return quantization.preset_name_to_scheme(preset, ["Linear"])
    weights = quantization.QuantizationArgs(num_bits=8, type="int", strategy="channel", symmetric=True)
    return quantization.QuantizationScheme(targets=["Linear"], weights=weights)


def library():
    """compressed-tensors' quantization functions.

    Raises:
        BadInput: they are not installed here.
    """
    try:
        from compressed_tensors import quantization
    except ImportError:
        raise BadInput(
            "Quantization-aware training needs compressed-tensors, which is not installed here: run the step in an environment "
            "that has it, or set train.qat=none."
        ) from None
    return quantization


def check_width(name: str, in_features: int, args: QuantizationArgs) -> None:
    """Refuses a linear whose inputs a group does not divide, by its name."""
    if args.group_size and in_features % args.group_size:
        raise BadInput(
            f"Layer {name} has {in_features} inputs, which groups of {args.group_size} do not divide: choose a format with "
            "scales per channel (int8, fp8), or one with smaller groups (mxfp4: 32, nvfp4: 16)."
        )


def scales(weight: Tensor, args: QuantizationArgs, largest: Tensor | None = None) -> Scales:
    """Scales of a matrix from its largest |w|.

    Args:
        weight: (O, I), any float dtype; S divides I.
        args: of the format's weights; `args.group_size` is S, or None for a scale per channel.
        largest: (), largest |w| over all matrices that share NVFP4's global scale; default: this one's.
    """
    found = _extremes(weight, args)
    return _scales(*found, args, _largest(*found) if largest is None else largest)


def _extremes(weight: Tensor, args: QuantizationArgs) -> tuple[Tensor, Tensor]:
    """Least and largest weight of each group, (O, G)."""
    groups = weight.detach().unflatten(-1, (-1, args.group_size or weight.shape[-1]))
    return groups.amin(-1), groups.amax(-1)


def _largest(low: Tensor, high: Tensor) -> Tensor:
    """Largest |w|, (); NaN where there is one."""
    return (-low.amin()).maximum(high.amax())


def _scales(low: Tensor, high: Tensor, args: QuantizationArgs, largest: Tensor) -> Scales:
    """Scales from each group's extremes, (O, G), and the largest |w| of those that share a global scale, ().

    Source: compressed-tensors 0.19, calculate_qparams and generate_gparam, as llm-compressor's min-max observer calls them.
    """
    from compressed_tensors.quantization.utils import calculate_qparams

    shared = global_scale(largest) if args.strategy == "tensor_group" else None
    scale, _ = calculate_qparams(low, high, args, global_scale=shared)
    return Scales(scale, shared)


def values(weight: Tensor, args: QuantizationArgs, by: Scales, dtype: torch.dtype | None = None) -> Tensor:
    """The matrix that a weight's codes stand for under given scales.

    Args:
        weight: (O, I), any float dtype.
        args: of the format's weights.
        by: as `scales` gives them.
        dtype: to compute with it in; default: the weight's own. A narrower one rounds the scale first and the product then, as
            a checkpoint of these codes is unpacked where it is loaded in that dtype.

    Returns:
        (O, I). Four-bit floats are rounded to bfloat16 in any case, as compressed-tensors unpacks them.
    """
    import torch

    weight, dtype = weight.detach(), dtype or weight.dtype
    if args.type == "float" and args.num_bits == 4:
        found = library().fake_quantize(weight, by.scale, None, args, global_scale=by.global_scale)
        return found.to(torch.bfloat16).to(dtype)
    if dtype == weight.dtype:
        return library().fake_quantize(weight, by.scale, None, args)
    codes = library().quantize(weight, by.scale, None, args)
    return library().dequantize(codes, by.scale.to(dtype), None, args, dtype=dtype)


def quantized(
    weight: Tensor, args: QuantizationArgs, largest: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Q(W): `values` under the matrix's own `scales`."""
    return values(weight, args, scales(weight, args, largest), dtype)


def folded(
    weights: Sequence[Tensor], args: QuantizationArgs, dtype: torch.dtype | None = None
) -> tuple[list[Tensor], Tensor]:
    """Q(W) of matrices that share NVFP4's global scale.

    Args:
        weights: M matrices (O_m, I).
        args: of the format's weights.
        dtype: as `values` takes it.

    Returns:
        Q(W) of each, and each one's largest |w|, (M,): NaN or infinite where the matrix holds such a value.
    """
    import torch

    found = [_extremes(weight, args) for weight in weights]
    largest = torch.stack([_largest(*each) for each in found])
    shared = [_scales(*each, args, largest.amax()) for each in found]
    return [values(weight, args, by, dtype) for weight, by in zip(weights, shared, strict=True)], largest


def activations(inputs: Tensor, args: QuantizationArgs, global_scale: Tensor | None = None) -> Tensor:
    """What a linear's inputs become when they are fed in few bits, scaled token by token, or block by block, as they come.

    Args:
        inputs: (..., I).
        args: of the format's activations.
        global_scale: (1,), calibrated, for NVFP4.

    Returns:
        The same shape and dtype.

    Source: compressed-tensors 0.19, forward_quantize.
    """
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    tokens = inputs.detach().reshape(1, -1, inputs.shape[-1])  # it takes the first two dimensions for batch and token
    scale, _ = compute_dynamic_scales_and_zp(tokens, args, None, global_scale=global_scale)
    done = library().fake_quantize(tokens, scale, None, args, global_scale=global_scale)
    return done.reshape(inputs.shape).to(inputs.dtype)


def global_scale(largest: Tensor) -> Tensor:
    """NVFP4's scale of a tensor, (1,) float32, from the largest |x| that it may hold: 6 · 448 / largest."""
    from compressed_tensors.quantization.utils import generate_gparam

    largest = largest.float().reshape(1)
    return generate_gparam(-largest, largest)
