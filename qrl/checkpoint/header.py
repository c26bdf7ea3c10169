"""The header of a safetensors file: which tensors it holds and whether it is complete, without reading a weight.

A file is eight bytes of length, a JSON header of that length, then the tensors' bytes without gaps.
Source: https://github.com/huggingface/safetensors, "Format".
"""

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

from qrl.errors import BadInput
from qrl.files import reading

# The format's letters → torch's names; torch has no tensors of other dtypes, such as floats below a byte.
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
DTYPES = FLOATS | {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "C64": "complex64",
}  # fmt: skip
_MAX_HEADER = 32 << 20  # bytes, of some 200,000 tensors; the library's own limit makes gigabytes of lists in memory
_MAX_DIMENSIONS = 16


@dataclass(frozen=True)
class Entry:
    """A tensor as its file's header describes it."""

    file: str
    dtype: str  # in the format's letters: "BF16", "U8", …
    shape: tuple[int, ...]
    bytes: int
    start: int  # offset of its first byte in the file

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def read(file: Path) -> dict[str, Entry]:
    """Return the tensors of a safetensors file by name.

    Raises:
        BadInput: the file is truncated, too long or not safetensors, or its tensors' bytes overlap or do not fit their
            shapes, so that one tensor would be read as another's weights.
    """
    with open(file, "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise BadInput(f"{file} is truncated or not safetensors: its header does not fit into its {size:,} bytes.")
        text = stream.read(length)
    data_start = 8 + length
    try:
        fields_of = reading.parse_json(text)
        _check_metadata(fields_of.pop("__metadata__", {}))
        entries = {name: _entry(file.name, fields, data_start) for name, fields in fields_of.items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        raise BadInput(f"{file} is not safetensors: its header is not the JSON that the format defines.") from None
    expected_size = max((entry.start + entry.bytes for entry in entries.values()), default=data_start)
    if size != expected_size:
        state = "truncated" if size < expected_size else "too long"
        raise BadInput(
            f"{file} is {state}: its header describes {expected_size:,} bytes, but it has {size:,}; copy it again."
        )
    _check_layout(file, entries, data_start)
    return entries


def _entry(file: str, fields: dict, data_start: int) -> Entry:
    """Return a tensor's entry; raise ValueError, TypeError or KeyError if its fields are of other types."""
    dtype = fields["dtype"]
    shape = fields["shape"]
    first, end = fields["data_offsets"]
    if not isinstance(dtype, str) or not re.fullmatch(r"[A-Z][A-Z0-9_]{0,15}", dtype):
        raise ValueError("no dtype")
    if len(shape) > _MAX_DIMENSIONS or not _is_size(first) or not _is_size(end):
        raise ValueError("no shape or offsets")
    return Entry(file, dtype, tuple(shape), end - first, data_start + first)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63  # a bool is no size


def _check_metadata(metadata: dict[str, str]) -> None:
    if not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("metadata of other types than texts")


def _check_layout(file: Path, entries: dict[str, Entry], expected_start: int) -> None:
    """Check that each tensor is as long as its shape and starts where the one before it ends."""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].bytes)):
        number = re.search(r"[0-9]+", entry.dtype)
        bits = int(number[0]) if number else 8  # the first number in the format's letters; BOOL takes a byte
        reason = ""
        if not all(map(_is_size, entry.shape)) or entry.numel * bits != 8 * entry.bytes:
            shape = "×".join(map(str, entry.shape))
            reason = f"its header gives {name}, {entry.dtype} of shape {shape}, {entry.bytes:,} bytes, which do not fit"
        elif entry.start != expected_start:
            reason = f"in its header {name} does not begin where the tensor before it ends"
        if reason:
            raise BadInput(f"{file} is not safetensors: {reason}; write it again.")
        expected_start += entry.bytes
