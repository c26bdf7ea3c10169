"""Processes that tests look for, while others begin and end beside them."""

from contextlib import suppress

import psutil


def children_with(word: str, pid: int | None = None) -> list[psutil.Process]:
    """Return the children of a process, of this one if `pid` is None, whose command line contains `word`."""
    found = []
    for child in psutil.Process(pid).children():
        with suppress(psutil.NoSuchProcess):  # it ended since it was listed
            if any(word in part for part in child.cmdline()):
                found.append(child)
    return found
