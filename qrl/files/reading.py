"""Files that others wrote, read within bounds: regular ones, their sizes looked at first, JSON of any shape."""

import codecs
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qrl.errors import BadInput

MIB = 1 << 20
TABLE_BYTES = 1 << 30  # of a table, a log or a file of questions, whatever the machine; a table takes 16 times its size
MOST_FILES = 20_000  # of a folder that is searched

# Control characters, and those that change the direction of text: a name with them could change what a terminal shows.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def check_regular_file(path: Path, limit_bytes: int) -> None:
    """Check that a path is a regular file, no folder or device, of at most `limit_bytes`.

    Raises:
        BadInput: it is not.
        OSError: there is no such file.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise BadInput(f"{path} is a folder or a device: give a file.")
    if status.st_size > limit_bytes:
        limit = f"{limit_bytes >> 20:,} MiB" if limit_bytes >= MIB else f"{limit_bytes:,} bytes"
        raise BadInput(f"{path} is larger than expected ({status.st_size:,} bytes): at most {limit} are read.")


def read_bytes(path: Path, limit_bytes: int) -> bytes:
    """Return a file's bytes.

    Raises:
        BadInput: as `check_regular_file`, or it cannot be read.
    """
    try:
        check_regular_file(path, limit_bytes)
        with path.open("rb") as file:
            return file.read(limit_bytes)
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror}): give a file that is readable.") from None


def check_encoding(label: str, content: bytes) -> None:
    """Check that the bytes of a text are not in UTF-16 or UTF-32, as Excel and PowerShell write them.

    They begin with a byte order mark or, without one, with a zero byte beside the first ASCII character.

    Args:
        label: how the error calls the text.
        content: all of it, or its beginning.

    Raises:
        BadInput: they are.
    """
    encoding = _wide_encoding(content[:4])
    if encoding:
        raise BadInput(
            f"{label} is in {encoding}, as Excel and PowerShell write texts, but UTF-8 was expected: save it as UTF-8, "
            f"as with `iconv -f {encoding} -t UTF-8 FILE > NEW`."
        )


def _wide_encoding(start: bytes) -> str:
    """Return UTF-16 or UTF-32 by the first four bytes of a text; empty for one whose characters are bytes."""
    if start in (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE):  # first: one begins as that of UTF-16 does
        return "UTF-32"
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "UTF-16"
    zeros = [byte == 0 for byte in start]
    encodings = {
        (True, True, True, False): "UTF-32BE",
        (False, True, True, True): "UTF-32LE",
        (True, False, True, False): "UTF-16BE",
        (False, True, False, True): "UTF-16LE",
    }
    return encodings.get(tuple(zeros), "")


def parse_json(text: str | bytes, *, unique: bool = False) -> Any:
    """Return what a JSON text holds.

    Args:
        text: in UTF-8, if bytes.
        unique: refuse an object with two equal keys; otherwise the last one counts.

    Raises:
        ValueError: it is no JSON, is nested too deep or has a key twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique if unique else None)
    except RecursionError:
        raise ValueError("it is nested hundreds deep") from None


def check_control_characters(label: str, text: str) -> None:
    """Raise BadInput if a text has control characters, with which a name could change what a terminal shows."""
    control = _CONTROL.search(text)
    if control:
        raise BadInput(f"{label} has the control character {control[0]!a}: write it without.")


def memory_limit_bytes() -> int:
    """Return half of the memory that is free now, within which what is read of large files must stay."""
    import psutil

    return max(512 * MIB, psutil.virtual_memory().available // 2)


def walk(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, sorted within each folder; raise BadInput if there are more than `MOST_FILES`."""
    count = 0
    for parent, subfolders, names in os.walk(folder):
        subfolders.sort()
        count += len(names) + len(subfolders)
        if count > MOST_FILES:
            raise BadInput(f"{folder} holds more than {MOST_FILES:,} files: give the folder of what is meant alone.")
        for name in sorted(names):
            yield Path(parent, name)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key, value in pairs:
        if key in fields:
            raise ValueError(f"'{key}' is given twice")
        fields[key] = value
    return fields
