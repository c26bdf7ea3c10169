"""The header of a safetensors file: what it holds, and whether it is whole, without reading a weight.

A file is eight bytes of length, a JSON header of that length, then the tensors' bytes, without gaps.
Source: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

from qrl.errors import BadInput

FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
DTYPES = FLOATS | {  # the format's letters → torch's names; what else there is (sub-byte floats, say) torch has no tensors of
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32", "U64": "uint64", "I64": "int64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "C64": "complex64",
}  # fmt: skip
_MAX_HEADER = 100_000_000  # bytes; the library's own limit


@dataclass(frozen=True)
class Entry:
    """A tensor as its file's header describes it."""

    file: str
    dtype: str  # in the format's own letters: "BF16", "U8", …
    shape: tuple[int, ...]
    bytes: int
    start: int  # of its bytes in the file

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)


def read(file: Path) -> dict[str, Entry]:
    """Tensors of a safetensors file by name.

    Raises:
        BadInput: it is truncated, too long, or not safetensors; the sentence names the file and both sizes. Or its tensors' bytes are
            not those of their shapes, or overlap: read as described, one would hold another's weights.
    """
    size = file.stat().st_size
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise BadInput(f"{file} is truncated or not safetensors: its header does not fit into its {size:,} bytes.")
        text = stream.read(length)
    try:
        described = {name: value for name, value in json.loads(text).items() if name != "__metadata__"}
        spans = {name: value["data_offsets"] for name, value in described.items()}
        found = {
            name: Entry(
                file.name,
                value["dtype"],
                tuple(value["shape"]),
                spans[name][1] - spans[name][0],
                8 + length + spans[name][0],
            )
            for name, value in described.items()
        }
        expected = 8 + length + max((end for _, end in spans.values()), default=0)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise BadInput(f"{file} is not safetensors: its header is not the JSON that the format asks for.") from None
    if size != expected:
        state = "truncated" if size < expected else "too long"
        raise BadInput(
            f"{file} is {state}: its header describes {expected:,} bytes, but it has {size:,}; copy it again."
        )
    _check_places(file, found, 8 + length)
    return found


def _check_places(file: Path, found: dict[str, Entry], at: int) -> None:
    """Refuses tensors that are not as long as their shapes say, or do not follow each other from `at` on."""
    for name, entry in sorted(found.items(), key=lambda each: (each[1].start, each[1].bytes)):
        sound = all(type(size) is int and size >= 0 for size in entry.shape)
        if not sound or entry.numel * _bits(entry.dtype) != 8 * entry.bytes:
            shape = "×".join(map(str, entry.shape))
            raise BadInput(
                f"{file} is not safetensors: its header gives {name}, {entry.dtype} of shape {shape}, {entry.bytes:,} bytes, which do not fit; write it again."
            )
        if entry.start != at:
            raise BadInput(
                f"{file} is not safetensors: in its header {name} does not begin where the tensor before it ends; write it again."
            )
        at += entry.bytes


def _bits(dtype: str) -> int:
    """Of an element: the first number in the format's letters; BOOL, which has none, is a byte."""
    number = re.search(r"[0-9]+", dtype)
    return int(number[0]) if number else 8
