"""Compare a training that was killed with SIGKILL and run again with two undisturbed ones; on a GPU by default.

    python tests/benchmarks/interrupted.py full lora qlora "qlora vllm" --out FOLDER

Two undisturbed trainings show how far the device repeats itself; the killed one has to be as near to the first as
the second is. The difference is ‖A − B‖ / ‖A − start‖ over the trained weights: its share of the whole update. The kill
comes at a random moment. Methods run side by side.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

BATCH = dict(steps=8, prompts_per_step=16, generations=8, micro_batch=64, max_completion_tokens=80, save_every=2)
ADAPTER = BATCH | dict(learning_rate=1e-3, dtype="bf16", lora_rank=8)
METHODS = {
    "full": BATCH | dict(learning_rate=3e-5),
    "lora": ADAPTER | dict(method="lora"),
    "qlora": ADAPTER | dict(method="qlora", beta=0.01),
    "qad": BATCH | dict(learning_rate=3e-5, qat="int4", teacher="qrl-tiny"),  # from itself, into rounded weights
}
WHOLE = ("full", "qad")  # methods that train all weights
VLLM = dict(engine="vllm", gpu_memory_utilization=0.05)
CHILD = """
import json, sys
from pathlib import Path
from qrl import process
process.prepare_process()
from qrl import tasks, tiny
from qrl.recipe import Rollout, Train
from qrl.train import Job, distill, grpo, loop

work, out, device, train, rollout = sys.argv[1:]
hashed, inner = [], loop.frozen_digest
loop.frozen_digest = lambda model: hashed.append(inner(model)) or hashed[-1]
log = lambda metrics, step: print("step", step, flush=True)
settings, rollout = Train.model_validate_json(train), Rollout.model_validate_json(rollout)
if rollout.engine == "vllm":
    import functools, vllm
    # Several start at once: memory that one of them measures as free, another one takes.
    vllm.LLM = functools.partial(vllm.LLM, kv_cache_memory_bytes=2**30)
if rollout.engine == "vllm" and device == "cpu":  # users may not, since it is slow; compiling would take longer still
    from qrl.train import rollout as sampling
    sampling.check, vllm.LLM = lambda *args: None, functools.partial(vllm.LLM, enforce_eager=True)
    import torch
    from vllm.model_executor.layers import utils
    # A CPU with AVX512 packs weights and drops them, so that no sync could replace them; a GPU does not.
    def keep_weight(layer, remove_weight):
        layer.cpu_linear = torch.nn.functional.linear
    utils.dispatch_cpu_unquantized_gemm = keep_weight
data = {"base": tiny.PATH, "questions": tasks.load("arithmetic", "train", 512, 0), "task": "arithmetic"}
where = {"device": device, "work": Path(work), "out": Path(out)}
teacher = tiny.PATH if settings.teacher else None
job = Job(settings=settings, teacher=teacher, template="plain", seed=0, rollout=rollout, log=log, **data, **where)
done = distill.run(job) if settings.teacher else grpo.run(job)
print("done", json.dumps({"resumed_from": done.resumed_from, "base_hashed": hashed}), flush=True)
"""


def start(folder: Path, name: str, device: str, log):
    """Start one training in its own process."""
    from qrl.recipe import Rollout, Train

    method, _, engine = name.partition(" ")
    train = Train(**METHODS[method])
    if device == "cpu":
        train = train.model_copy(update={"dtype": "fp32", "prompts_per_step": 4, "micro_batch": 32})
    rollout = Rollout(**VLLM, sleep="off") if engine else Rollout()
    settings = [train.model_dump_json(), rollout.model_dump_json()]
    words = [sys.executable, "-W", "ignore", "-c", CHILD, folder / "work", folder / "model", device, *settings]
    variables = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    return subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT)


def finish(running) -> dict:
    """Return the last line of a training that ran to its end."""
    output, _ = running.communicate(timeout=400)
    if running.returncode:
        raise SystemExit("A training failed: its error is in the method's .log. Rollouts by vLLM need projects/vllm.")
    return json.loads(next(line for line in output.splitlines() if line.startswith("done ")).removeprefix("done "))


def kill(running) -> dict:
    """Kill a training a random time after a random step, between its first checkpoint and its last."""
    chance = random.Random()
    step, wait = chance.randint(BATCH["save_every"] + 1, BATCH["steps"] - 2), chance.uniform(0, 0.3)
    for line in running.stdout:
        if line.strip() == f"step {step}":
            time.sleep(wait)
            running.send_signal(signal.SIGKILL)
            break
    running.communicate(timeout=60)
    return {"killed_after_step": step, "and_s": wait, "killed": running.returncode == -signal.SIGKILL}


def prompts(work: Path) -> dict[str, list[str]]:
    """Return questions and completions, by step."""
    import pandas as pd

    files = sorted((work / "completions").glob("*.parquet"))
    columns = ["prompt", "completion"]
    return {file.name: pd.read_parquet(file)[columns].astype(str).values.tolist() for file in files}


def compared(name: str, a: Path, b: Path) -> dict:
    """Return how two trainings differ: questions, answers and weights."""
    import torch
    from safetensors.torch import load_file

    from qrl import tiny

    file = "model.safetensors" if name in WHOLE else "adapter_model.safetensors"
    last = f"checkpoint-{BATCH['steps']}"  # holds the masters
    ours, theirs = (load_file(folder / "work" / last / file) for folder in (a, b))
    zero = load_file(tiny.PATH / file) if name in WHOLE else {}
    difference = sum((ours[key].double() - theirs[key].double()).square().sum() for key in ours)
    update = sum((ours[key].double() - zero.get(key, torch.zeros(1)).double()).square().sum() for key in ours)
    first, second = prompts(a / "work"), prompts(b / "work")
    pairs = [pair for step in first for pair in zip(first[step], second.get(step, []), strict=True)]
    return {
        "bit_for_bit": all(ours[key].equal(theirs[key]) for key in ours),
        "difference_of_update": float((difference / update).sqrt()),
        "same_questions": first.keys() == second.keys() and all(mine[0] == other[0] for mine, other in pairs),
        "same_answers_share": sum(mine[1] == other[1] for mine, other in pairs) / len(pairs),
    }


def measure(name: str, device: str, out: Path) -> dict:
    from qrl import checkpoint, tiny

    before = checkpoint.digest(tiny.PATH)
    folders = {which: out / name.replace(" ", "-") / which for which in ("first", "second", "killed")}
    with open(out / f"{name.replace(' ', '-')}.log", "w") as log:
        running = {which: start(folder, name, device, log) for which, folder in folders.items()}
        row = {"case": name, "device": device, "steps": BATCH["steps"], **kill(running["killed"])}
        again = start(folders["killed"], name, device, log)
        ended = {which: finish(child) for which, child in {**running, "killed": again}.items()}
    row["resumed_from"] = ended["killed"]["resumed_from"]
    row["base_on_disk_same"] = checkpoint.digest(tiny.PATH) == before
    digests = [digest for result in ended.values() for digest in result["base_hashed"]]
    row["base_in_memory"] = f"{len(set(digests))} digest over {len(digests)} looks"
    method, first = name.split(maxsplit=1)[0], folders["first"]
    row["undisturbed"] = compared(method, first, folders["second"])
    row["resumed"] = compared(method, first, folders["killed"])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "cases", nargs="*", default=list(METHODS), help=f"of {', '.join(METHODS)}; with ' vllm' for its rollouts"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of interrupted.jsonl, logs and the trainings")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(len(given.cases)) as pool, open(given.out / "interrupted.jsonl", "a") as file:
        for row in pool.map(lambda name: measure(name, given.device, given.out), given.cases):
            file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
