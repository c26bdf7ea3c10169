"""The matrices of a quantized checkpoint, read from its own files: what is stored, not what was meant to be stored.

A matrix `a.b.weight` is stored in several tensors of the module `a.b`: codes, scales, zero points, tables. `names`
finds the matrices by endings that only such tensors have. `matrices` gives the tensors of each to a decoder in
`decode`: bitsandbytes' NF4 and INT8, AutoAWQ's 4-bit GEMM layout, and every format of compressed-tensors (FP8, NVFP4,
MXFP4, packed integers).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from qrl import checkpoint
from qrl.checkpoint.header import FLOATS
from qrl.errors import BadInput
from qrl.formats import decode, kind
from qrl.formats.decode import Stored

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MARKS = (decode.NF4_STATE, ".SCB", ".qweight", ".weight_scale")  # endings of a part that only quantized matrices have
CODES = (".weight", ".weight_packed")
KV_SCALES = (".k_scale", ".v_scale")  # endings of the scales of keys and values, one of each in a layer's attention
READABLE = "bitsandbytes nf4 and int8, awq gemm in 4 bits, compressed-tensors"


def names(path: Path | str) -> list[str]:
    """Return the sorted names of the quantized matrices, `….weight`.

    Raises:
        BadInput: the checkpoint is in full precision or in an unknown packing, or codes lack their scales.
    """
    settings = checkpoint.config(path).get("quantization_config")
    if not settings:
        raise BadInput(
            f"{path} is a full-precision checkpoint, but a quantized one was expected: name what `quantize` wrote."
        )
    _decoder(path, settings)  # raises for an unknown packing
    entries = checkpoint.entries(path)
    quantized = set()
    for name in entries:
        mark = next((mark for mark in MARKS if name.endswith(mark)), None)
        if mark is not None:
            quantized.add(f"{name.removesuffix(mark)}.weight")
    if not quantized:
        raise BadInput(
            f"{path} says that it is quantized ({settings.get('quant_method')}) but holds no quantized matrix: "
            f"expected {READABLE}."
        )
    for name, entry in sorted(entries.items()):
        is_codes = name.endswith(CODES) and entry.dtype not in FLOATS
        if is_codes and f"{module(name)}.weight" not in quantized:
            raise BadInput(
                f"{path} holds {name} in {entry.dtype} without the scales or state to decode it: quantize it again."
            )
    return sorted(quantized)


def matrices(path: Path | str, matrix_names: list[str]) -> Iterator[tuple[str, Stored]]:
    """Yield quantized matrices by name, one at a time: some of what `names` returns, in the given order.

    Raises:
        BadInput: as for `names`, or parts of a matrix are missing.
    """
    settings = checkpoint.config(path)["quantization_config"]
    decode_matrix = _decoder(path, settings)
    parts_of = _parts(path)
    # One stream for all matrices, which opens each file once; each matrix reads as many tensors as it has parts.
    tensors = checkpoint.tensors(path, [part for name in matrix_names for part in parts_of[name]])
    for name in matrix_names:
        module_name = name.removesuffix(".weight")
        matrix_tensors = {}
        for part, tensor in islice(tensors, len(parts_of[name])):
            matrix_tensors[part.removeprefix(f"{module_name}.")] = tensor
        try:
            yield name, decode_matrix(matrix_tensors, settings, module_name)
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            reason = f"there is no {error}" if isinstance(error, KeyError) else error
            raise BadInput(
                f"{name} of {path} cannot be unpacked ({reason}): quantize it again, or name the right folder."
            ) from None


def plain_state(path: Path | str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return all tensors of a quantized checkpoint under ordinary names and in one dtype, quantized matrices as values.

    Scales of keys and values, which no ordinary model has, are left out.

    Raises:
        BadInput: as for `matrices`.
    """
    quantized = names(path)
    parts_of = _parts(path)
    stored_names = set(checkpoint.entries(path)).difference(kv_scales(path))
    unquantized = stored_names.difference(*(parts_of[name] for name in quantized))
    state = {name: tensor.to(dtype) for name, tensor in checkpoint.tensors(path, sorted(unquantized))}
    for name, matrix in matrices(path, quantized):
        state[name] = matrix.values.to(dtype).contiguous()
    return state


def kv_scales(path: Path | str) -> list[str]:
    """Return the sorted names of the scales of keys and values; none where the checkpoint has none."""
    if not kind.has_kv_scales(checkpoint.config(path).get("quantization_config")):
        return []
    return sorted(name for name in checkpoint.entries(path) if name.endswith(KV_SCALES))


def _parts(path: Path | str) -> dict[str, list[str]]:
    """Return, for each matrix `….weight`, the names of the tensors that it is stored in; biases are left out."""
    parts_of: dict[str, list[str]] = defaultdict(list)
    for part in checkpoint.entries(path):
        if not part.endswith(".bias"):
            parts_of[f"{module(part)}.weight"].append(part)
    return parts_of


def module(part: str) -> str:
    """Return a tensor's module: `a.b` for a.b.qweight and for a.b.weight.quant_state.bitsandbytes__nf4."""
    if ".weight." in part:
        return part.partition(".weight.")[0]
    return part.rpartition(".")[0]


def _decoder(path: Path | str, settings: dict) -> decode.Decoder:
    method = settings.get("quant_method")
    version = str(settings.get("version", "gemm")).lower()  # AutoAWQ's layout
    if method == "bitsandbytes" and settings.get("load_in_8bit"):
        return decode.int8
    if method == "bitsandbytes" and settings.get("bnb_4bit_quant_type") == "nf4":
        return decode.nf4
    if (method, settings.get("bits"), version) == ("awq", decode.AWQ_BITS, "gemm"):
        return decode.autoawq
    if method == "compressed-tensors":
        return decode.compressed
    raise BadInput(f"{path} is stored in a packing that is not known here ({method}): expected {READABLE}.")
