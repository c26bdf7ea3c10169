"""Ray on the machines of one training: the first process starts its head, and one process on each other machine joins.

torchrun starts a process a GPU on every machine, as for any training on several. Of verl's, the first one leads, the
first one of each other machine holds a Ray node, and the rest end at once, since Ray starts its own. Address and token
of the cluster go through torchrun's store, so no port has to be agreed on.

As a program, this module prints how many GPUs each node of a cluster has, once all have joined or the time is over.
"""

import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from qrl import process
from qrl.errors import BadInput, QrlError
from qrl.train.verl import child

if TYPE_CHECKING:
    from torch.distributed import TCPStore

_RAY = "ray.scripts.scripts"  # what `ray` runs, in this environment's own version
LOCAL = "local"  # Ray's word for a cluster of its own, on this machine
START_S, JOIN_S, HEAD_S = 120, 300, 900  # for the head; for all nodes; for the first process to reach its training
_CLUSTER, _ENDED = "qrl/ray/cluster", "qrl/ray/ended"  # keys of the store
_CPUS = 4  # a GPU, and once more: verl reserves three a GPU, and waits for ever where Ray counts fewer
_LOOK_S = 0.5


@contextlib.contextmanager
def cluster(work: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Start Ray's head if several machines train, wait for their nodes, and end all with the block.

    Args:
        work: folder for Ray's output.

    Yields:
        The cluster's address, and the environment variables of a process that connects to it.

    Raises:
        BadInput: the nodes have different numbers of GPUs.
        QrlError: Ray did not start, or a node did not join in time.
    """
    if process.nodes() == 1:
        yield LOCAL, {}
        return
    store = _store()
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # else anybody may run code there
    with _node(work, "head", ["--head", "--port=0", "--include-dashboard=false"], token) as (ray, folder):
        address = _address(ray, folder, work / "head")
        store.set(_CLUSTER, json.dumps({"address": address, "token": token}))
        try:
            check_joined(_joined(address, work, token), process.nodes(), process.local_world_size())
            yield address, token
        finally:
            store.set(_ENDED, "1")  # before the head ends, which the other nodes would take for a failure


def join(work: Path) -> None:
    """Hold this machine's node until the training has ended; a machine's further processes return at once.

    Args:
        work: folder for Ray's output.

    Raises:
        QrlError: the first process did not start Ray in time, or the node ended before the training.
    """
    if process.local_rank() or process.nodes() == 1:
        return
    store, number = _store(), process.rank() // process.local_world_size()
    try:
        store.wait([_CLUSTER], timedelta(seconds=HEAD_S))
    except RuntimeError as error:
        late = f"Node {number} of the training waited {HEAD_S} s for the first one to start Ray"
        raise QrlError(f"{late}: see what that one says, and run the same command again.") from error
    known = json.loads(store.get(_CLUSTER))
    name = f"node-{number}"
    with _node(work, name, [f"--address={known['address']}"], known["token"]) as (ray, _):
        while not _ended(store):
            if ray.poll() is not None and not _ended(store):
                raise QrlError(child.failure(_RAY, child.ended(ray.returncode), work / name))
            time.sleep(_LOOK_S)


def check_joined(gpus: Sequence[int], nodes: int, each: int) -> None:
    """Check that all nodes have joined a cluster, each with the same number of GPUs.

    Args:
        gpus: of every node that has joined.
        nodes: how many were expected.
        each: how many GPUs verl will use on a node.

    Raises:
        BadInput: the numbers of GPUs differ.
        QrlError: a node is missing.
    """
    if len(gpus) < nodes:
        raise QrlError(
            f"{len(gpus)} of {nodes} nodes joined Ray in {JOIN_S} s: see their output in the job's log, check that the "
            "nodes reach each other's ports, and run the same command again."
        )
    if set(gpus) != {each}:
        raise BadInput(
            f"The training's nodes have {', '.join(map(str, sorted(gpus)))} GPUs, but verl needs the same number on "
            f"each, here {each}: start the same number of processes on every node."
        )


@contextlib.contextmanager
def _node(work: Path, name: str, words: list[str], token: dict[str, str]) -> Iterator[tuple[subprocess.Popen, Path]]:
    """Run a node of Ray's with ports that are free and a folder of its own, so that any other Ray is left alone."""
    gpus = process.local_world_size()
    resources = [f"--num-gpus={gpus}", f"--num-cpus={max(os.cpu_count() or 1, _CPUS * (gpus + 1))}"]
    ports = ["--min-worker-port=0", "--max-worker-port=0", "--disable-usage-stats"]
    (output := work / name).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        command = [_RAY, "start", "--block", *words, f"--temp-dir={folder}", *resources, *ports]
        with child.started(command, output, **token) as ray:
            yield ray, Path(folder)


def _address(ray: subprocess.Popen, folder: Path, output: Path) -> str:
    """Return the address that a head writes once it has started."""
    file, end = folder / "ray_current_cluster", time.monotonic() + START_S
    while ray.poll() is None and time.monotonic() < end:
        if file.is_file() and (address := file.read_text().strip()):
            return address
        time.sleep(_LOOK_S)
    if ray.poll() is None:
        raise QrlError(f"Ray's head did not start in {START_S} s: see {output}, and run the same command again.")
    raise QrlError(child.failure(_RAY, child.ended(ray.returncode), output))


def _joined(address: str, work: Path, token: dict[str, str]) -> list[int]:
    words, log = [__name__, address, str(process.nodes()), str(JOIN_S)], work / f"{__name__}.log"
    log.unlink(missing_ok=True)
    with child.running(words, work, **token):
        pass
    return json.loads(log.read_text().rpartition("RESULT ")[2].split("\n")[0])


def _store() -> "TCPStore":
    """Return torchrun's store; where nobody else keeps one, the first process does."""
    from torch.distributed import TCPStore

    mine = process.rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(*place, is_master=mine, wait_for_workers=False, timeout=timedelta(seconds=HEAD_S))


def _ended(store: "TCPStore") -> bool:
    try:
        return store.check([_ENDED])
    except RuntimeError as error:
        gone = "The first process of the training has ended without a word, so this node of Ray's ends too"
        raise QrlError(f"{gone}: see what that one says, and run the same command again.") from error


def main() -> None:
    """Print the number of GPUs of each node in a cluster, once as many as wanted have joined, or the time is over."""
    import ray

    address, wanted, limit_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    ray.init(address=address, log_to_driver=False)
    end, gpus = time.monotonic() + limit_s, []
    while len(gpus) < wanted and time.monotonic() < end:
        gpus = [int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]]
        time.sleep(_LOOK_S)
    print("RESULT", json.dumps(gpus), flush=True)


if __name__ == "__main__":
    main()
