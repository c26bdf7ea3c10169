"""Log a checkpoint of 8B's shape to a server with an S3 store, fetch it elsewhere, and spoil it there.

    python -m tests.benchmarks.artifacts WORK             # 16.4 GB, three times on the disk
    python -m tests.benchmarks.artifacts WORK --layers 1

MLflow's server is on PostgreSQL; its artifacts go to s3rver (`npm install s3rver`), which keeps objects as files. Each
act is a process of its own. Prints a line of JSON for each: seconds, peak memory, and what the process read and wrote.
"""

import argparse
import contextlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.tracking import team

SHAPE = dict(hidden_size=4096, intermediate_size=12288, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
SHAPE |= dict(vocab_size=151936, tie_word_embeddings=False, dtype="bfloat16")
LAYERS = 36
SHARD_BYTES = 4 << 30
LOG = """
import sys, tempfile
from pathlib import Path
import mlflow
from qrl import checkpoint
from qrl.tracking import models, runs, store
store.prepare()
source = Path(sys.argv[1])
with runs.step("train"):
    labels = dict(digest=checkpoint.digest(source), variant="base", scheme="full", task="arithmetic")
    print(models.log_checkpoint(source, name="base", move=True, **labels)[0], flush=True)
"""
GET = """
import sys
from qrl import checkpoint
from qrl.tracking import models, store
store.prepare()
print(checkpoint.digest(models.local_path(sys.argv[1])) == models.params(sys.argv[1])["digest"])
"""


def make(folder: Path, layers: int) -> int:
    """Write random weights of Qwen3-8B's shape in shards, with the shipped model's tokenizer; return their bytes."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

    from qrl import checkpoint, tiny

    config = Qwen3Config(num_hidden_layers=layers, **SHAPE, architectures=["Qwen3ForCausalLM"])
    with torch.device("meta"):
        shapes = {name: each.shape for name, each in AutoModelForCausalLM.from_config(config).state_dict().items()}
    shards: list[list[str]] = [[]]
    for name in shapes:
        if shards[-1] and 2 * sum(shapes[each].numel() for each in (*shards[-1], name)) > SHARD_BYTES:
            shards.append([])
        shards[-1].append(name)
    folder.mkdir(parents=True)
    where = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {name: torch.empty(shapes[name], dtype=torch.bfloat16).normal_(std=0.02) for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(names, file)
    size = 2 * sum(shape.numel() for shape in shapes.values())
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny.PATH).save_pretrained(folder)
    checkpoint.check(folder)
    return size


class Peak:
    """The largest resident memory of processes that are looked at ten times a second, by name."""

    def __init__(self) -> None:
        self.gib: dict[str, float] = {}
        self.watched: dict[str, int] = {}
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            for name, pid in list(self.watched.items()):
                with contextlib.suppress(psutil.Error):
                    parent = psutil.Process(pid)
                    used = sum(each.memory_info().rss for each in (parent, *parent.children(recursive=True)))
                    self.gib[name] = max(self.gib.get(name, 0), used / 2**30)
            time.sleep(0.1)


def act(name: str, program: str, words: list[str], folder: Path, server: str, peak: Peak) -> str:
    """Run a program in a working folder of its own, print what it took, and return what it printed."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"MLFLOW_TRACKING_URI": server, "PYTHONPATH": str(Path(__file__).parents[2])}
    peak.gib, began = {}, time.monotonic()
    process = psutil.Popen(
        [sys.executable, "-c", program, *words], cwd=folder, env=environment, stdout=-1, stderr=-1, text=True
    )
    peak.watched["client"] = process.pid
    used = None
    while process.poll() is None:
        with contextlib.suppress(psutil.Error):
            used = process.io_counters() if process.status() != psutil.STATUS_ZOMBIE else used
        time.sleep(0.02)
    output, errors = process.communicate()
    sentence = errors.strip().splitlines()[-1] if process.returncode else ""
    row = {"act": name, "seconds": round(time.monotonic() - began, 1), "ended": process.returncode}
    row |= {f"{who}_peak_gib": round(peak.gib[who], 2) for who in peak.gib}
    row |= {"read_gb": round(used.read_chars / 1e9, 2), "written_gb": round(used.write_chars / 1e9, 2)}
    kept = [path for path in folder.rglob("*.safetensors") if path.is_file()]
    row |= {"weights_here_gb": round(sum(path.stat().st_size for path in kept) / 1e9, 2), "printed": output.strip()}
    print(json.dumps(row | ({"sentence": sentence} if sentence else {})), flush=True)
    return output.strip()


@contextlib.contextmanager
def s3(folder: Path, program: str) -> Iterator[tuple[str, int]]:
    """Yield the address of an S3 server that keeps its objects in a folder, and its process."""
    port = team.free_port()
    command = [program, "--directory", str(folder), "--address", "127.0.0.1", "--port", str(port), "--silent"]
    with team.process(folder.with_suffix(".log"), command) as running:
        yield f"http://127.0.0.1:{port}", running.pid


def spoil(folder: Path) -> None:
    """Change one byte in the middle of the largest object."""
    largest = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    with largest.open("r+b") as file:
        file.seek(largest.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def listens(address: str) -> int:
    """Return the pid of the process that serves an address of this machine: uvicorn's, below uvx."""
    port = int(address.rpartition(":")[2])
    return next(
        each.pid for each in psutil.net_connections("tcp") if each.laddr.port == port and each.status == "LISTEN"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--s3", default="s3rver", help="program that starts it")
    given = parser.parse_args()
    work = given.work.resolve()
    began, size = time.monotonic(), make(work / "model", given.layers)
    print(json.dumps({"act": "make", "gb": round(size / 1e9, 2), "seconds": round(time.monotonic() - began)}))
    (work / "s3").mkdir()
    peak = Peak()
    with s3(work / "s3", given.s3) as (address, store), team.serving(work, auth=False, s3=address) as server:
        peak.watched |= {"s3": store, "server": listens(server)}
        run = (server, peak)
        uri = act("log", LOG, [str(work / "model")], work / "a", *run).split()[0]  # then the run's page
        act("get where it was logged", GET, [uri], work / "a", *run)
        act("get elsewhere", GET, [uri], work / "b", *run)
        act("get there again", GET, [uri], work / "b", *run)
        shutil.rmtree(work / "b")  # room for the next copy
        spoil(work / "s3")
        act("get elsewhere, a byte changed in the store", GET, [uri], work / "c", *run)


if __name__ == "__main__":
    main()
