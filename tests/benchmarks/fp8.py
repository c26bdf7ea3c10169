"""Measure FP8 rollouts at 8 B: whole rollouts with the sync before them, and the kernels of a decoding step.

    python tests/benchmarks/fp8.py bf16 fp8 "fp8 kv8" --out FOLDER  # a process per case, in sequence
    python tests/benchmarks/fp8.py bf16 fp8 --beside --repeats 4 --rounds 8x2048,32x2048 \\
        --share 0.3 --kv-gib 20 --out FOLDER

A case is `bf16` or `fp8` for the engine's linears, with `kv8` for keys and values in FP8, beside a trainer with LoRA
over bf16 that sends its weights before every rollout. A round is completions × tokens. A point is completions × cached
tokens of each: 1,144 is the mean of a rollout of 2,048 tokens after a prompt of 120. With `--beside` all cases share
one card and run each round in turn; the printed ratios then compare pairs of rounds with the first case. The time of a
step there is the difference between a long and a short answer to the same prompts, cached by then. Weights are random:
their time is the real model's, their log-probabilities are not.

`bare bf16` and `bare fp8` measure points of an engine as vLLM makes it by itself, in its own process.
"""

import argparse
import contextlib
import functools
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import rollouts as shapes
import turns

SHORT, LONG = 8, 40  # tokens of the two answers
PROFILED = 8  # steps
CACHED = 1144  # tokens, at a point
LENGTH = 4096  # longest prompt and completion together
KINDS = {  # of kernels, by what their names contain; the first that fits
    "attention": ("flash", "fmha", "attn", "attention"),
    "sampling and log-probabilities": ("gumbel", "log_softmax", "ranks_kernel", "temperature", "argmax", "topk"),
    "linears": ("gemm", "nvjet", "cutlass", "cublas", "splitk", "scaled_mm"),
    "norms, activations, rounding": (
        "triton_",
        "rms_norm",
        "silu",
        "rotary",
        "scaled_fp8",
        "quant",
        "reshape_and_cache",
    ),
    "copies": ("memcpy", "memset", "copy"),
}


def trainer_of(words: list[str], shape: str, sequences: int, share: float, work: Path):
    """Return a trainer with LoRA over bf16 beside its engine, as `train` makes them."""
    stored = {"quantization": "fp8"} if "fp8" in words else {}
    stored |= {"kv_cache": "fp8"} if "kv8" in words else {}
    rollout = shapes.VLLM | dict(gpu_memory_utilization=share, max_model_tokens=LENGTH, sleep="off") | stored
    batch = dict(method="lora", dtype="bf16", steps=1, prompts_per_step=sequences // 8, generations=8, micro_batch=8)
    return shapes.trainer_of(dict(shape=shape, train=shapes.ADAPTER | batch, rollout=rollout), work)[0]


def bare(words: list[str], shape: str, sequences: int):
    """Return an engine as vLLM makes it by itself, without a trainer beside it."""
    from vllm import LLM

    from qrl.train.rollout import vllm_engine

    stored = {"quantization": vllm_engine.FP8} if "fp8" in words else {}
    return LLM(
        model=str(shapes.checkpoint_of(shape)),
        dtype="bfloat16",
        gpu_memory_utilization=0.85,
        max_model_len=LENGTH,
        max_num_seqs=sequences,
        kv_cache_dtype="fp8" if "kv8" in words else "auto",
        **stored,
    )


def capture_few(sizes: list[int], kv_gib: float | None) -> None:
    """Capture CUDA graphs for the measured batches only, unless the engine chooses them: it starts 30 s faster.

    `kv_gib` fixes the size of the KV cache, which another process on the card would otherwise change.
    """
    import vllm

    cache = {} if kv_gib is None else {"kv_cache_memory_bytes": int(kv_gib * 2**30)}
    vllm.LLM = functools.partial(vllm.LLM, compilation_config={"cudagraph_capture_sizes": sizes}, **cache)


def round_of(made, count: int, tokens: int) -> dict:
    """Return the seconds of a rollout and of its sync, and the gap to the trainer over 16 of its completions."""
    import torch

    from qrl.train.rollout import engine_gap, vllm_engine

    own = made.vllm_generation
    ids = made.processing_class("Tom has 3 apples and buys 12 more. " * 6)["input_ids"]
    own.speed()
    own.sync_weights()
    sync, began = own.seconds["sync"], shapes.finished()
    more = {"ignore_eos": True}
    completions, logprobs = vllm_engine.generate(own.llm, [ids] * count, temperature=1.0, max_tokens=tokens, more=more)
    generate = shapes.finished() - began
    rows = torch.tensor([ids + row for row in completions[:16]], device=made.accelerator.device)
    mask = torch.ones_like(rows)
    with torch.no_grad():
        scored, _, _ = made._get_per_token_logps_and_entropies(made.model, rows, mask, tokens, batch_size=2)
    engine = torch.tensor(logprobs[:16], device=rows.device)
    gap = engine_gap.measure(scored, engine, torch.ones_like(engine))
    total = sync + generate
    rates = {"completions_per_s": count / total, "tokens_per_s": sum(map(len, completions)) / total}
    return {"sync_s": sync, "generate_s": generate} | rates | vars(gap)


def sampling(tokens: int, logprobs: bool):
    from vllm import SamplingParams

    more = {"logprobs": 0, "flat_logprobs": True} if logprobs else {}
    return SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False, **more)


def step_ms(engine, prompts: list[dict], logprobs: bool, repeats: int = 2) -> list[float]:
    """Return the milliseconds of one decoding step, `repeats` times."""
    steps = []
    for _ in range(repeats):
        seconds = []
        for tokens in (SHORT, LONG):
            began = shapes.finished()
            engine.generate(prompts, sampling_params=sampling(tokens, logprobs), use_tqdm=False)
            seconds.append(shapes.finished() - began)
        steps.append((seconds[1] - seconds[0]) / (LONG - SHORT) * 1000)
    return steps


def profile(engine, prompts: list[dict]) -> dict:
    """Return GPU ms per step by kind of kernel, and the slowest kernels: (name, calls per step, ms per step)."""
    import torch
    from torch.profiler import ProfilerActivity

    gpu, inner, answers = torch.cuda.is_available(), engine.llm_engine, sampling(100, True)
    for number, prompt in enumerate(prompts):
        inner.add_request(str(number), prompt, answers)
    for _ in range(30):  # prompts, from the cache, and some steps of the whole batch
        inner.step()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as seen:
        began = shapes.finished()
        for _ in range(PROFILED):
            inner.step()
        wall = (shapes.finished() - began) / PROFILED * 1000
    inner.abort_request([str(number) for number in range(len(prompts))])
    while inner.has_unfinished_requests():
        inner.step()
    kinds, names = defaultdict(float), []
    for event in seen.key_averages():
        ms = (event.self_device_time_total if gpu else event.self_cpu_time_total) / 1000 / PROFILED
        if ms <= 0:
            continue
        lower = event.key.lower()
        kinds[next((kind for kind, parts in KINDS.items() if any(part in lower for part in parts)), "other")] += ms
        names.append((event.key[:160], event.count / PROFILED, round(ms, 4)))
    names.sort(key=lambda row: -row[2])
    return {"wall_ms_profiled": wall, "gpu_ms": sum(kinds.values()), "kinds_ms": dict(kinds), "kernels": names[:25]}


def points_of(engine, counts: list[int], cached: int, profiled: list[int], report) -> None:
    """Measure steps of each count of completions, with and without log-probabilities, and profile some of them."""
    draw = random.Random(0)
    prompts = [{"prompt_token_ids": [draw.randrange(3, 384) for _ in range(cached)]} for _ in range(max(counts))]
    engine.generate(prompts, sampling_params=sampling(2, False), use_tqdm=False)  # into the cache
    for count in counts:
        batch = prompts[:count]
        steps = {"step_ms": step_ms(engine, batch, True), "step_ms_without_logprobs": step_ms(engine, batch, False)}
        report({"point": f"{count}x{cached}"} | steps)
        if count in profiled:
            report({"profile": f"{count}x{cached}"} | profile(engine, batch))


def measure(case: str, given) -> None:
    """Measure one case, and write a line after each measurement."""
    words, began = case.split(), time.perf_counter()
    rounds = [tuple(map(int, shape.split("x"))) for shape in given.rounds.split(",")]
    counts = [int(count) for count in given.points.split(",")]
    sizes = sorted({*counts, *(count for count, _ in rounds)})
    capture_few(sizes, given.kv_gib)

    def report(row: dict) -> None:
        row = {
            "case": case,
            "shape": given.shape,
            **row,
            "since_start_s": time.perf_counter() - began,
        } | shapes.versions()
        with open(given.out / "fp8.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps({key: value for key, value in row.items() if key != "kernels"}), flush=True)

    profiled = [int(count) for count in given.profiled.split(",")]
    if "bare" in words:
        points_of(bare(words, given.shape, max(sizes)), counts, given.cached, [], report)
        return
    turn = turns.Turn(*map(int, given.turn.split(","))) if given.turn else contextlib.nullcontext()
    with tempfile.TemporaryDirectory() as work:
        made = trainer_of(words, given.shape, max(sizes), given.share, Path(work))
        for count, _ in rounds:
            round_of(made, count, 4)  # kernels are compiled at their first use
        for number in range(given.repeats):
            for count, tokens in rounds:
                with turn:
                    report({"round": f"{count}x{tokens}", "repeat": number} | round_of(made, count, tokens))
        with turn:
            points_of(made.vllm_generation.llm, counts, given.cached, profiled, report)


def ratios(file: Path, first: str) -> None:
    """Print each case's completions per second over the first one's, per round, with an interval over repeats."""
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    rates = defaultdict(dict)
    for row in (row for row in rows if "repeat" in row):
        rates[row["round"], row["case"]][row["repeat"]] = row["completions_per_s"]
    for (which, case), own in rates.items():
        base = rates.get((which, first), {})
        both = sorted(own.keys() & base.keys())
        if case != first and both:
            interval = turns.ratio([[own[number]] for number in both], [[base[number]] for number in both])
            every = [own[number] / base[number] for number in both]
            row = {"round": which, "case": case, "over": first, **interval, "each": every}
            print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("cases", nargs="+", help="bf16 or fp8, with kv8, with bare")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of fp8.jsonl")
    parser.add_argument("--shape", default="8b", choices=list(shapes.SHAPES))
    parser.add_argument("--rounds", default="512x256,128x2048", help="completions x tokens, each with a sync")
    parser.add_argument("--points", default="8,64,128,192", help="completions at a time")
    parser.add_argument("--cached", type=int, default=CACHED, help="tokens in the cache of each, at a point")
    parser.add_argument("--profiled", default="64,192", help="points whose kernels are counted")
    parser.add_argument("--share", type=float, default=0.75, help="of the GPU's memory, for the engine")
    parser.add_argument("--beside", action="store_true", help="all cases on one card at once, in turns")
    parser.add_argument("--repeats", type=int, default=1, help="of all rounds")
    parser.add_argument("--kv-gib", type=float, help="of an engine's keys and values; else what its share leaves")
    parser.add_argument("--turn", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if len(given.cases) == 1:
        measure(given.cases[0], given)
        return
    options = [word for word in sys.argv[1:] if word not in given.cases]
    commands = [[sys.executable, __file__, case, *options] for case in given.cases]
    if given.beside:
        turns.run(
            [lambda turn, command=command: [*command, "--turn", f"{turn.take},{turn.give}"] for command in commands]
        )
    else:
        for command in commands:  # an engine's memory comes back only with its process
            subprocess.run(command, check=False)
    ratios(given.out / "fp8.jsonl", given.cases[0])


if __name__ == "__main__":
    main()
