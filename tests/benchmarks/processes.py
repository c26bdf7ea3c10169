"""One training on two GPUs, through the same entry point: DDP and FSDP, held-out accuracy before and after.

    python tests/benchmarks/processes.py --out FOLDER [CASE ...]

Each case is `qrl train` on the built-in model under a launcher, in a store of its own, 12 steps of 32 × 8 completions
with a probe every 6; then the model that it logged answers 2,000 held-out questions beside the base, paired. Cases run
side by side, so their seconds mean nothing. Memory of a larger model a GPU: `accelerate launch …
--fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP tests/benchmarks/rollouts.py --one update "1.5b full"`.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "qrl"]
ACCELERATE = ["-m", "accelerate.commands.launch", "--num_processes", "2", "--num_machines", "1", "--dynamo_backend", "no", "--mixed_precision", "no"]  # fmt: skip
DDP, FSDP = [*ACCELERATE, "--multi_gpu"], [*ACCELERATE, "--use_fsdp"]
LAYERS = [
    *FSDP,
    "--fsdp_auto_wrap_policy",
    "TRANSFORMER_BASED_WRAP",
]  # else the whole model is one part, gathered at once
LORA = ["--train.method", "lora", "--train.learning_rate", "1e-3", "--train.beta", "0.01"]
CASES = {
    "one GPU, full": (["-m", "qrl"], []),
    "DDP by torchrun, full": (TORCHRUN, []),
    "DDP by accelerate, lora": (DDP, [*LORA, "--train.dtype", "bf16"]),
    "DDP by accelerate, qlora": (DDP, ["--train.method", "qlora", *LORA[2:]]),
    "FSDP by accelerate, full": (FSDP, []),
    "FSDP by accelerate, full in bf16 with a reference": (FSDP, ["--train.dtype", "bf16", "--train.beta", "0.01"]),
    "FSDP by accelerate, layer by layer, full in bf16 with a reference": (
        LAYERS,
        ["--train.dtype", "bf16", "--train.beta", "0.01"],
    ),
    "FSDP by accelerate, lora": (FSDP, [*LORA, "--train.dtype", "bf16"]),
    "FSDP by accelerate, lora, 8 steps": (
        FSDP,
        [*LORA, "--train.dtype", "bf16", "--train.steps", "8", "--train.save_every", "2"],
    ),
    "FSDP by accelerate, lora, killed and run again": (
        FSDP,
        [*LORA, "--train.dtype", "bf16", "--train.steps", "8", "--train.save_every", "2"],
    ),
    "FSDP 2 by accelerate, full": ([*FSDP, "--fsdp_version", "2"], []),
    "FSDP by accelerate, qlora (refused)": (FSDP, ["--train.method", "qlora"]),
}
SMALL = ["--train.steps", "2", "--train.prompts_per_step", "4", "--train.micro_batch", "8", "--watch.probe_n", "9"]


def launched(name: str, port: int, out: Path, small: bool) -> dict:
    """Trains a case; what its run says, and where its weights lie."""
    launcher, more = CASES[name]
    if "accelerate.commands.launch" in launcher:
        launcher = [*launcher, "--main_process_port", str(port), "-m", "qrl"]
    folder = out / name.replace(" ", "-").replace(",", "")
    folder.mkdir(parents=True)
    words = ["train", "--device", "cpu" if small else "cuda", "--train.steps", "12", "--train.prompts_per_step", "32", "--train.micro_batch", "128", "--watch.probe_every", "6", "--watch.probe_n", "301"]  # fmt: skip
    variables = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db"}  # fmt: skip
    command = [sys.executable, *launcher, *words, *(SMALL if small else []), *more]
    if "killed" in name:
        kill(command, folder, variables)
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    (folder / "log.txt").write_text(done.stdout + done.stderr)
    found = {
        "case": name,
        "exit": done.returncode,
        "resumed": [line for line in done.stderr.splitlines() if line.startswith("Went on")],
    }
    if done.returncode:
        return found | {
            "said": [line for line in done.stderr.splitlines() if line.startswith("qrl:") or "Error" in line][-3:]
        }
    return found | recorded(folder)


def kill(command: list[str], folder: Path, variables: dict[str, str]) -> None:
    """Starts a training and kills all its processes at the second checkpoint that it begins to write."""
    import psutil

    with open(folder / "killed.txt", "w") as log:
        running = psutil.Popen(command, cwd=folder, env=variables, stdout=log, stderr=log)
        while running.poll() is None and len(list(folder.rglob("checkpoint-*"))) < 2:
            time.sleep(0.05)
        for each in (running, *running.children(recursive=True)):
            each.kill()
        running.wait()


def recorded(folder: Path) -> dict:
    """What the first process logged, and the weights that it left."""
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db")
    run = client.search_runs(["0"])[0]  # the newest; a killed one lies before it
    of = {name: [point.value for point in client.get_metric_history(run.info.run_id, name)] for name in ("probe/accuracy", "train/reward", "train/peak_memory_gib")}  # fmt: skip
    adapter = Path(run.info.artifact_uri.removeprefix("file://")) / "adapter"
    if adapter.is_dir():
        weights = adapter
    else:
        made = client.get_logged_model(run.outputs.model_outputs[0].model_id)
        weights = next(Path(made.artifact_location.removeprefix("file://")).rglob("model.safetensors")).parent
    seconds = run.data.metrics["train/seconds"]
    found = {
        "processes": run.data.params["processes"],
        "runs": len(client.search_runs(["0"])),
        "probe": of["probe/accuracy"],
        "seconds": seconds,
    }
    return found | {
        "reward": [of["train/reward"][0], of["train/reward"][-1]],
        "peak_gib": max(of["train/peak_memory_gib"]),
        "weights": str(weights),
    }


def gains(rows: list[dict], n: int) -> None:
    """Adds each case's held-out accuracy and its paired gain over the base, 95 % interval."""
    import torch
    from transformers import AutoModelForCausalLM

    from qrl import stats, tasks, tiny
    from qrl.engine import hf
    from qrl.tasks import prompt
    from qrl.train import policy

    device = "cuda" if torch.cuda.is_available() else "cpu"
    questions = tasks.load("arithmetic", "heldout", n, 0)
    tokens = hf.tokenizer(tiny.PATH)
    asked = [prompt.render(tokens, question.question, "plain") for question in questions]

    def right(model) -> list[int]:
        said = hf.generate(model, tokens, asked, max_new_tokens=96, batch_size=500)
        return [
            int(verdict.strict)
            for verdict in tasks.grade_many("arithmetic", [each.text for each in said], [q.answer for q in questions])
        ]

    def model_of(weights: Path):
        if not (weights / "adapter_config.json").is_file():
            return hf.load(weights, device, torch.float32)[0]
        from peft import PeftModel

        storage = policy.recorded(weights)["base_storage"]
        given = (
            {"quantization_config": policy.quantization(storage, torch.float32), "device_map": {"": device}}
            if storage in policy.PACKED
            else {}
        )
        base = AutoModelForCausalLM.from_pretrained(tiny.PATH, dtype=torch.float32, **given).to(device)
        base.generation_config = hf.load(tiny.PATH, device, torch.float32)[0].generation_config
        return PeftModel.from_pretrained(base, weights).eval()

    before = right(hf.load(tiny.PATH, device, torch.float32)[0])
    for row in (row for row in rows if "weights" in row):
        after = right(model_of(Path(row["weights"])))
        gain = stats.contrast([after, before], (1, -1))
        row |= {
            "n": n,
            "base": sum(before) / n,
            "trained": sum(after) / n,
            "gain": gain.estimate,
            "low": gain.low,
            "high": gain.high,
        }


def compare(rows: list[dict]) -> None:
    """Adds to the killed training how far its adapter is from the undisturbed one's, as a share of that one's size."""
    from safetensors.torch import load_file

    where = {row["case"]: Path(row["weights"], "adapter_model.safetensors") for row in rows if "weights" in row}
    pair = [where.get(f"FSDP by accelerate, lora, {which}") for which in ("8 steps", "killed and run again")]
    if not all(pair):
        return
    one, other = map(load_file, pair)
    apart = sum((one[name].double() - other[name].double()).square().sum() for name in one)
    size = sum(weight.double().square().sum() for weight in one.values())
    same = one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)
    row = next(row for row in rows if "killed" in row["case"])
    row |= {"tensors": len(one), "bit_for_bit": same, "difference": float((apart / size).sqrt())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES), help="; ".join(CASES))
    parser.add_argument("--out", type=Path, required=True, help="folder of processes.jsonl and of a store a case")
    parser.add_argument(
        "--small", action="store_true", help="two short steps on a CPU, to see that the commands are right"
    )
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(1 if given.small else len(given.cases)) as pool:
        rows = list(
            pool.map(
                lambda pair: launched(pair[1], 29600 + pair[0], given.out.resolve(), given.small),
                enumerate(given.cases),
            )
        )
    compare(rows)
    gains(rows, 40 if given.small else 2000)
    with open(given.out / "processes.jsonl", "a") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
