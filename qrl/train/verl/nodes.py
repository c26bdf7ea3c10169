"""Ray on the machines of one training: the first process starts its head, and one process on each other machine joins.

torchrun starts one process a GPU on every machine, as for any training on several. With verl, process 0 leads
(`cluster`), the first process of each other machine runs a Ray node until the training ends (`join`), and the rest end
at once, since Ray starts processes of its own. Address and token of the cluster go through torchrun's store, so no port
has to be agreed on.

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
START_S = 120  # for Ray's head to start
JOIN_S = 300  # for all nodes to join
HEAD_S = 900  # for the first process to reach its training
# Keys of torchrun's store.
_CLUSTER = "qrl/ray/cluster"
_ENDED = "qrl/ray/ended"
_CPUS = 4  # per GPU, and once more: verl reserves three per GPU, and waits for ever where Ray counts fewer
_POLL_S = 0.5


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
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # otherwise anybody may run code there
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
    store = _store()
    node = process.rank() // process.local_world_size()
    try:
        store.wait([_CLUSTER], timedelta(seconds=HEAD_S))
    except RuntimeError as error:
        raise QrlError(
            f"Node {node} of the training waited {HEAD_S} s for the first one to start Ray: see what that one says, "
            "and run the same command again."
        ) from error
    head = json.loads(store.get(_CLUSTER))
    name = f"node-{node}"
    with _node(work, name, [f"--address={head['address']}"], head["token"]) as (ray, _):
        while not _ended(store):
            # Asked again: the head may have ended the training, and with it this node, in between.
            if ray.poll() is not None and not _ended(store):
                raise QrlError(child.failure(_RAY, child.ended(ray.returncode), work / name))
            time.sleep(_POLL_S)


def check_joined(gpus: Sequence[int], nodes: int, gpus_per_node: int) -> None:
    """Check that all nodes have joined a cluster, each with the same number of GPUs.

    Args:
        gpus: of every node that has joined.
        nodes: how many were expected.
        gpus_per_node: how many GPUs verl will use on a node.

    Raises:
        BadInput: the numbers of GPUs differ.
        QrlError: a node is missing.
    """
    if len(gpus) < nodes:
        raise QrlError(
            f"{len(gpus)} of {nodes} nodes joined Ray in {JOIN_S} s: see their output in the job's log, check that the "
            "nodes reach each other's ports, and run the same command again."
        )
    if set(gpus) != {gpus_per_node}:
        raise BadInput(
            f"The training's nodes have {', '.join(map(str, sorted(gpus)))} GPUs, but verl needs the same number on "
            f"each, here {gpus_per_node}: start the same number of processes on every node."
        )


@contextlib.contextmanager
def _node(work: Path, name: str, words: list[str], token: dict[str, str]) -> Iterator[tuple[subprocess.Popen, Path]]:
    """Run a node of Ray's with ports that are free and a folder of its own, so that any other Ray is left alone."""
    gpus = process.local_world_size()
    resources = [f"--num-gpus={gpus}", f"--num-cpus={max(os.cpu_count() or 1, _CPUS * (gpus + 1))}"]
    ports = ["--min-worker-port=0", "--max-worker-port=0", "--disable-usage-stats"]
    output = work / name
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        command = [_RAY, "start", "--block", *words, f"--temp-dir={folder}", *resources, *ports]
        with child.started(command, output, **token) as ray:
            yield ray, Path(folder)


def _address(ray: subprocess.Popen, folder: Path, output: Path) -> str:
    """Return the address that a head writes once it has started."""
    file = folder / "ray_current_cluster"
    deadline = time.monotonic() + START_S
    while ray.poll() is None and time.monotonic() < deadline:
        address = file.read_text().strip() if file.is_file() else ""
        if address:
            return address
        time.sleep(_POLL_S)
    if ray.poll() is None:
        raise QrlError(f"Ray's head did not start in {START_S} s: see {output}, and run the same command again.")
    raise QrlError(child.failure(_RAY, child.ended(ray.returncode), output))


def _joined(address: str, work: Path, token: dict[str, str]) -> list[int]:
    """Return the number of GPUs of every node that has joined in time, from a process that connects to the cluster."""
    log = child.output(__name__, work)
    log.unlink(missing_ok=True)
    with child.running([__name__, address, str(process.nodes()), str(JOIN_S)], work, **token):
        pass
    return json.loads(log.read_text().rpartition("RESULT ")[2].split("\n")[0])


def _store() -> "TCPStore":
    """Return torchrun's store; where nobody else keeps one, the first process does."""
    from torch.distributed import TCPStore

    keeps_store = process.rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=keeps_store,
        wait_for_workers=False,
        timeout=timedelta(seconds=HEAD_S),
    )


def _ended(store: "TCPStore") -> bool:
    try:
        return store.check([_ENDED])
    except RuntimeError as error:
        raise QrlError(
            "The first process of the training has ended without a word, so this node of Ray's ends too: see what that "
            "one says, and run the same command again."
        ) from error


def main() -> None:
    """Print the number of GPUs of each node in a cluster, once all expected ones have joined, or the time is over."""
    import ray

    address = sys.argv[1]
    expected_nodes = int(sys.argv[2])
    deadline = time.monotonic() + float(sys.argv[3])
    ray.init(address=address, log_to_driver=False)
    gpus: list[int] = []
    while len(gpus) < expected_nodes and time.monotonic() < deadline:
        gpus = [int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]]
        time.sleep(_POLL_S)
    print("RESULT", json.dumps(gpus), flush=True)


if __name__ == "__main__":
    main()
