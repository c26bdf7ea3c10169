"""The matrices that a quantized checkpoint stands for, read from its own files: what is stored, not what was meant to be.

Read are bitsandbytes' NF4 and INT8, AutoAWQ's 4-bit GEMM layout, and every format of compressed-tensors (FP8, NVFP4, MXFP4, packed
integers). The last become values through their library, where it is installed. Scales are taken to float32 first, so that a value is
code times scale and not that product rounded to sixteen bits once more, as kernels do on the fly. FP4's come from their library in bf16
all the same: up to one part in 256 off, which adds a millionth of the weights' energy to an error of a hundredth.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from qrl import checkpoint
from qrl.errors import BadInput
from qrl.formats import awq
from qrl.formats.header import FLOATS

if TYPE_CHECKING:
    from torch import Tensor

NF4_STATE = ".weight.quant_state.bitsandbytes__nf4"
MARKS = (NF4_STATE, ".SCB", ".qweight", ".weight_scale")  # the part of a quantized matrix that says it is one
CODES = (".weight", ".weight_packed")
BLOCK = 1 << 22  # bytes of codes that are unpacked together
READ = "bitsandbytes nf4 and int8, awq gemm in 4 bits, compressed-tensors"


@dataclass(frozen=True)
class Stored:
    """A quantized matrix."""

    values: Tensor  # (O, I) float32
    codes: Tensor  # as stored, packed or not, in an order that is the same for all matrices of a scheme and shape


def names(path: Path | str) -> list[str]:
    """Names of the quantized matrices, `….weight`, in order.

    Raises:
        BadInput: a full-precision checkpoint, a packing that is not known here, or codes without their scales.
    """
    settings = checkpoint.config(path).get("quantization_config")
    if not settings:
        raise BadInput(
            f"{path} is a full-precision checkpoint, but a quantized one was expected: give what `quantize` wrote."
        )
    _reader(path, settings)
    entries = checkpoint.entries(path)
    found = {f"{name.removesuffix(mark)}.weight" for name in entries for mark in MARKS if name.endswith(mark)}
    if not found:
        raise BadInput(
            f"{path} says that it is quantized ({settings.get('quant_method')}) but holds no quantized matrix: expected {READ}."
        )
    for name, entry in sorted(entries.items()):
        if name.endswith(CODES) and entry.dtype not in FLOATS and f"{name.rpartition('.')[0]}.weight" not in found:
            raise BadInput(
                f"{path} holds {name} in {entry.dtype} without the scales or state that say what it stands for: quantize it again."
            )
    return sorted(found)


def matrices(path: Path | str, wanted: list[str]) -> Iterator[tuple[str, Stored]]:
    """Quantized matrices, one at a time.

    Args:
        path: a quantized checkpoint folder.
        wanted: of `names`, in the order they are to come.

    Raises:
        BadInput: as `names`; or parts of a matrix are missing.
    """
    settings = checkpoint.config(path)["quantization_config"]
    read, parts = _reader(path, settings), _parts(path)
    tensors = checkpoint.tensors(path, [part for name in wanted for part in parts[name]])
    for name in wanted:
        module = name.removesuffix(".weight")
        own = {part.removeprefix(f"{module}."): tensor for part, tensor in islice(tensors, len(parts[name]))}
        try:
            yield name, read(own, settings, module)
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            why = f"there is no {error}" if isinstance(error, KeyError) else error
            raise BadInput(
                f"{name} of {path} cannot be unpacked ({why}): quantize it again, or name the right folder."
            ) from None


def _parts(path: Path | str) -> dict[str, list[str]]:
    """The tensors that each matrix is stored in."""
    found: dict[str, list[str]] = defaultdict(list)
    for part in checkpoint.entries(path):
        module, within, _ = part.partition(".weight.")
        if not part.endswith(".bias"):
            found[f"{module if within else part.rpartition('.')[0]}.weight"].append(part)
    return found


def _reader(path: Path | str, settings: dict):
    """How the matrices of this checkpoint are read."""
    method = settings.get("quant_method")
    if method == "bitsandbytes" and settings.get("load_in_8bit"):
        return _int8
    if method == "bitsandbytes" and settings.get("bnb_4bit_quant_type") == "nf4":
        return _nf4
    if method == "awq" and settings.get("bits") == awq.BITS and str(settings.get("version", "gemm")).lower() == "gemm":
        return _awq
    if method == "compressed-tensors":
        return _compressed
    raise BadInput(f"{path} is stored in a packing that is not known here ({method}): expected {READ}.")


def _nf4(tensors: dict[str, Tensor], settings: dict, module: str) -> Stored:
    """Two codes a byte, the upper half first; a scale for each block of weights, itself in 8 bits with a scale for each of its blocks.

    bitsandbytes does the same, bit for bit (tested), but takes three seconds to import. Source: its functional.py, dequantize_4bit.
    """
    import torch

    packed = tensors["weight"].flatten()
    state = json.loads(bytes(tensors[NF4_STATE.removeprefix(".")].tolist()))
    scales = tensors["weight.absmax"]
    if "weight.nested_absmax" in tensors:
        outer = tensors["weight.nested_absmax"].repeat_interleave(state["nested_blocksize"])[: len(scales)]
        scales = tensors["weight.nested_quant_map"][scales.long()] * outer + state["nested_offset"]
    levels, size = tensors["weight.quant_map"], state["blocksize"]
    pairs = torch.cartesian_prod(levels, levels)  # of every byte: what its upper and its lower half stand for
    values = torch.index_select(pairs, 0, packed.int()).flatten()[: math.prod(state["shape"])]
    inside = len(values) // size * size  # the last block may be short
    values[:inside].view(-1, size).mul_(scales[: inside // size, None])
    values[inside:] *= scales[-1]
    return Stored(values.view(state["shape"]), packed)


def _int8(tensors: dict[str, Tensor], settings: dict, module: str) -> Stored:
    return Stored((tensors["weight"] * tensors["SCB"][:, None]).div_(127), tensors["weight"])


def _awq(tensors: dict[str, Tensor], settings: dict, module: str) -> Stored:
    parts = {part: tensors[part] for part in awq.PARTS}
    size = parts["qweight"].shape[0] // parts["qzeros"].shape[0]
    return Stored(awq.unpack(**parts).float(), awq.centred(parts["qweight"], parts["qzeros"], size))


def _compressed(tensors: dict[str, Tensor], settings: dict, module: str) -> Stored:
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
    if (
        layout.startswith("nvfp4") and "weight_global_scale" not in tensors
    ):  # the library would make weights of it, thousands of times too large
        raise KeyError("weight_global_scale")
    wide = {
        key: value.float() if key == "weight_scale" and value.dtype.itemsize == 2 else value
        for key, value in tensors.items()
    }
    scheme = QuantizationScheme.model_validate({**group, "format": layout})
    packed = tensors.get("weight_packed", tensors.get("weight"))
    unpack, rows, values = BaseCompressor.get_value_from_registry(layout).decompress, len(packed), None
    for first in range(
        0, rows, step := _step(packed)
    ):  # their library makes several copies on its way: of a part at a time
        last = min(first + step, rows)
        part = unpack({key: _rows(key, value, first, last, rows) for key, value in wide.items()}, scheme)["weight"]
        values = torch.empty(rows, part.shape[1]) if values is None else values
        values[first:last] = part
    return Stored(values, packed)


def _step(packed: Tensor) -> int:
    """Rows unpacked together: a multiple of what a packed word of zero points can hold of them."""
    return max(32, BLOCK // packed[0].nbytes // 32 * 32)


def _rows(key: str, tensor: Tensor, first: int, last: int, rows: int) -> Tensor:
    """The part of a tensor that belongs to these rows of its matrix."""
    if key == "weight_shape":
        return tensor.new_tensor([last - first, *tensor[1:].tolist()])
    if (
        key == "weight_zero_point" and tensor.ndim == 2 and len(tensor) < rows and len(tensor) > 1
    ):  # packed along the rows
        each = 1 << math.ceil(math.log2(rows / len(tensor)))  # 8 or 4, though the last word may not be full
        return tensor[first // each : -(-last // each)]
    return tensor[first:last] if tensor.ndim and len(tensor) == rows and key != "weight_g_idx" else tensor


def _covers(group: dict, module: str) -> bool:
    """Whether a group of a compressed-tensors config holds a linear module, by class or by pattern."""
    return any(
        target == "Linear" or (target.startswith("re:") and re.match(target[3:], module)) or target == module
        for target in group["targets"]
    )
