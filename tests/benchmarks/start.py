"""From a command to an answering server: a registered stage through `qrl serve` against bare vLLM on the same folder, in turn.

    python tests/benchmarks/start.py 1.5b --rounds 5 --out start.json    # in vLLM's environment; shapes: micro, 1.5b, 8b
    python tests/benchmarks/start.py 1.5b --rounds 5 --eager --out start.json
    python tests/benchmarks/start.py micro --alone 8 --eager --out start.json

Ours looks the stage up, checks its gate, and reads every byte for its digest; it is ready when /health answers 200 and its
ready line is out. The bare one is ready when /health answers 200. One start goes first and is not counted: kernels are
compiled, files are in memory. Pairs change their order from round to round. Shapes have random weights. --eager: both with
vLLM's --enforce-eager, without compiling and capturing, which are the larger part of a start and of its noise. --alone: ours
alone, and where its seconds went. What it adds to the engine's own start, on a machine whose noise hides it in the whole, is
what lies before the engine's process, in `before_s` by the clock and in `before_cpu_s` of a processor, and `serve/added_s`, which
the server itself measures.
"""

import argparse
import json
import multiprocessing
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from rollouts import checkpoint_of

from qrl import checkpoint, stats

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300
PARTS: list[dict[str, float]] = []  # of each of our starts
# `qrl serve` has no such option: its command, with one word more for the engine.
EAGER = "from qrl.serve import engines; own = engines.arguments; engines.arguments = lambda *a: [*own(*a), '--enforce-eager']; from qrl.cli import main; main()"
# The same command, up to where it would start the engine's process.
BEFORE = """
import os, subprocess, time
def halt(*_words, **_named):
    print(time.process_time(), flush=True)
    os._exit(0)
subprocess.Popen = halt
from qrl.cli import main
main()
"""


def main() -> None:
    """Measures, prints, and writes one JSON file."""
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("shape", choices=("micro", "1.5b", "8b"))
    given.add_argument("--rounds", type=int, default=5, help="pairs")
    given.add_argument("--alone", type=int, metavar="N", help="no pairs: ours, N times")
    given.add_argument("--eager", action="store_true", help="both without compiling and CUDA graphs")
    given.add_argument("--out", type=Path, required=True)
    asked = given.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db", "QRL_PLACE": "vllm"}
        os.chdir(folder)
        path, name = aside(registered, asked.shape)  # torch and the GPU's memory end with that process
        began = time.monotonic()
        digest = checkpoint.digest(path)
        hashing = time.monotonic() - began
        ways = {"ours": lambda: ours(name, asked.eager), "bare": lambda: bare(path, asked.eager)}
        ours(name, asked.eager)
        rounds = []
        for _ in range(asked.alone or 0):
            ours(name, asked.eager)
            asked.out.write_text(
                json.dumps(
                    {"shape": asked.shape, "eager": asked.eager, "hash_s": hashing, "parts": PARTS[1:]}, indent=1
                )
            )
            print(PARTS[-1], flush=True)
        for number in range(0 if asked.alone else asked.rounds):
            order = list(ways) if number % 2 == 0 else list(ways)[::-1]
            rounds.append({way: ways[way]() for way in order})
            print(rounds[-1], PARTS[-1], flush=True)
            if len(rounds) > 1:  # after each, for a machine that is lent by the minute
                report(asked, path, digest, hashing, rounds)
        said(asked.shape)


def report(asked: argparse.Namespace, path: Path, digest: str, hashing: float, rounds: list[dict[str, float]]) -> None:
    """The pairs, their mean difference with its interval, and what the hash alone takes."""
    import torch
    import vllm

    ours, theirs = (np.array([each[way] for each in rounds]) for way in ("ours", "bare"))
    lost, n = ours - theirs, len(rounds)
    reach = stats.quantile((1 + stats.LEVEL) / 2, n - 1) * lost.std(ddof=1) / n**0.5
    found = {
        "shape": asked.shape,
        "eager": asked.eager,
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "digest": digest,
        "hash_s": hashing,
        "rounds": rounds,
        "parts": PARTS[1:],
        "ours_median_s": float(np.median(ours)),
        "bare_median_s": float(np.median(theirs)),
        "difference_s": {"estimate": lost.mean(), "low": lost.mean() - reach, "high": lost.mean() + reach, "n": n},
    }
    asked.out.write_text(json.dumps(found, indent=1))
    print(f"{asked.shape}: ours {found['ours_median_s']:.2f} s, vllm serve {found['bare_median_s']:.2f} s (medians of {len(rounds)}); ours − bare {lost.mean():+.2f} [{lost.mean() - reach:+.2f}, {lost.mean() + reach:+.2f}] s; hash alone {hashing:.2f} s")  # fmt: skip


def said(shape: str) -> None:
    """What ours adds, of every start but the first."""
    for what, key in (
        ("from the command to the engine's process", "before_s"),
        ("of a processor until then", "before_cpu_s"),
        ("added to the slower of load and hash", "serve/added_s"),
    ):
        values = [each[key] for each in PARTS[1:]]
        print(
            f"{shape}: {what} {np.median(values):.4f} s (median), {min(values):.4f} to {max(values):.4f} s, n = {len(values)} starts"
        )


def aside(work, *given):
    """What a function returns, from a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *given).result()


def registered(shape: str) -> tuple[str, str]:
    """A shape's checkpoint as version 1 of a registry, at stage base; its folder in the store, and its registered name."""
    from qrl import registry
    from qrl.registry import versions
    from qrl.tracking import models, runs, store

    path = checkpoint_of(shape)
    store.prepare()
    digest = checkpoint.digest(path)
    cell = {"digest": digest, "variant": "base", "scheme": "full"}
    with runs.step("evaluate"):
        uri, _ = models.log_checkpoint(
            path, name="base", task="arithmetic", move=True, **cell
        )  # linked: nobody edits the shape
    name = f"qrl-shape-{shape}"
    version = registry.register(name, uri, accuracy=0.0, stderr=0.0, n=1, **cell)
    registry.promote(name, "base", version.version, record={"why": "a benchmark of starting, not of answers"})
    return str(versions.folder(version)), name


def ours(name: str, eager: bool) -> float:
    """Seconds from the command to an answering server whose ready line is out."""
    port = free_port()
    command = ["-c", EAGER] if eager else ["-m", "qrl"]
    words = [
        sys.executable,
        *command,
        "serve",
        "--stage",
        "base",
        "--engine",
        "vllm",
        "--port",
        str(port),
        "--registered_name",
        name,
    ]
    found = {
        "before_cpu_s": float(
            subprocess.check_output(
                [sys.executable, "-c", BEFORE, *words[words.index("serve") :]], env=environment(), text=True
            )
        )
    }
    took = seconds(words, port, "Serving ", lambda process: found.update(before_s=before(process)))
    PARTS.append(found | aside(last_metrics))
    return took


def before(server: subprocess.Popen) -> float:
    """Seconds from a command's process to that of its engine, by the kernel's clock, which ticks a hundred times a second."""
    import psutil

    process = psutil.Process(server.pid)
    return (
        min(child.create_time() for child in process.children() if any("engine_bootstrap" in word for word in child.cmdline()))
        - process.create_time()
    )


def last_metrics() -> dict[str, float]:
    """Of the newest server's run."""
    import mlflow

    (run, *_) = mlflow.search_runs(
        output_format="list", filter_string="tags.`qrl.step` = 'serve'", order_by=["attributes.start_time DESC"]
    )
    return {key: value for key, value in run.data.metrics.items() if key.startswith("serve/")}


def bare(path: str, eager: bool) -> float:
    """The same for vLLM's own command; on a CPU for the module behind it, since the command crashes there."""
    port = free_port()
    command = ["vllm.entrypoints.cli.main", "serve", path] if shutil.which("nvidia-smi") else ["vllm.entrypoints.openai.api_server", "--model", path, "--enforce-eager"]  # fmt: skip
    if eager and "--enforce-eager" not in command:
        command.append("--enforce-eager")
    return seconds([sys.executable, "-m", *command, "--host", "127.0.0.1", "--port", str(port)], port)


def seconds(words: list[str], port: int, ready_line: str | None = None, look=lambda process: None) -> float:
    """How long a command takes to be ready; it is then ended, and waited for."""
    log = Path("log")
    began = time.monotonic()
    with log.open("w") as out:
        process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, env=environment())
    try:
        while not (healthy(port) and (ready_line is None or ready_line in log.read_text())):
            if process.poll() is not None or time.monotonic() - began > TIMEOUT_S:
                raise SystemExit(f"{' '.join(words)} did not become ready:\n{log.read_text()[-4000:]}")
            time.sleep(0.02)
        took = time.monotonic() - began
        look(process)
        time.sleep(2)  # our own figures of the start reach the store
        return took
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def environment() -> dict[str, str]:
    """Of every command here."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }


def healthy(port: int) -> bool:
    """Whether /health answers 200."""
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            f"http://127.0.0.1:{port}/health", timeout=5
        ) as answer:
            return answer.status == 200
    except OSError:
        return False


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


if __name__ == "__main__":
    main()
