"""Train on two and four GPUs of one machine beside one GPU: throughput, memory, and whether a second run is the same.

    python tests/benchmarks/parallel.py WORK                       # all cases, 30 minutes on two GPUs
    python tests/benchmarks/parallel.py WORK --cases one,ddp
    python tests/benchmarks/parallel.py WORK --check --cases one,ddp,again    # the built-in model on a CPU

A case is `python -m qrl train`: Qwen2.5-1.5B's shape with random weights, 64 questions × 8 completions of 256 tokens a
step, all weights trained, vLLM for rollouts. Prints completions per second of the median step, the first left out, the
ratio to the case with one GPU (goals: 1.85 on two, 3.5 on four), and the first process's peak memory. Output goes to
WORK/logs, figures to WORK/parallel.json; a second call does what is left.

one         one GPU
ddp         two processes share the step, each with an engine
double      the same with twice the questions: as much work for a GPU as with one
four        four processes share the step, and
quad        the same with four times the questions: only if named, for both need four GPUs
again       `ddp` once more under the same seed: which measures of each step are the same?
fsdp2       weights, gradients and optimizer states are divided
fsdp2-fp32  the same in fp32: only if named
server      two processes, and an engine behind a server on the second GPU
tensor      one process, and a server whose engine is divided over two further GPUs: only if named, for it needs three
qat, qat-ddp            quantization-aware training of nvfp4-a4
distil, distil-ddp      a distillation with a teacher of the same shape
distil-sharded          as distil-ddp, the teacher divided over both GPUs: only if named
distil-server           a small distillation on one GPU, its teacher behind a server on the second: only if named
qat-fsdp2, distil-fsdp2     the same as `fsdp2`
8b-fsdp2    Qwen3-8B's shape, all weights trained, as `fsdp2`: does it fit two GPUs?
8b-qat-fsdp2            the same with quantization-aware training of nvfp4-a4
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "answer"))

import export
import rollouts

from qrl import names, tiny
from qrl.engine import vllm_support

PAIR = ("--train.processes", "2", "--train.parallel")
DDP, FSDP2 = (*PAIR, "ddp"), (*PAIR, "fsdp2")
FOUR = ("--train.processes", "4", "--train.parallel", "ddp")
FP32 = ("--train.dtype", "fp32", "--train.micro_batch", "16")
QAT = ("--train.qat", "nvfp4-a4")
TEACHER = ("--train.teacher", "MODEL")
SMALL = ("--train.prompts_per_step", "8", "--train.micro_batch", "8")
URL = "http://127.0.0.1:8018"
SERVED = ("--rollout.mode", "server", "--rollout.server", URL)
CASES: dict[str, tuple[str, tuple[str, ...]]] = {  # name → the case that it is compared with, and its options
    "one": ("", ()),
    "ddp": ("one", DDP),
    "double": ("one", (*DDP, "--train.prompts_per_step", "128")),
    "four": ("one", FOUR),
    "quad": ("one", (*FOUR, "--train.prompts_per_step", "256")),
    "again": ("ddp", DDP),
    "fsdp2": ("one", FSDP2),
    "fsdp2-fp32": ("", (*FSDP2, *FP32)),
    "server": ("one", (*DDP, *SERVED)),
    "tensor": ("one", SERVED),
    "qat": ("one", QAT),
    "qat-ddp": ("qat", (*DDP, *QAT)),
    "distil": ("", TEACHER),
    "distil-ddp": ("distil", (*DDP, *TEACHER)),
    "distil-sharded": ("distil-ddp", (*DDP, *TEACHER, "--train.teacher_placement", "sharded")),
    "distil-server": ("", (*TEACHER, *SMALL, "--train.teacher_placement", "server", "--train.teacher_server", URL)),
    "qat-fsdp2": ("qat", (*FSDP2, *QAT)),
    "distil-fsdp2": ("distil", (*FSDP2, *TEACHER)),
    "8b-fsdp2": ("", (*FSDP2, *SMALL)),
    "8b-qat-fsdp2": ("8b-fsdp2", (*FSDP2, *QAT, *SMALL)),
}
NAMED = {"four", "quad", "tensor", "fsdp2-fp32", "distil-sharded", "distil-server"}
ALONE = {"one", "qat", "distil", "tensor", "distil-server"}  # that see the first GPU only
ROLLOUTS = ("--logprobs-mode", "processed_logprobs", "--weight-transfer-config", '{"backend": "nccl"}')
SERVERS = {  # the GPUs of a server, and its options, as the READMEs of rollouts and of teachers give them
    "server": ("1", ROLLOUTS),
    "tensor": ("1,2", (*ROLLOUTS, "--tensor-parallel-size", "2")),
    "distil-server": ("1", ("--max-logprobs", "64")),
}
SAME = ("reward", "completion_tokens", "loss", "grad_norm")  # by which two runs of a seed are compared
CACHE_GIB = 8  # of keys and values; with a fixed size an engine does not measure free memory, which other jobs change
USUAL = "--train.method full --train.dtype bf16 --train.gradient_checkpointing true --train.learning_rate 1e-6 "
USUAL += "--train.prompts_per_step 64 --train.generations 8 --train.micro_batch 64 --train.max_completion_tokens 256 "
USUAL += "--train.questions 256 --rollout.engine vllm "
COLOCATED = f"--rollout.kv_cache_gib {CACHE_GIB} --rollout.max_model_tokens 1024 --rollout.sleep off "
COLOCATED += "--rollout.compile false"
CHECK = "--device cpu --train.method full --train.prompts_per_step 2 --train.generations 4 --train.micro_batch 4 "
CHECK += "--train.questions 16 --train.max_completion_tokens 40"
READY_S = 240


def measure(name: str, work: Path, steps: int, *, check: bool) -> dict:
    """Train one case, and return its steps' metrics and the seconds that the command took."""
    from mlflow import MlflowClient

    store = f"sqlite:///{work}/{name}.db"
    model = str(tiny.PATH if check else rollouts.checkpoint_of("8b" if name.startswith("8b") else "1.5b"))
    own = [model if word == "MODEL" else word for word in CASES[name][1]]
    words = [
        "--task",
        "arithmetic",
        "--train.max_ngram_share",
        "1",
        *(CHECK if check else USUAL if "--rollout.mode" in own else USUAL + COLOCATED).split(),
        "--train.steps",
        str(steps),
        *own,
    ]
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    seen = {"CUDA_VISIBLE_DEVICES": first} if name in ALONE and not check else {}
    variables = os.environ | {"MLFLOW_TRACKING_URI": store, "PYTHONPATH": export.with_checkout(), "TQDM_DISABLE": "1"}
    began = time.monotonic()
    with open(work / "logs" / f"{name}.log", "w") as log, served(name, model, work, check=check):
        command = [sys.executable, "-m", "qrl", "train", "--model", model, *words]
        subprocess.run(command, cwd=work, env=variables | seen, stdout=log, stderr=log, check=True)
    client, took = MlflowClient(store), time.monotonic() - began
    run = client.search_runs(["0"], f"{export.FINISHED} and tags.`{names.TAG_STEP}` = 'train'")[0]
    wanted = [f"train/{key}" for key in ("completions_per_s", "peak_memory_gib", *SAME)]
    wanted += [f"rollout/{key}" for key in ("sync_s", "generate_s", "kl_k3", "token_ess")]
    history = {key.partition("/")[2]: client.get_metric_history(run.info.run_id, key) for key in wanted}
    return {"seconds": took} | {key: [each.value for each in values] for key, values in history.items() if values}


@contextlib.contextmanager
def served(name: str, model: str, work: Path, *, check: bool) -> Iterator[None]:
    """Run the server of a case: of rollouts, or of a teacher."""
    if name not in SERVERS or check:
        yield
        return
    where, more = SERVERS[name]
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--dtype", "bfloat16"]
    words += ["--port", URL.rpartition(":")[2], "--max-model-len", "1024"]
    sizes = vllm_support.memory_options(0, CACHE_GIB)
    words += [word for key, value in sizes.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    words += more
    with open(work / "logs" / f"{name}-server.log", "w") as log:
        variables = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "CUDA_VISIBLE_DEVICES": where}
        serving = subprocess.Popen(words, env=variables, stdout=log, stderr=log)
        with rollouts.ended(serving, URL, READY_S):
            yield


def told(name: str, found: dict[str, dict]) -> str:
    """Return a case's line of the table."""
    own, other = found[name], CASES[name][0]
    rate = {each: statistics.median(found[each]["completions_per_s"][1:]) for each in (name, other) if each in found}
    line = (
        f"{name}: {rate[name]:.1f} completions/s, {max(own['peak_memory_gib']):.1f} GiB, {own['seconds']:.0f} s in all"
    )
    line += f", {rate[name] / rate[other]:.2f} times {other}" if other in rate else ""
    if name == "again" and other in found:
        same = [key for key in SAME if key in own and own[key] == found[other][key]]
        line += f"; the same in each step: {', '.join(same) or 'nothing'}"
    return line


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the cases, write WORK/parallel.json, and return 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("work", type=Path, help="folder for stores, logs and figures")
    parser.add_argument("--cases", default=",".join(case for case in CASES if case not in NAMED))
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps; the first one warms up")
    parser.add_argument("--check", action="store_true", help="the built-in model on a CPU, without an engine")
    given = parser.parse_args(arguments)
    work, failed = given.work.resolve(), 0
    (work / "logs").mkdir(parents=True, exist_ok=True)
    done = work / "parallel.json"
    for name in given.cases.split(","):
        found = json.loads(done.read_text()) if done.is_file() else {}
        if name not in found:
            try:
                found[name] = measure(name, work, given.steps, check=given.check)
            except subprocess.CalledProcessError as error:
                print(f"{name} ended with {error.returncode}: see {work}/logs/{name}.log", flush=True)
                failed = 1
                continue
            done.write_text(json.dumps(found, indent=1) + "\n")
        print(told(name, found), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
