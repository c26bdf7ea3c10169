"""Decode one quantized matrix of each library from its tensors.

Four decoders with the same arguments, one for each layout: `nf4` and `int8` of bitsandbytes, `autoawq`, `compressed`.
Scales are converted to float32 first, so that a value is code times scale; kernels round that product to sixteen bits
once more. compressed-tensors' own functions decode its formats, if it is installed. They return FP4 in bf16, up to one
part in 256 off, which adds a millionth of the weights' energy to an error of a hundredth.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qrl.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor

NF4_STATE = ".weight.quant_state.bitsandbytes__nf4"
BLOCK = 1 << 22  # bytes of codes that are unpacked together
AWQ_BITS = 4
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output, of eight, that each nibble of a word holds, from the lowest


@dataclass(frozen=True)
class Stored:
    """A quantized matrix."""

    values: Tensor  # (O, I) float32
    codes: Tensor  # as stored, packed or not; the order is the same for all matrices of a scheme and shape


# (the matrix's tensors by their name within the module, quantization_config, the module's name) → the matrix
Decoder = Callable[[dict[str, "Tensor"], dict, str], Stored]


def nf4(tensors: dict[str, Tensor], _settings: dict, _module: str) -> Stored:
    """Decode bitsandbytes' NF4 bit for bit, without its import of three seconds.

    A byte holds two codes, the upper half first. Each block of weights has a scale; scales are stored in 8 bits, with
    a scale for each block of scales.

    Source: bitsandbytes, functional.py, dequantize_4bit.
    """
    import torch

    packed = tensors["weight"].flatten()
    state = json.loads(bytes(tensors[NF4_STATE.removeprefix(".")].tolist()))
    scales = tensors["weight.absmax"]
    if "weight.nested_absmax" in tensors:
        outer = tensors["weight.nested_absmax"].repeat_interleave(state["nested_blocksize"])[: len(scales)]
        scales = tensors["weight.nested_quant_map"][scales.long()] * outer + state["nested_offset"]
    levels = tensors["weight.quant_map"]
    block_size = state["blocksize"]
    pairs = torch.cartesian_prod(levels, levels)  # byte → values of its upper and its lower half
    values = torch.index_select(pairs, 0, packed.int()).flatten()[: math.prod(state["shape"])]
    whole_blocks = len(values) // block_size  # the last block may be short
    end = whole_blocks * block_size
    values[:end].view(-1, block_size).mul_(scales[:whole_blocks, None])
    values[end:] *= scales[-1]
    return Stored(values.view(state["shape"]), packed)


def int8(tensors: dict[str, Tensor], _settings: dict, _module: str) -> Stored:
    """Decode bitsandbytes' INT8: a byte a weight, and the largest |w| of each row."""
    return Stored((tensors["weight"] * tensors["SCB"][:, None]).div_(127), tensors["weight"])


def autoawq(tensors: dict[str, Tensor], _settings: dict, _module: str) -> Stored:
    """Decode AutoAWQ's GEMM layout."""
    weight, codes = unpack_awq(tensors["qweight"], tensors["qzeros"], tensors["scales"])
    return Stored(weight.float(), codes)


def unpack_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return a packed linear's weight, (code - zero) · scale, and its codes minus their zero points.

    Args:
        qweight: (I, O/8) int32, eight 4-bit codes each.
        qzeros: (I/S, O/8) int32, eight 4-bit zero points each, for groups of S inputs.
        scales: (I/S, O), float16 as stored.

    Returns:
        (O, I) in the scales' dtype, bit for bit as AutoAWQ dequantizes it, and (I, O) int8.

    Source: awq/utils/packing_utils.py and awq/modules/linear/gemm.py of AutoAWQ 0.2.9.
    """
    group_size = qweight.shape[0] // qzeros.shape[0]
    codes = _nibbles(qweight) - _nibbles(qzeros).repeat_interleave(group_size, dim=0)
    return (codes * scales.repeat_interleave(group_size, dim=0)).T.contiguous(), codes


def _nibbles(words: Tensor) -> Tensor:
    """Unpack eight 4-bit values from each int32, in the order of the outputs: (R, C) → (R, 8·C) int8."""
    import torch

    values = torch.empty(*words.shape, len(_AWQ_ORDER), dtype=torch.int8)
    for nibble, output in enumerate(_AWQ_ORDER):  # one at a time: all eight as int32 would need 32 bits a code
        values[:, :, output] = (words >> AWQ_BITS * nibble) & (2**AWQ_BITS - 1)
    return values.flatten(1)


def compressed(tensors: dict[str, Tensor], settings: dict, module: str) -> Stored:
    """Decode a format of compressed-tensors through its own functions, some rows at a time: they make several copies.

    Raises:
        BadInput: compressed-tensors is not installed.
    """
    import torch

    try:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationScheme
    except ModuleNotFoundError:
        raise BadInput(
            "Weights in compressed-tensors' formats need that library: install compressed-tensors, or leave them out."
        ) from None
    group = next((group for group in settings["config_groups"].values() if _covers(group, module)), None)
    if group is None:
        raise ValueError("no group of its config covers this module")
    layout = group.get("format") or settings["format"]
    if layout.startswith("nvfp4") and "weight_global_scale" not in tensors:
        raise KeyError("weight_global_scale")  # without it the library returns weights thousands of times too large
    if "weight_scale" in tensors and tensors["weight_scale"].dtype.itemsize == 2:
        tensors = tensors | {"weight_scale": tensors["weight_scale"].float()}
    bits = group["weights"]["num_bits"]
    if layout == "pack-quantized" and 32 % bits:
        tensors = tensors | {
            "weight_packed": _repacked(tensors["weight_packed"], bits, int(tensors["weight_shape"][1]))
        }
    scheme = QuantizationScheme.model_validate({**group, "format": layout})
    unpack = BaseCompressor.get_value_from_registry(layout).decompress
    packed = tensors.get("weight_packed", tensors.get("weight"))
    rows = len(packed)
    step = max(128, BLOCK // packed[0].nbytes // 128 * 128)  # a multiple of the rows of a block or a packed word
    values = None
    for first in range(0, rows, step):
        last = min(first + step, rows)
        rows_of = {key: _rows(key, tensor, first, last, rows) for key, tensor in tensors.items()}
        part = unpack(rows_of, scheme)["weight"]
        if values is None:  # only a decoded part shows the number of columns
            values = torch.empty(rows, part.shape[1])
        values[first:last] = part
    return Stored(values, packed)


def _repacked(words: Tensor, bits: int, columns: int) -> Tensor:
    """Return codes that follow bit after bit in int32 words as the installed compressed-tensors packs them.

    0.17, which vLLM pins, pads each word instead, and misreads what 0.19 stores in 3 bits.
    """
    import torch
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    words_per_row = math.ceil(columns * bits / 32)
    if words.shape[1] != words_per_row:
        raise ValueError(
            f"its rows have {words.shape[1]} words, but {columns} codes of {bits} bits take {words_per_row}"
        )
    start = torch.arange(columns) * bits  # of each code, in bits from the start of its row
    word = start // 32
    shift = start % 32
    next_word = (word + 1).clamp(max=words_per_row - 1)  # holds the upper bits of a code that crosses the border
    unsigned = words.long() & 0xFFFFFFFF
    codes = unsigned[:, word] >> shift | unsigned[:, next_word] << 32 - shift
    signed = (codes & (1 << bits) - 1) - (1 << bits - 1)
    return pack_to_int32(signed.to(torch.int8), bits)


def _rows(key: str, tensor: Tensor, first: int, last: int, rows: int) -> Tensor:
    """Return the part of a tensor that belongs to rows first to last - 1 of a matrix of `rows` rows."""
    if key == "weight_shape":
        return tensor.new_tensor([last - first, *tensor[1:].tolist()])
    several_rows_each = tensor.ndim == 2 and 1 < len(tensor) < rows
    if key == "weight_scale" and several_rows_each:  # a scale per block
        height = rows // len(tensor)
        return tensor[first // height : math.ceil(last / height)]
    if key == "weight_zero_point" and several_rows_each:  # packed along the rows
        per_word = 1 << math.ceil(math.log2(rows / len(tensor)))  # 8 or 4, though the last word may not be full
        return tensor[first // per_word : math.ceil(last / per_word)]
    has_row_each = tensor.ndim and len(tensor) == rows and key != "weight_g_idx"
    return tensor[first:last] if has_row_each else tensor


def _covers(group: dict, module: str) -> bool:
    """Return whether a group of a compressed-tensors config covers a linear, by class, name or pattern."""
    return any(
        target in ("Linear", module) or (target.startswith("re:") and re.match(target[3:], module))
        for target in group["targets"]
    )
