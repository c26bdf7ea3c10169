"""The matrices of a quantized checkpoint, read from its own files: what is stored, not what was meant to be stored.

`matrices` reads bitsandbytes' NF4 and INT8, AutoAWQ's 4-bit GEMM layout, and every format of compressed-tensors (FP8,
NVFP4, MXFP4, packed integers).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from qrl import checkpoint
from qrl.errors import BadInput
from qrl.formats import decode
from qrl.formats.decode import Stored
from qrl.formats.header import FLOATS

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MARKS = (decode.NF4_STATE, ".SCB", ".qweight", ".weight_scale")  # endings of a part that only quantized matrices have
CODES = (".weight", ".weight_packed")
READABLE = "bitsandbytes nf4 and int8, awq gemm in 4 bits, compressed-tensors"


def names(path: Path | str) -> list[str]:
    """Return the sorted names of the quantized matrices, `….weight`.

    Raises:
        BadInput: the checkpoint is in full precision or in an unknown packing, or codes lack their scales.
    """
    settings = checkpoint.config(path).get("quantization_config")
    if not settings:
        expected = "a quantized one was expected: name what `quantize` wrote"
        raise BadInput(f"{path} is a full-precision checkpoint, but {expected}.")
    _decoder(path, settings)
    entries = checkpoint.entries(path)
    quantized = {f"{name.removesuffix(mark)}.weight" for name in entries for mark in MARKS if name.endswith(mark)}
    if not quantized:
        declared = f"{path} says that it is quantized ({settings.get('quant_method')})"
        raise BadInput(f"{declared} but holds no quantized matrix: expected {READABLE}.")
    for name, entry in sorted(entries.items()):
        is_codes = name.endswith(CODES) and entry.dtype not in FLOATS
        if is_codes and f"{module(name)}.weight" not in quantized:
            lacking = "without the scales or state to decode it"
            raise BadInput(f"{path} holds {name} in {entry.dtype} {lacking}: quantize it again.")
    return sorted(quantized)


def matrices(path: Path | str, wanted: list[str]) -> Iterator[tuple[str, Stored]]:
    """Yield quantized matrices by name, one at a time: some of `names`, in the order `wanted`.

    Raises:
        BadInput: as for `names`, or parts of a matrix are missing.
    """
    settings = checkpoint.config(path)["quantization_config"]
    decoder, stored_in = _decoder(path, settings), _parts(path)
    tensors = checkpoint.tensors(path, [part for name in wanted for part in stored_in[name]])
    for name in wanted:
        owner = name.removesuffix(".weight")
        own = {part.removeprefix(f"{owner}."): tensor for part, tensor in islice(tensors, len(stored_in[name]))}
        try:
            yield name, decoder(own, settings, owner)
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            reason = f"there is no {error}" if isinstance(error, KeyError) else error
            failed = f"{name} of {path} cannot be unpacked ({reason})"
            raise BadInput(f"{failed}: quantize it again, or name the right folder.") from None


def plain_state(path: Path | str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return all tensors of a quantized checkpoint under ordinary names and in one dtype, quantized matrices as values.

    Raises:
        BadInput: as for `matrices`.
    """
    quantized, stored_in = names(path), _parts(path)
    others = set(checkpoint.entries(path)).difference(*(stored_in[name] for name in quantized))
    state = {name: tensor.to(dtype) for name, tensor in checkpoint.tensors(path, sorted(others))}
    return state | {name: matrix.values.to(dtype).contiguous() for name, matrix in matrices(path, quantized)}


def _parts(path: Path | str) -> dict[str, list[str]]:
    """Return, for each matrix `….weight`, the names of the tensors that it is stored in; biases are left out."""
    stored_in: dict[str, list[str]] = defaultdict(list)
    for part in checkpoint.entries(path):
        if not part.endswith(".bias"):
            stored_in[f"{module(part)}.weight"].append(part)
    return stored_in


def module(part: str) -> str:
    """Return a tensor's module: `a.b` for a.b.qweight and for a.b.weight.quant_state.bitsandbytes__nf4."""
    before, within, _ = part.partition(".weight.")
    return before if within else part.rpartition(".")[0]


def _decoder(path: Path | str, settings: dict) -> decode.Decoder:
    method, version = settings.get("quant_method"), str(settings.get("version", "gemm")).lower()
    if method == "bitsandbytes" and settings.get("load_in_8bit"):
        return decode.int8
    if method == "bitsandbytes" and settings.get("bnb_4bit_quant_type") == "nf4":
        return decode.nf4
    if (method, settings.get("bits"), version) == ("awq", decode.AWQ_BITS, "gemm"):
        return decode.autoawq
    if method == "compressed-tensors":
        return decode.compressed
    raise BadInput(f"{path} is stored in a packing that is not known here ({method}): expected {READABLE}.")
