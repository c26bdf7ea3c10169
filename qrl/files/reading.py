"""Files that others wrote, read within bounds: regular ones, their sizes looked at first, JSON of any shape."""

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


def check(path: Path, most: int) -> None:
    """Check that a path is a regular file, no folder or device, of `most` bytes at most.

    Raises:
        BadInput: it is not.
        OSError: there is no such file.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise BadInput(f"{path} is a folder or a device: give a file.")
    if status.st_size > most:
        shown = f"{most >> 20:,} MiB" if most >= MIB else f"{most:,} bytes"
        raise BadInput(f"{path} is larger than expected ({status.st_size:,} bytes): at most {shown} are read.")


def content(path: Path, most: int) -> bytes:
    """Return a file's bytes.

    Raises:
        BadInput: as `check`, or it cannot be read.
    """
    try:
        check(path, most)
        with path.open("rb") as file:
            return file.read(most)
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror}): give a file that is readable.") from None


def parsed(text: str | bytes, *, unique: bool = False) -> Any:
    """Return what a JSON text holds.

    Args:
        text: in UTF-8, if bytes.
        unique: refuse an object with two equal keys, of which the library keeps the last.

    Raises:
        ValueError: it is no JSON, is nested too deep or has a key twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique if unique else None)
    except RecursionError:
        raise ValueError("it is nested hundreds deep") from None


def check_text(what: str, text: str) -> None:
    """Raise BadInput if a text has control characters, with which a name could change what a terminal shows."""
    if control := re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text):
        raise BadInput(f"{what} has the control character {control[0]!a}: write it without.")


def memory_bytes() -> int:
    """Return half of the memory that is free now, within which what is read of large files must stay."""
    import psutil

    return max(512 * MIB, psutil.virtual_memory().available // 2)


def walk(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, sorted within each folder; raise BadInput if there are more than `MOST_FILES`."""
    seen = 0
    for place, folders, names in os.walk(folder):
        folders.sort()
        seen += len(names) + len(folders)
        if seen > MOST_FILES:
            raise BadInput(f"{folder} holds more than {MOST_FILES:,} files: give the folder of what is meant alone.")
        yield from (Path(place, name) for name in sorted(names))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"'{twice}' is given twice")
    return fields
