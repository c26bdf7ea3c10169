"""Train on two GPUs through the usual entry point, with DDP and FSDP; measure held-out accuracy before and after.

    python tests/benchmarks/processes.py --out FOLDER [CASE ...]

Each case is `qrl train` on the built-in model under a launcher, in its own store, 12 steps of 32 × 8 completions with a
probe every 6. The logged model then answers 2,000 held-out questions, paired with the base. A case that is killed is
compared with the one that ran undisturbed. Cases run side by side, so their seconds mean nothing. For a larger model's
memory per GPU:

    accelerate launch … --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP \\
        tests/benchmarks/rollouts.py --one update "1.5b full"
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
ACCELERATE = ["-m", "accelerate.commands.launch", "--num_processes", "2", "--num_machines", "1"]
ACCELERATE += ["--dynamo_backend", "no", "--mixed_precision", "no"]
DDP, FSDP = [*ACCELERATE, "--multi_gpu"], [*ACCELERATE, "--use_fsdp"]
LAYERS = [*FSDP, "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"]  # else FSDP gathers the whole model at once
LORA = ["--train.method", "lora", "--train.learning_rate", "1e-3", "--train.beta", "0.01"]
LORA_BF16, REFERENCE = [*LORA, "--train.dtype", "bf16"], ["--train.dtype", "bf16", "--train.beta", "0.01"]
SAVED = ["--train.steps", "8", "--train.save_every", "2"]
OURS, PARALLEL = ["-m", "qrl"], ["--train.processes", "2", "--train.parallel"]
UNDISTURBED, KILLED = ", 8 steps", ", killed and run again"
RESUMED = {  # killed after a checkpoint, and undisturbed
    "FSDP by accelerate, lora": (FSDP, LORA_BF16),
    "ddp, nvfp4-a4": (OURS, [*PARALLEL, "ddp", "--train.qat", "nvfp4-a4"]),
    "fsdp2, full": (OURS, [*PARALLEL, "fsdp2"]),
    "fsdp2, nvfp4-a4": (OURS, [*PARALLEL, "fsdp2", "--train.qat", "nvfp4-a4"]),
}
CASES = {
    "one GPU, full": (["-m", "qrl"], []),
    "DDP by torchrun, full": (TORCHRUN, []),
    "DDP by accelerate, lora": (DDP, LORA_BF16),
    "DDP by accelerate, qlora": (DDP, ["--train.method", "qlora", *LORA[2:]]),
    "FSDP by accelerate, full": (FSDP, []),
    "FSDP by accelerate, full in bf16 with a reference": (FSDP, REFERENCE),
    "FSDP by accelerate, layer by layer, full in bf16 with a reference": (LAYERS, REFERENCE),
    "FSDP by accelerate, lora": (FSDP, LORA_BF16),
    "FSDP 2 by accelerate, full": ([*FSDP, "--fsdp_version", "2"], []),
    "FSDP by accelerate, qlora (refused)": (FSDP, ["--train.method", "qlora"]),
    **{
        f"{name}{end}": (how, [*more, *SAVED]) for name, (how, more) in RESUMED.items() for end in (UNDISTURBED, KILLED)
    },
}
SMALL = ["--train.steps", "2", "--train.prompts_per_step", "4", "--train.micro_batch", "8", "--watch.probe_n", "9"]


def launched(name: str, port: int, out: Path, small: bool) -> dict:
    """Train a case, and return what its run recorded and where its weights are."""
    launcher, more = CASES[name]
    if "accelerate.commands.launch" in launcher:
        launcher = [*launcher, "--main_process_port", str(port), "-m", "qrl"]
    folder = out / name.replace(" ", "-").replace(",", "")
    folder.mkdir(parents=True)
    words = ["train", "--device", "cpu" if small else "cuda", "--train.steps", "12", "--train.prompts_per_step", "32"]
    words += ["--train.micro_batch", "128", "--watch.probe_every", "6", "--watch.probe_n", "301"]
    variables = os.environ | {"MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db"}
    variables["PYTHONPATH"] = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    command = [sys.executable, *launcher, *words, *(SMALL if small else []), *more]
    if "killed" in name:
        kill(command, folder, variables)
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    (folder / "log.txt").write_text(done.stdout + done.stderr)
    lines = done.stderr.splitlines()
    row = {"case": name, "exit": done.returncode, "resumed": [line for line in lines if line.startswith("Resumed")]}
    if done.returncode:
        return row | {"errors": [line for line in lines if line.startswith("qrl:") or "Error" in line][-3:]}
    return row | recorded(folder)


def kill(command: list[str], folder: Path, variables: dict[str, str]) -> None:
    """Start a training, and kill all its processes when it begins to write its second checkpoint."""
    import psutil

    with open(folder / "killed.txt", "w") as log:
        running = psutil.Popen(command, cwd=folder, env=variables, stdout=log, stderr=log)
        while running.poll() is None and len(list(folder.rglob("checkpoint-*"))) < 2:
            time.sleep(0.05)
        for child in (running, *running.children(recursive=True)):
            child.kill()
        running.wait()


def recorded(folder: Path) -> dict:
    """Return what the first process logged, and the folder of its weights."""
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db")
    run = client.search_runs(["0"])[0]  # the newest; a killed one comes before it
    names = ("probe/accuracy", "train/reward", "train/peak_memory_gib")
    curves = {name: [point.value for point in client.get_metric_history(run.info.run_id, name)] for name in names}
    adapter = Path(run.info.artifact_uri.removeprefix("file://")) / "adapter"
    if adapter.is_dir():
        weights = adapter
    else:
        made = client.get_logged_model(run.outputs.model_outputs[0].model_id)
        weights = next(Path(made.artifact_location.removeprefix("file://")).rglob("model.safetensors")).parent
    return {
        "processes": run.data.params["processes"],
        "runs": len(client.search_runs(["0"])),
        "probe": curves["probe/accuracy"],
        "seconds": run.data.metrics["train/seconds"],
        "reward": [curves["train/reward"][0], curves["train/reward"][-1]],
        "peak_gib": max(curves["train/peak_memory_gib"]),
        "weights": str(weights),
    }


def gains(rows: list[dict], n: int) -> None:
    """Add each case's held-out accuracy, and its paired gain over the base with a 95 % interval."""
    import torch
    from transformers import AutoModelForCausalLM

    from qrl import stats, tasks, tiny
    from qrl.engine import hf, pretrained
    from qrl.tasks import prompt
    from qrl.train import policy

    device = "cuda" if torch.cuda.is_available() else "cpu"
    questions = tasks.load("arithmetic", "heldout", n, 0)
    tokens = hf.tokenizer(tiny.PATH)
    prompts = [prompt.render(tokens, question.question, "plain") for question in questions]
    gold = [question.answer for question in questions]

    def right(model) -> list[int]:
        answers = hf.generate(model, tokens, prompts, max_new_tokens=96, batch_size=500)
        verdicts = tasks.grade_many("arithmetic", [answer.text for answer in answers], gold)
        return [int(verdict.strict) for verdict in verdicts]

    def model_of(weights: Path):
        if not (weights / "adapter_config.json").is_file():
            return hf.load(weights, device, torch.float32)[0]
        from peft import PeftModel

        storage = policy.recorded(weights)["base_storage"]
        packed = {}
        if storage in policy.PACKED:
            packed = {
                "quantization_config": pretrained.bitsandbytes(storage, torch.float32),
                "device_map": {"": device},
            }
        base = AutoModelForCausalLM.from_pretrained(tiny.PATH, dtype=torch.float32, **packed).to(device)
        base.generation_config = hf.load(tiny.PATH, device, torch.float32)[0].generation_config
        return PeftModel.from_pretrained(base, weights).eval()

    before = right(hf.load(tiny.PATH, device, torch.float32)[0])
    for row in (row for row in rows if "weights" in row):
        after = right(model_of(Path(row["weights"])))
        gain = stats.contrast([after, before], (1, -1))
        row |= {"n": n, "base": sum(before) / n, "trained": sum(after) / n}
        row |= {"gain": gain.estimate, "low": gain.low, "high": gain.high}


def compare(rows: list[dict]) -> None:
    """Add to each killed training the distance of its weights to the undisturbed one's, as a share of their norm."""
    from safetensors.torch import load_file

    by_case = {row["case"]: row for row in rows if "weights" in row}
    for name in RESUMED:
        pair = [by_case.get(name + end) for end in (UNDISTURBED, KILLED)]
        if not all(pair):
            continue
        whole, killed = (load_file(next(Path(row["weights"]).glob("*model.safetensors"))) for row in pair)
        distance = sum((whole[key].double() - killed[key].double()).square().sum() for key in whole)
        size = sum(weight.double().square().sum() for weight in whole.values())
        same = whole.keys() == killed.keys() and all(whole[key].equal(killed[key]) for key in whole)
        pair[1] |= {"tensors": len(whole), "bit_for_bit": same, "difference": float((distance / size).sqrt())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES), help="; ".join(CASES))
    parser.add_argument("--out", type=Path, required=True, help="folder of processes.jsonl and of one store per case")
    parser.add_argument("--small", action="store_true", help="two short steps on a CPU, to check the commands")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    out, ports = given.out.resolve(), range(29600, 29600 + len(given.cases))
    with ThreadPoolExecutor(1 if given.small else len(given.cases)) as pool:
        rows = list(pool.map(lambda name, port: launched(name, port, out, given.small), given.cases, ports))
    compare(rows)
    gains(rows, 40 if given.small else 2000)
    with open(given.out / "processes.jsonl", "a") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
