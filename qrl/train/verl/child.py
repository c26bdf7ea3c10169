"""Processes of verl's and of Ray's: each ends with the training that started it, and so does all that it started.

A training with verl is a tree of processes: a driver, Ray's daemons, workers, and vLLM's engines, several of them in
process groups of their own. If one remained, it would keep its GPU. So every process of one training inherits a mark
in its environment, and `started` ends whatever carries the mark. As a program, this module runs another module as
`python -m` does, in a process that ends with its parent even if that one is killed.

Errors come from the output alone: verl's exit code says little, and its last line is rarely the cause. `failure` picks
the sentence to show, `engine_failures` notices an engine that died while verl waits for it.
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
_MARK = "QRL_VERL_RUN"  # environment variable that all processes of one training inherit, Ray's too
# Not inherited: our run, somebody else's Ray, and torchrun's ranks, since verl's workers get ranks of their own.
_NOT_PASSED = re.compile(
    "MLFLOW_RUN_ID|RAY_ADDRESS|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*"
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PROCESS = r"(?:\((?:[^()\n]|\([^()\n]*\))*\) )*"  # such as "(Server pid=2) (Worker(0) pid=3) "
_ERROR = re.compile(rf"^{_PROCESS}(?:ERROR [^\]\n]*\] )?([\w.]*(?:Error|Exception|Exit)\b.*)$", re.MULTILINE)
_ENGINE_FAILED = re.compile(
    rb"EngineDeadError|EngineCore encountered a fatal error|"
    rb"Invocation of (?:collective_rpc|sleep|wake_up) method failed"
)
_LONGEST_MATCH = 64  # bytes of `_ENGINE_FAILED`, which two reads may divide
_FOLLOWING_ERROR = "EngineDeadError"  # only says that there was another error before it
_LAST_BYTES = 20_000  # of the output, searched for errors
_GRACE_S = 20  # for a process to end before it is killed


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
        variables: of its environment, in addition to this process's own.
    """
    mark = uuid.uuid4().hex
    path = os.pathsep.join(filter(None, (str(process.ROOT), os.environ.get("PYTHONPATH"))))
    inherited = {name: value for name, value in os.environ.items() if not _NOT_PASSED.fullmatch(name)}
    environment = {
        **inherited,
        "PYTHONPATH": path,
        "HYDRA_FULL_ERROR": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONUNBUFFERED": "1",  # otherwise the driver holds the last lines of workers until it ends
        _MARK: mark,
        PARENT: str(os.getpid()),
        **variables,
    }
    try:
        with output(words[0], work).open("ab") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", __name__, *words],
                cwd=work,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        yield child
    finally:
        _end(mark)


def ended(code: int) -> str:
    """Describe how a process with an exit code other than 0 ended."""
    return f"ended with signal {-code}" if code < 0 else f"ended with exit code {code}"


def failure(module: str, outcome: str, work: Path) -> str:
    """Return a sentence on a module that failed: how it ended, and the last error in its output."""
    file = output(module, work)
    text = _COLOUR.sub("", file.read_bytes()[-_LAST_BYTES:].decode("utf-8", errors="replace"))
    return (
        f"{module} {outcome}: {_last_error(text)[:500]}. Mend what its output says, {file}, and run the same "
        "command again: it resumes from the newest checkpoint."
    )


def _last_error(text: str) -> str:
    """Return the last error of an output, at best one that is a cause; without any, the last line."""
    errors = _ERROR.findall(text)
    causes = [error for error in errors if _FOLLOWING_ERROR not in error]
    lines = [line for line in text.split("\n") if line.strip()]
    candidates = causes or errors or lines or ["it wrote nothing"]
    return candidates[-1].strip()


def engine_failures(file: Path) -> Iterator[bool]:
    """Yield, at each `next`, whether the output since the last one reports a vLLM engine that failed.

    verl waits without end for an engine if its process stays alive.
    """
    offset = _size(file)  # what an earlier try wrote does not count
    rest = b""  # the end of the last part, in case a message is divided
    while True:
        offset = min(offset, _size(file))
        part = b""
        with contextlib.suppress(FileNotFoundError), file.open("rb") as log:
            log.seek(offset)
            part = log.read()
        offset += len(part)
        match = _ENGINE_FAILED.search(rest + part)
        rest = b"" if match else (rest + part)[-_LONGEST_MATCH:]
        yield bool(match)


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def output(module: str, work: Path) -> Path:
    """Return the file that a module's output goes to."""
    return work / f"{module}.log"


def _end(mark: str) -> None:
    """End every process that carries the mark; Ray's are not in the group of the one that started them."""
    for signal in (psutil.Process.terminate, psutil.Process.kill):
        remaining = [candidate for candidate in psutil.process_iter() if _carries(candidate, mark)]
        for marked in remaining:
            with contextlib.suppress(psutil.NoSuchProcess):
                signal(marked)
        psutil.wait_procs(remaining, _GRACE_S)


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
