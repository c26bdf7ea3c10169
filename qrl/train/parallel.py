"""Several processes that train as one, started by the training itself: `train.parallel`.

The step's own process is the first and the only one that logs and writes. It starts the others on the same recipe, and
they end with it, however it ends. Under `torchrun` or `accelerate launch` all are there already, and none is started.
"""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from qrl import process
from qrl.engine import device as devices
from qrl.errors import BadInput, QrlError
from qrl.recipe import Train

if TYPE_CHECKING:
    from torch import Tensor

CONFIGURATIONS: Mapping[str, Mapping[str, str]] = {  # what `accelerate launch` sets for the same
    "ddp": {},
    "fsdp2": {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
        "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    },
}
_GRACE_S = 20  # for the first process to notice a failure
_LAST = 2000  # bytes of a process's output in which its sentence is


def processes(settings: Train, device: str, gpus: int | None = None) -> int:
    """Return how many processes train together: those that were launched, or as `check` allows them, on `gpus`."""
    if settings.parallel == "none" or _launched():
        return process.world_size()
    return settings.processes or (devices.gpus(device) if gpus is None else gpus)


def check(settings: Train, device: str, gpus: int | None = None) -> None:
    """Check that this machine, or nodes of a cluster with `gpus`, can train as `train.parallel` says; loads nothing.

    Raises:
        BadInput: there are too few GPUs, or the device does not allow it.
    """
    if _launched() and gpus is None:
        _check_launched(device)
    method, count = settings.parallel, settings.processes
    if settings.teacher_placement == "sharded" and method == "none" and process.world_size() == 1:
        raise BadInput(
            "train.teacher_placement = sharded spreads the teacher over several processes, but one trains: set "
            "train.parallel = ddp, or leave it out."
        )
    if method == "none":
        return
    if method == "fsdp2" and device == "cpu":
        raise BadInput("train.parallel = fsdp2 shards over GPUs, but this run's device is the CPU: use ddp, or GPUs.")
    if _launched():
        return
    is_this_machine = gpus is None
    if is_this_machine:
        gpus = devices.gpus(device)
    if device != "cuda" and count is None:
        raise BadInput(f"train.parallel = {method} takes a process per GPU, and there is none: set train.processes.")
    if device == "cuda" and gpus < (count or 2):
        setting = f"train.processes = {count}" if count else f"train.parallel = {method}"
        owner = "this machine has" if is_this_machine else "cluster.yaml asks for"
        remedy = "lower it, or leave it out" if is_this_machine else "raise steps.train.gpus, or lower it"
        raise BadInput(f"{setting} needs {count or 2} GPUs, but {owner} {_counted(gpus)}: {remedy}.")


@contextmanager
def group(settings: Train, device: str) -> Iterator[int]:
    """Make this process the first of those that `train.parallel` asks for; yield how many others it has to start."""
    check(settings, device)
    configured = CONFIGURATIONS.get(settings.parallel, {})
    if settings.parallel == "none" or _launched():
        with process.variables(**configured):
            yield 0
        return
    count = processes(settings, device)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    with process.variables(**configured, **ranks, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)):
        yield count - 1


@contextmanager
def others(count: int, recipe: str) -> Iterator[None]:
    """Start processes 1 to `count` on a recipe, as YAML, and end them with the block.

    They are not waited for: once the first one has its result nobody needs theirs, and as they exit, vLLM waits in each
    until all have come as far, the first one too.

    Raises:
        QrlError: the block failed, and before it one of them, with its own sentence.
    """
    if not count:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="qrl-ranks-") as folder:
        (Path(folder) / "recipe.yaml").write_text(recipe, encoding="utf-8")
        logs = [Path(folder, f"{rank}.log") for rank in range(1, count + 1)]
        started = [_start(rank, log) for rank, log in enumerate(logs, 1)]
        done = threading.Event()
        threading.Thread(target=_watch, args=(started, logs, done), daemon=True).start()
        try:
            yield
        except Exception as error:
            if sentence := _failure(started, logs, wait_s=2):
                raise QrlError(sentence) from error
            raise
        finally:
            done.set()
            _end(started)


def agree(start: Mapping[str, str]) -> None:
    """Check that all processes begin their training alike; each of several calls this once.

    Args:
        start: what it is → its digest in this process.

    Raises:
        BadInput: a process has another digest than the first one.
    """
    from accelerate.utils import gather_object

    first, *rest = gather_object([dict(start)])
    for rank, digests in enumerate(rest, 1):
        different = [name for name in first if first[name] != digests[name]]
        if different:
            raise BadInput(
                f"Process {rank} of the training has other {' and '.join(different)} than process 0: give all of them "
                "the same recipe, files, versions and kind of GPU, and delete `.qrl` where it is not shared."
            )


def digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return the sha256 of tensors and their names, in order."""
    import torch

    total = hashlib.sha256()
    for name, tensor in tensors:
        total.update(name.encode() + b"\0")
        total.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return total.hexdigest()


def _check_launched(device: str) -> None:
    """Raise BadInput if this process has no GPU of its own; a launcher may also show each process its GPU alone."""
    gpus, rank = devices.gpus(device), process.local_rank()
    if device == "cuda" and rank >= gpus:
        raise BadInput(
            f"Process {rank} of the training on this machine needs a GPU of its own, but the machine has "
            f"{_counted(gpus)}: lower --nproc-per-node, or steps.train.gpus in cluster.yaml."
        )


def _counted(gpus: int) -> str:
    return "1 GPU" if gpus == 1 else f"{gpus} GPUs"


def _launched() -> bool:
    return "RANK" in os.environ


def _start(rank: int, log: Path) -> subprocess.Popen:
    variables = {key: value for key, value in os.environ.items() if key != "MLFLOW_RUN_ID"}  # the first one logs
    variables |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    variables |= {process.FOLDER: os.getcwd(), process.FIRST: str(os.getpid())}
    words = [sys.executable, "-m", "qrl", "train", "--recipe", str(log.parent / "recipe.yaml")]
    with log.open("wb") as output:
        return subprocess.Popen(words, cwd=process.ROOT, env=variables, stdout=output, stderr=output)


def _failure(started: list[subprocess.Popen], logs: list[Path], wait_s: float = 0) -> str:
    """Return a sentence on the first process that failed, with the last line that it wrote; empty if none did."""
    for rank, (child, log) in enumerate(zip(started, logs, strict=True), 1):
        try:
            code = child.wait(wait_s) if wait_s else child.poll()
        except subprocess.TimeoutExpired:
            continue
        if code:
            lines = log.read_bytes()[-_LAST:].decode("utf-8", errors="replace").split("\n")
            last = next((line.strip() for line in reversed(lines) if line.strip()), "it wrote nothing")
            ending = f"signal {-code}" if code < 0 else f"exit code {code}"
            return f"Process {rank} of the training, of 0 to {len(started)}, ended with {ending}: {last}"
    return ""


def _watch(started: list[subprocess.Popen], logs: list[Path], done: threading.Event) -> None:
    """End this process if another one failed, and this one still waits for it after a while."""
    while not done.wait(1):
        if sentence := _failure(started, logs):
            if not done.wait(_GRACE_S):
                print(f"qrl: {sentence}", file=sys.stderr, flush=True)
                os.kill(os.getpid(), 15)
                if not done.wait(_GRACE_S):  # it hangs where no signal reaches it; the next command ends its run
                    os._exit(1)
            return


def _end(started: list[subprocess.Popen]) -> None:
    for child in started:
        child.terminate()
    for child in started:
        try:
            child.wait(2)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
