"""Round a matrix or activations to a format and back, in floating point: the eager reference for `fused`.

The arithmetic is compressed-tensors' own, so that training computes with what llm-compressor stores: scales from the
largest |w| of a channel, group or block; codes rounded to nearest, ties to even. Its integer grid uses every code:
scale = max|w| / (2^bits - 1) · 2, codes -8..7 for four bits, so that a group's largest weight, if positive, is clipped
from 7.5 to 7. Refitting scales to quantized values therefore moves integers once more.

Shapes: O output features, I input features, S inputs that share a scale, G = I / S groups in a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qrl.errors import BadInput
from qrl.formats import groups
from qrl.formats.fakequant import file, presets

if TYPE_CHECKING:
    import torch
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from torch import Tensor, nn

Folded = tuple[list["Tensor"], "Tensor"]  # Q(W) of M matrices, and each one's largest |w|, (M,)


def scheme(name: str, group_size: int = groups.USUAL) -> QuantizationScheme:
    """Return how a format rounds weights and activations, as compressed-tensors' scheme.

    Args:
        name: one of `names.FORMATS`, or a YAML file with the fields of compressed-tensors' QuantizationScheme.
        group_size: inputs that share a scale, for `names.GROUPED_FORMATS`; the others define their own.

    Raises:
        BadInput: the format is unknown, the file holds no scheme or one that training cannot compute, or
            compressed-tensors is not installed.
    """
    if name.endswith(".yaml"):
        return file.read(Path(name))
    return presets.scheme(name, group_size)


def check_width(name: str, linear: nn.Linear, args: QuantizationArgs) -> None:
    """Raise BadInput, with the linear's name, where groups do not divide its inputs, or blocks its matrix."""
    shape = (linear.out_features, linear.in_features)
    if args.block_structure and any(size % side for size, side in zip(shape, args.block_structure, strict=True)):
        blocks = " × ".join(map(str, args.block_structure))
        raise BadInput(
            f"Layer {name} is {shape[0]} × {shape[1]}, which blocks of {blocks} do not divide: choose others."
        )
    if args.group_size and linear.in_features % args.group_size:
        advice = "a format with scales per channel (int8, fp8), or one with smaller groups (mxfp4: 32, nvfp4: 16)"
        if args.type == "int" and groups.fitting([linear.in_features]):
            advice = f"smaller groups (quantize.group_size = auto, or weights.group_size in your FILE.yaml), {advice}"
        raise BadInput(
            f"Layer {name} has {linear.in_features} inputs, which groups of {args.group_size} do not divide: choose "
            f"{advice}."
        )


def scales(weights: Sequence[Tensor], args: QuantizationArgs) -> tuple[list[Tensor], Tensor | None, Tensor]:
    """Return the scales of M matrices (O_m, I), any float dtype, and each one's largest |w|.

    Returns:
        The scale of each, (O_m, 1) per channel, (O_m, G) per group, (1,) per tensor, one number per block; NVFP4's
        global scale, (1,) float32, which all share: a code's factor is scale / global_scale; and (M,): NaN or infinite
        where a matrix holds such a value.

    Source: compressed-tensors 0.19, calculate_qparams and generate_gparam, as llm-compressor's min-max observer calls
    them.
    """
    import torch

    grouped_weights = [_grouped(weight.detach(), args) for weight in weights]
    extremes = [(group.amin(-1), group.amax(-1)) for group in grouped_weights]
    largest = torch.stack([(-low.amin()).maximum(high.amax()) for low, high in extremes])
    common_scale = global_scale(largest.amax()) if args.strategy == "tensor_group" else None
    return [_qparams(low, high, args, common_scale) for low, high in extremes], common_scale, largest


def _grouped(weight: Tensor, args: QuantizationArgs) -> Tensor:
    """Return a matrix with the weights that share a scale in the last dimension."""
    if args.strategy == "tensor":
        return weight.reshape(1, -1)
    if args.strategy == "block":
        height, width = args.block_structure
        tiles = weight.unflatten(-1, (-1, width)).unflatten(0, (-1, height))  # (O / height, height, I / width, width)
        return tiles.transpose(1, 2).flatten(2)
    return weight.unflatten(-1, (-1, args.group_size or weight.shape[-1]))


def _qparams(low: Tensor, high: Tensor, args: QuantizationArgs, common_scale: Tensor | None = None) -> Tensor:
    """Return the scales of groups with these extremes, computed on a CPU.

    compressed-tensors 0.17, which vLLM 0.31 pins, divides by a Python number. A GPU then multiplies by its reciprocal,
    which is off by one unit in the last place from 0.19's division, and so from what is stored.
    """
    from compressed_tensors.quantization.utils import calculate_qparams

    if common_scale is not None:
        common_scale = common_scale.cpu()
    group_scales, _ = calculate_qparams(low.cpu(), high.cpu(), args, global_scale=common_scale)
    return group_scales.to(low.device)


def values(
    weight: Tensor, args: QuantizationArgs, scale: Tensor, common_scale: Tensor | None, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the matrix (O, I) that the codes of a weight encode, in `dtype`; default: the weight's.

    A narrower one rounds the scale first and then the product, as when a checkpoint of these codes is loaded in it.
    Four-bit floats are always rounded to bfloat16, as compressed-tensors unpacks them.

    Args:
        weight: (O, I).
        args: of the format's weights.
        scale: of the weight's groups, from `scales`.
        common_scale: NVFP4's global scale, from `scales`.
        dtype: of the result.
    """
    import torch

    weight = weight.detach()
    dtype = dtype or weight.dtype
    if args.type == "float" and args.num_bits == 4:
        rounded = presets.library().fake_quantize(weight, scale, None, args, global_scale=common_scale)
        return rounded.to(torch.bfloat16).to(dtype)
    if dtype == weight.dtype:
        return presets.library().fake_quantize(weight, scale, None, args)
    codes = presets.library().quantize(weight, scale, None, args)
    return presets.library().dequantize(codes, scale.to(dtype), None, args, dtype=dtype)


def folded(weights: Sequence[Tensor], args: QuantizationArgs, dtype: torch.dtype | None = None) -> Folded:
    """Return Q(W), the `values` of M matrices under their `scales`; `dtype` as for `values`."""
    group_scales, common_scale, largest = scales(weights, args)
    quantized = [
        values(weight, args, scale, common_scale, dtype) for weight, scale in zip(weights, group_scales, strict=True)
    ]
    return quantized, largest


def activations(inputs: Tensor, args: QuantizationArgs, calibrated: Tensor | None = None) -> Tensor:
    """Return a linear's inputs rounded to the format, with dynamic scales per token or per block, or a stored one.

    Args:
        inputs: (..., I); the result has the same shape and dtype.
        args: of the format's activations.
        calibrated: (1,), a static scale, or NVFP4's global one; see `calibrated_scale`.

    Source: compressed-tensors 0.19, forward_quantize.
    """
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    if is_static(args):
        return _under_static_scale(inputs.detach(), args, calibrated)
    tokens = inputs.detach().reshape(1, -1, inputs.shape[-1])  # the library reads two dimensions as batch and token
    if args.strategy == "token":
        scale = _qparams(tokens.amin(-1, keepdim=True), tokens.amax(-1, keepdim=True), args)
    else:
        scale, _ = compute_dynamic_scales_and_zp(tokens, args, None, global_scale=calibrated)
    rounded = presets.library().fake_quantize(tokens, scale, None, args, global_scale=calibrated)
    return rounded.reshape(inputs.shape).to(inputs.dtype)


def _under_static_scale(inputs: Tensor, args: QuantizationArgs, scale: Tensor) -> Tensor:
    """Return inputs rounded under one stored scale, as compressed-tensors does, and clipped to the format's ends.

    Its function copies these ends to the device in each call, which a CUDA graph cannot hold.
    """
    import torch

    scale = scale.to(inputs.dtype)  # as when a checkpoint is loaded in a narrower dtype
    ratios = inputs / scale
    if args.type == "float":
        end = torch.finfo(torch.float8_e4m3fn).max
        codes = ratios.clamp(-end, end).to(torch.float8_e4m3fn).to(inputs.dtype)
    else:
        codes = ratios.clamp(-128, 127).round()
    return codes * scale


def is_static(args: QuantizationArgs) -> bool:
    """Return whether activations are rounded under one calibrated scale, which is all that their rounding needs."""
    return args.dynamic is False


def is_calibrated(args: QuantizationArgs | None) -> bool:
    """Return whether activations are scaled by something that has to be calibrated on texts."""
    return args is not None and args.dynamic in (False, "local")


def calibrated_scale(largest: Tensor, args: QuantizationArgs) -> Tensor:
    """Return the scale of a tensor of activations, (1,) float32, from its largest |x|.

    Static: largest / 448 in FP8, largest / 127.5 in INT8; a value beyond `largest` is clipped to the format's end.
    NVFP4: its global scale.
    """
    largest = largest.float().reshape(1)
    return _qparams(-largest, largest, args).reshape(1) if is_static(args) else global_scale(largest)


def global_scale(largest: Tensor) -> Tensor:
    """Return NVFP4's scale of a tensor, (1,) float32, from its largest |x|: 6 · 448 / largest."""
    from compressed_tensors.quantization.utils import generate_gparam

    largest = largest.float().reshape(1)
    return generate_gparam(-largest, largest)
