"""Take random weights of Qwen3-8B's or a 32 B shape through a recipe: train, merge, quantize, evaluate, promote, serve.

    python tests/benchmarks/large.py WORK            # one GPU of 80 GB or more
    python tests/benchmarks/large.py WORK --size 32b --untrained    # two GPUs of 139 GiB, 180 GB of disk
    python tests/benchmarks/large.py WORK --check    # two layers on a CPU, to see that it runs

Each step is a command of qrl, whose output goes to WORK/logs. Prints its seconds and, for training, the peak memory.
A second call does what is left. Random weights answer nothing, so the gates are told to admit that.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent / "answer"))

import export

from qrl import names
from qrl.tracking import reuse

SHAPES = {  # of `python -m qrl.tiny.make`
    "8b": "--layers 36 --hidden 4096 --heads 32 --kv-heads 8 --intermediate 12288 --vocab 151936 --positions 4096 "
    "--untied",
    "32b": "--layers 64 --hidden 5120 --heads 40 --kv-heads 8 --intermediate 25600 --vocab 151936 --positions 4096 "
    "--untied",
    "check": "--layers 2 --hidden 128 --positions 1024",
}
RECIPES = {"8b": "qwen3-8b-qlora-deepmath", "32b": "qwen3-8b-qlora-deepmath"}
RECIPES |= {"check": "qwen3-math-qlora"}  # the same, without vLLM's settings
SCHEMES = {"8b": names.AWQ, "32b": names.FP8, "check": "awq-ct"}
TRAINED = {
    "8b": "--train.questions 500 --rollout.kv_cache_gib 20 --rollout.compile false",
    "check": "--device cpu --train.questions 32 --train.prompts_per_step 2 --train.max_completion_tokens 8 "
    "--train.micro_batch 16",
}
QUANTIZED = {"8b": "--quantize.calibration_samples 16", "32b": ""}
QUANTIZED |= {"check": "--device cpu --quantize.calibration_samples 4"}
ANSWERED = {"8b": "--evaluate.engine vllm --evaluate.kv_cache_gib 8 --evaluate.compile false", "check": "--device cpu"}
ANSWERED["32b"] = f"{ANSWERED['8b']} --evaluate.tensor_parallel 2"
ADMITTED = "--evaluate.n 20 --evaluate.max_new_tokens 64 --evaluate.min_eos_rate 0 --evaluate.max_truncation_rate 1 "
ADMITTED += "--evaluate.min_parse_rate 0 --evaluate.max_prompt_leak_rate 1"
PORT = 8123
READY_S = 480


class Work:
    """Commands below one folder, with a store there."""

    def __init__(self, folder: Path, size: str) -> None:
        self.folder, self.size, self.store = folder.resolve(), size, f"sqlite:///{folder.resolve()}/store.db"
        self.model, self.data = self.folder / "model", self.folder / "deepmath"
        self.done = self.folder / "done.json"
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)

    def run(self, name: str, *words: str, module: str = "qrl") -> None:
        """Run a command unless it was done, and print its seconds; leave if it fails."""
        finished = json.loads(self.done.read_text()) if self.done.is_file() else {}
        if name not in finished:
            began = time.monotonic()
            with open(self.folder / "logs" / f"{name}.log", "w") as log:
                command = [sys.executable, "-m", module, *words]
                how = {"cwd": self.folder, "env": self.environment(), "stdout": log, "stderr": log}
                code = subprocess.run(command, **how, check=False).returncode
            if code:
                sys.exit(f"{name} ended with {code}: see {log.name}")
            finished[name] = time.monotonic() - began
            self.done.write_text(json.dumps(finished))
        print(f"{name}: {finished[name]:.0f} s", flush=True)

    def environment(self) -> dict[str, str]:
        return os.environ | {"MLFLOW_TRACKING_URI": self.store, "PYTHONPATH": export.with_checkout()}

    def newest(self, step: str):
        """Return the newest run of a step that made something."""
        from mlflow import MlflowClient

        query = f"{export.FINISHED} and tags.`{names.TAG_STEP}` = '{step}' and tags.`{names.TAG_CACHE_KEY}` != ''"
        return MlflowClient(self.store).search_runs(
            ["0"], query, max_results=1, order_by=["attributes.start_time DESC"]
        )[0]

    def serve(self) -> None:
        """Serve stage awq, ask it once, and end it."""
        words = ["serve", "--model", str(self.model), "--stage", "awq", "--port", str(PORT)]
        words += [] if self.size == "check" else ["--evaluate.kv_cache_gib", "8"]
        words += ["--evaluate.tensor_parallel", "2"] if self.size == "32b" else []
        began, at = time.monotonic(), f"http://127.0.0.1:{PORT}"
        with open(self.folder / "logs" / "serve.log", "w") as log:
            how = {"cwd": self.folder, "env": self.environment(), "stdout": log, "stderr": log}
            server = subprocess.Popen([sys.executable, "-m", "qrl", *words], **how)
            try:
                while not _answers(f"{at}/health") and server.poll() is None and time.monotonic() - began < READY_S:
                    time.sleep(1)
                print(f"serve: ready after {time.monotonic() - began:.0f} s", flush=True)
                with urllib.request.urlopen(f"{at}/v1/models") as listed:
                    model = json.load(listed)["data"][0]["id"]
                body = {"model": model, "messages": [{"role": "user", "content": "What is 1 + 1?"}], "max_tokens": 16}
                asked = urllib.request.Request(
                    f"{at}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
                )
                with urllib.request.urlopen(asked) as answer:
                    print(f"serve: {json.load(answer)['usage']}", flush=True)
            finally:
                began = time.monotonic()
                server.send_signal(signal.SIGTERM)
                print(f"serve: ended with {server.wait(60)} after {time.monotonic() - began:.1f} s", flush=True)


def _answers(url: str) -> bool:
    try:
        return urllib.request.urlopen(url, timeout=2).status == 200
    except OSError:
        return False


def train(work: Work, own: list[str]) -> str:
    """Train an adapter, merge it, print what both took, and return the address of the merged model."""
    work.run("train", "train", *own)
    trained = work.newest("train")
    memory, step = trained.data.metrics.get("train/peak_memory_gib", 0), trained.data.metrics["step/seconds"]
    print(f"train: {memory:.1f} GiB at the peak, {step:.0f} s in all", flush=True)
    adapter = f"runs:/{trained.info.run_id}/adapter"
    work.run("merge", "merge", *own, "--merge.max_kl", "1", "--adapter", adapter)
    merged = work.newest("merge")
    print(f"merge: KL {merged.data.metrics['merge/kl']:.2g} nats per token", flush=True)
    return export.address(work.store, merged)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("work", type=Path, help="folder for model, store and logs")
    parser.add_argument("--steps", default="2", help="optimizer steps of the training")
    parser.add_argument(
        "--untrained", action="store_true", help="leave training and merging out: the base is quantized"
    )
    parser.add_argument("--size", choices=("8b", "32b"), default="8b", help="32b is only for --untrained")
    parser.add_argument("--check", action="store_true", help="two layers on a CPU, stored by awq-ct")
    given = parser.parse_args()
    size = "check" if given.check else given.size
    if size not in TRAINED and not given.untrained:
        parser.error(f"--size {size} is not trained: add --untrained")
    work, scheme = Work(given.work, size), SCHEMES[size]
    words = ("--type", "qwen3", "--form", "math", "--thinking", "--steps", "0", "--heldout", "2")
    work.run("make", "--out", str(work.model), *words, *SHAPES[size].split(), module="qrl.tiny.make")
    work.run("data", "--as", "deepmath", "--out", str(work.data), module="qrl.tasks.write")
    own = ["--recipe", RECIPES[size], "--task", "deepmath", "--model", str(work.model), "--data", str(work.data)]
    own += ["--train.max_ngram_share", "1", "--train.steps", given.steps]
    full = {"base": str(work.model)}
    if not given.untrained:
        full["grpo"] = train(work, [*own, *TRAINED[size].split()])
    variant, source = list(full.items())[-1]
    quantized = ["--scheme", scheme, "--models", f"{variant}={source}", *QUANTIZED[size].split()]
    work.run("quantize", "quantize", *own, *quantized)
    stored = reuse.outputs(work.newest("quantize")).models["model"]
    cells = ",".join([*(f"{each}:full={address}" for each, address in full.items()), f"{variant}:{scheme}={stored}"])
    work.run("evaluate", "evaluate", *own, "--cells", cells, *ANSWERED[size].split(), *ADMITTED.split())
    runs = {key[2:]: run.info.run_id for key, run in export.cells(work.store).items()}
    chosen = ["--stage", "base,awq", "--cell", f"{runs['base', 'full']},{runs[variant, scheme]}"]
    chosen += ["--promote.stages", f"base=base:full,awq={variant}:{scheme}"]
    work.run("promote", "promote", *chosen, "--promote.min_gain", "-1", "--promote.max_loss", "1")
    work.serve()


if __name__ == "__main__":
    main()
