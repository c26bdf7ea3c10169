"""Time from a command to an answering server: `qrl serve` of a registered stage versus bare vLLM on the same folder.

    python tests/benchmarks/start.py 1.5b --rounds 5 --out start.json    # in vLLM's environment; shapes: micro, 1.5b,
    8b python tests/benchmarks/start.py 1.5b --rounds 5 --eager --out start.json python tests/benchmarks/start.py micro
    --alone 8 --eager --out start.json

Ours resolves the stage, checks its gate, and reads every byte for its digest; it is ready when /health answers 200 and
its ready line is printed. Bare vLLM is ready when /health answers 200. A first start is not counted: it compiles
kernels and caches files. Pairs alternate their order from round to round. Shapes have random weights. With --eager,
both use vLLM's --enforce-eager, without compiling and capturing, which are most of a start and of its noise. With
--alone, only ours is timed, with the parts of its time. On a noisy machine, the overhead of ours is the time before the
engine's process (`before_s` by the clock, `before_cpu_s` of a processor) plus `serve/added_s`, which the server
measures itself.
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
PARTS: list[dict[str, float]] = []  # the parts of each of our starts
# `qrl serve` with an option for the engine that it does not offer.
EAGER = """
from qrl.serve import engines
own = engines.arguments
engines.arguments = lambda *args: [*own(*args), "--enforce-eager"]
from qrl.cli import main
main()
"""
# The same command, up to the start of the engine's process.
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
    """Measure, print, and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=("micro", "1.5b", "8b"))
    parser.add_argument("--rounds", type=int, default=5, help="Number of pairs.")
    parser.add_argument("--alone", type=int, metavar="N", help="Time only ours, N times.")
    parser.add_argument("--eager", action="store_true", help="Both without compilation and CUDA graphs.")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db", "QRL_PLACE": "vllm"}
        os.chdir(folder)
        path, name = in_process(registered, args.shape)  # torch and the GPU's memory end with that process
        began = time.monotonic()
        digest = checkpoint.digest(path)
        hashing = time.monotonic() - began
        ways = {"ours": lambda: ours(name, args.eager), "bare": lambda: bare(path, args.eager)}
        ours(name, args.eager)
        rounds = []
        for _ in range(args.alone or 0):
            ours(name, args.eager)
            results = {"shape": args.shape, "eager": args.eager, "hash_s": hashing, "parts": PARTS[1:]}
            args.out.write_text(json.dumps(results, indent=1))
            print(PARTS[-1], flush=True)
        for number in range(0 if args.alone else args.rounds):
            order = list(ways) if number % 2 == 0 else list(ways)[::-1]
            rounds.append({way: ways[way]() for way in order})
            print(rounds[-1], PARTS[-1], flush=True)
            if len(rounds) > 1:  # after each, in case the machine is taken away
                report(args, path, digest, hashing, rounds)
        print_parts(args.shape)


def report(args: argparse.Namespace, path: Path, digest: str, hashing: float, rounds: list[dict[str, float]]) -> None:
    """Write the pairs, their mean difference with its interval, and the time of the hash alone."""
    import torch
    import vllm

    ours, theirs = (np.array([times[way] for times in rounds]) for way in ("ours", "bare"))
    lost, n = ours - theirs, len(rounds)
    reach = stats.quantile((1 + stats.LEVEL) / 2, n - 1) * lost.std(ddof=1) / n**0.5
    results = {
        "shape": args.shape,
        "eager": args.eager,
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
    args.out.write_text(json.dumps(results, indent=1))
    print(
        f"{args.shape}: ours {np.median(ours):.2f} s, vllm serve {np.median(theirs):.2f} s (medians of {n}); "
        f"ours − bare {lost.mean():+.2f} [{lost.mean() - reach:+.2f}, {lost.mean() + reach:+.2f}] s; "
        f"hash alone {hashing:.2f} s"
    )


def print_parts(shape: str) -> None:
    """Print what ours adds, over every start but the first."""
    for what, key in (
        ("from the command to the engine's process", "before_s"),
        ("of a processor until then", "before_cpu_s"),
        ("added to the slower of load and hash", "serve/added_s"),
    ):
        values = [parts[key] for parts in PARTS[1:]]
        reach = f"{min(values):.4f} to {max(values):.4f} s, n = {len(values)} starts"
        print(f"{shape}: {what} {np.median(values):.4f} s (median), {reach}")


def in_process(work, *args):
    """Return a function's result, computed in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *args).result()


def registered(shape: str) -> tuple[str, str]:
    """Register a shape's checkpoint as version 1, at stage base; return its folder in the store and its name."""
    from qrl import registry
    from qrl.registry import versions
    from qrl.tracking import models, runs, store

    path = checkpoint_of(shape)
    store.prepare()
    digest = checkpoint.digest(path)
    cell = {"digest": digest, "variant": "base", "scheme": "full"}
    with runs.step("evaluate"):
        uri, _ = models.log_checkpoint(path, name="base", task="arithmetic", move=True, **cell)  # hard links
    name = f"qrl-shape-{shape}"
    version = registry.register(name, uri, accuracy=0.0, stderr=0.0, n=1, **cell)
    registry.promote(name, "base", version.version, record={"reasons": ["a benchmark of starting, not of answers"]})
    return str(versions.folder(version)), name


def ours(name: str, eager: bool) -> float:
    """Return the seconds from the command to an answering server with its ready line printed."""
    port = free_port()
    command = ["-c", EAGER] if eager else ["-m", "qrl"]
    options = ["serve", "--stage", "base", "--engine", "vllm", "--port", str(port), "--registered_name", name]
    halted = subprocess.check_output([sys.executable, "-c", BEFORE, *options], env=environment(), text=True)
    parts = {"before_cpu_s": float(halted)}
    words = [sys.executable, *command, *options]
    took = seconds(words, port, "Serving ", lambda process: parts.update(before_s=before(process)))
    PARTS.append(parts | in_process(last_metrics))
    return took


def before(server: subprocess.Popen) -> float:
    """Return the seconds from a command's process to its engine's, by the kernel's clock of 100 ticks a second."""
    import psutil

    process = psutil.Process(server.pid)
    engines = [child for child in process.children() if any("engine_bootstrap" in word for word in child.cmdline())]
    return min(engine.create_time() for engine in engines) - process.create_time()


def last_metrics() -> dict[str, float]:
    """Return the metrics of the newest server's run."""
    import mlflow

    (run, *_) = mlflow.search_runs(
        output_format="list", filter_string="tags.`qrl.step` = 'serve'", order_by=["attributes.start_time DESC"]
    )
    return {key: value for key, value in run.data.metrics.items() if key.startswith("serve/")}


def bare(path: str, eager: bool) -> float:
    """Return the same for vLLM's own command, or for its module on a CPU, where the command crashes."""
    port = free_port()
    command = ["vllm.entrypoints.cli.main", "serve", path]
    if not shutil.which("nvidia-smi"):
        command = ["vllm.entrypoints.openai.api_server", "--model", path, "--enforce-eager"]
    if eager and "--enforce-eager" not in command:
        command.append("--enforce-eager")
    return seconds([sys.executable, "-m", *command, "--host", "127.0.0.1", "--port", str(port)], port)


def seconds(words: list[str], port: int, ready_line: str | None = None, look=lambda process: None) -> float:
    """Return the seconds until a command is ready; then end it."""
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
        time.sleep(2)  # until the metrics of the start reach the store
        return took
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def environment() -> dict[str, str]:
    """Return the environment variables of every command here."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }


def healthy(port: int) -> bool:
    """Return whether /health answers 200."""
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
