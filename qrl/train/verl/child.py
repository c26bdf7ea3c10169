"""Processes of verl's and of Ray's: each ends with the training that started it, and takes along what it started.

As a program, this module runs another one as `python -m` does, in a process that ends with its parent.
"""

import contextlib
import os
import re
import runpy
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil

from qrl import process
from qrl.errors import QrlError

PARENT = "QRL_VERL_PARENT"  # pid of the training
_MARK = "QRL_VERL_RUN"  # names, in their environment, the processes of one training, Ray's own too
_NOT_PASSED = re.compile(  # our run, somebody else's Ray, and torchrun's ranks, for which verl's workers have their own
    "MLFLOW_RUN_ID|RAY_ADDRESS|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*"
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PROCESS = r"(?:\((?:[^()\n]|\([^()\n]*\))*\) )*"  # such as "(Server pid=2) (Worker(0) pid=3) "
_ERROR = re.compile(rf"^{_PROCESS}(?:ERROR [^\]\n]*\] )?([\w.]*(?:Error|Exception|Exit)\b.*)$", re.MULTILINE)
_ENGINE_FAILED = re.compile(
    rb"EngineDeadError|EngineCore encountered a fatal error|"
    rb"Invocation of (?:collective_rpc|sleep|wake_up) method failed"
)
_LONGEST = 64  # bytes of such a text, which two reads may divide
_FOLLOWS = "EngineDeadError"  # an error that only says that there was another one before
_LAST_BYTES, _GRACE_S = 20_000, 20


@contextlib.contextmanager
def running(words: list[str], work: Path, **variables: str) -> Iterator[subprocess.Popen]:
    """Run a module to its end, as `started` does.

    Raises:
        QrlError: it ended with an exit code other than 0.
    """
    with started(words, work, **variables) as child:
        yield child
        if child.wait():
            raise QrlError(failure(words[0], ended(child.returncode), work))


@contextlib.contextmanager
def started(words: list[str], work: Path, **variables: str) -> Iterator[subprocess.Popen]:
    """Start a module; at the block's end, however it ends, end it and everything that it has started.

    Args:
        words: the module and its arguments.
        work: the folder it runs in, where its output goes to `MODULE.log`.
        variables: of its environment, beside this process's own.
    """
    mark = uuid.uuid4().hex
    path = os.pathsep.join(filter(None, (str(process.ROOT), os.environ.get("PYTHONPATH"))))
    ours = {"PYTHONPATH": path, "HYDRA_FULL_ERROR": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    ours |= {"PYTHONUNBUFFERED": "1"}  # else the last lines of workers stay in the driver for as long as it lives
    ours |= {_MARK: mark, PARENT: str(os.getpid()), **variables}
    kept = {name: value for name, value in os.environ.items() if not _NOT_PASSED.fullmatch(name)}
    try:
        with output(words[0], work).open("ab") as written:
            how = {"cwd": work, "env": kept | ours, "stdin": subprocess.DEVNULL, "stdout": written, "stderr": written}
            child = subprocess.Popen([sys.executable, "-m", __name__, *words], **how)
        yield child
    finally:
        _end(mark)


def ended(code: int) -> str:
    """Return how a process ended whose exit code is not 0."""
    return f"ended with signal {-code}" if code < 0 else f"ended with exit code {code}"


def failure(module: str, how: str, work: Path) -> str:
    """Return a sentence on a module that failed, with how and the last error in its output."""
    file = output(module, work)
    text = _COLOUR.sub("", file.read_bytes()[-_LAST_BYTES:].decode("utf-8", errors="replace"))
    errors = _ERROR.findall(text)
    lines = [error for error in errors if _FOLLOWS not in error] or errors
    lines = lines or [line for line in text.split("\n") if line.strip()] or ["it wrote nothing"]
    return (
        f"{module} {how}: {lines[-1].strip()[:500]}. Mend what its output says, {file}, and run the same "
        "command again: it resumes from the newest checkpoint."
    )


def engine_failures(file: Path) -> Iterator[bool]:
    """Yield, as often as asked, whether the output since the last time tells of a vLLM engine that failed.

    verl waits without end for an engine whose process lives on.
    """
    read, rest = _size(file), b""  # what an earlier try wrote does not count
    while True:
        read, part = min(read, _size(file)), b""
        with contextlib.suppress(FileNotFoundError), file.open("rb") as opened:
            opened.seek(read)
            part = opened.read()
        read += len(part)
        found = _ENGINE_FAILED.search(rest + part)
        rest = b"" if found else (rest + part)[-_LONGEST:]
        yield bool(found)


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def output(module: str, work: Path) -> Path:
    """Return the file that a module's output goes to."""
    return work / f"{module}.log"


def _end(mark: str) -> None:
    """End every process that carries the mark; Ray's are not in the group of the one that started them."""
    for ending in (psutil.Process.terminate, psutil.Process.kill):
        left = [each for each in psutil.process_iter() if _carries(each, mark)]
        for each in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                ending(each)
        psutil.wait_procs(left, _GRACE_S)


def _carries(candidate: psutil.Process, mark: str) -> bool:
    try:
        # psutil's own reading ends at the first gap, which Ray's agents leave where they have set their title.
        return f"{_MARK}={mark}".encode() in Path(f"/proc/{candidate.pid}/environ").read_bytes()
    except OSError:  # another user's, or it has ended
        return False


def main() -> None:
    """Run the module that the first argument names, with the arguments after it."""
    process.die_with_parent(int(os.environ[PARENT]))
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
