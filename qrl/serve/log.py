"""An engine's log: read as it is written, kept while the model loads, and searched for the cause of a failure."""

import itertools
import logging.handlers
import math
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

from qrl.errors import BadInput
from qrl.serve import engine_bootstrap

KEPT_LINES = 400  # in memory
LAST_LINES = 15  # printed if the engine fails
LONGEST = 1 << 16  # characters of a line; what follows counts as another
FILE_BYTES = 10 << 20  # a log file is renamed to FILE.1 at this size, FILE.1 to FILE.2, …
FILES = 5  # renamed ones; the oldest is deleted
Write = Callable[[str], object]  # of one line, its end included
# The last line of a traceback, after the prefix of vLLM's log; the first such line is the cause of the others.
_ERROR = re.compile(r"^(?:\([^)]*\) )?(?:ERROR \S+ \S+ \[[^]]*\] )?((?:\w+\.)*(\w*(?:Error|Exception)\b(?:: .*)?))$")


class EngineLog:
    """The output of an engine's process, read on a thread."""

    def __init__(self, stream: IO[str], write: Write | None = None) -> None:
        self.echo = False  # print lines as they come, once the engine serves
        self._write = write  # gets every line, in place of the terminal
        self.imported_at = math.inf  # on the monotonic clock
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._thread = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the end of the output, for a second at most."""
        self._thread.join(1)

    def reason(self) -> str:
        """Return the end of a sentence on a failure, with the engine's first error; print the last lines to stderr."""
        self.join()
        if self._write or not self.echo:
            sys.stderr.write("".join(f"  {line}\n" for line in list(self._lines)[-LAST_LINES:]))
        error = cause(self._lines)
        if error:
            return f": {error.rstrip('.')[:400]}"
        return "; see its last lines, above" if self._lines else ", without any output"

    def _read(self, stream: IO[str]) -> None:
        for line in iter(lambda: stream.readline(LONGEST), ""):
            if line.strip() == engine_bootstrap.IMPORTED:
                self.imported_at = time.monotonic()
            elif line.strip():
                self._lines.append(line.rstrip())
                if self._write:
                    self._write(line)
                elif self.echo:
                    sys.stderr.write(line)


def rotating_writer(path: Path) -> Write:
    """Return a function that appends lines to a file, of which `FILES` older ones are kept; a full disk loses lines.

    Raises:
        BadInput: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.handlers.RotatingFileHandler(path, maxBytes=FILE_BYTES, backupCount=FILES, encoding="utf-8")
    except OSError as error:
        raise BadInput(f"The log {path} cannot be written ({error.strerror}): give a file in another folder.") from None
    handler.handleError = lambda record: None  # type: ignore[method-assign] # a traceback for each line
    return lambda line: handler.handle(logging.makeLogRecord({"msg": line.rstrip("\n")}))


def cause(log: Iterable[str]) -> str | None:
    """Return the first error of an engine's log, which caused the others; None without one."""
    for line, next_line in itertools.pairwise([*log, ""]):
        match = _ERROR.match(line)
        if not match or "See root cause above" in line:
            continue
        error = match[2]
        if "validation error" in error:  # pydantic gives its own reason on the next line
            return f"{error}: {next_line.strip()}"
        return error
    return None
