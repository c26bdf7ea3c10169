"""Where a decoding step of a rollout goes: bf16 against FP8, our engine against the bare one, kernel by kernel.

    python tests/benchmarks/decode.py "ours fp8" --out FOLDER [--shape 8b] [--points 64x1144,512x248]

A case is who makes the engine (`ours`, as training does, its weights sent once through `vllm_engine.load`; `bare`, as vLLM makes it
by itself, in a process of its own), `bf16` or `fp8` for its linears, and `kv8` for keys and values in FP8. A point is completions ×
tokens in the cache of each: the mean of a rollout of 2,048 tokens after a prompt of 120 is 1144, that of one of 256 is 248. A step's time
is the difference between a long and a short answer after the same prompts, which are cached by then; weights are random.
"""

import argparse
import json
import random
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import rollouts as shapes

SHORT, LONG = 16, 80  # tokens of the two answers
PROFILED = 8  # steps
KINDS = {  # of kernels, by what their names contain; the first that fits
    "attention": ("flash", "fmha", "attn", "attention"),
    "sampling and log-probabilities": ("gumbel", "log_softmax", "ranks_kernel", "temperature", "argmax", "topk"),
    "linears": ("gemm", "nvjet", "cutlass", "cublas", "splitk", "scaled_mm"),
    "norms, activations, rounding": ("triton_", "rms_norm", "silu", "rotary", "scaled_fp8", "quant", "reshape_and_cache"),
    "copies": ("memcpy", "memset", "copy"),
}


def engine_of(words: list[str], base: Path, sequences: int, tokens: int):
    """The engine of a case."""
    from qrl.train import vllm_engine

    fp8, kv_cache = "fp8" in words, "fp8" if "kv8" in words else "auto"
    if "bare" in words:
        from vllm import LLM

        stored = {"quantization": vllm_engine.FP8} if fp8 else {}
        return LLM(model=str(base), dtype="bfloat16", gpu_memory_utilization=0.85, max_model_len=tokens, max_num_seqs=sequences, kv_cache_dtype=kv_cache, **stored)  # fmt: skip
    given = {"sequences": sequences, "share": 0.85, "sleeps": False, "max_tokens": tokens, "rank": 0, "world": 1}
    made = vllm_engine.create(str(base), **given, fp8=fp8, kv_cache=kv_cache)
    vllm_engine.load(made, weights(base), fp8=fp8)
    return made


def weights(base: Path):
    """A checkpoint's tensors on the GPU, as training sends them."""
    from safetensors import safe_open

    for file in sorted(base.glob("*.safetensors")):
        with safe_open(file, "pt", device=shapes.device()) as stored:
            for name in stored.keys():  # noqa: SIM118, it is no dictionary
                yield name, stored.get_tensor(name)


def sampling(tokens: int, logprobs: bool):
    from vllm import SamplingParams

    more = {"logprobs": 0, "flat_logprobs": True} if logprobs else {}
    return SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False, **more)


def step_ms(engine, asked: list[dict], logprobs: bool, repeats: int = 3) -> list[float]:
    """Milliseconds of one decoding step, `repeats` times."""
    found = []
    for _ in range(repeats):
        took = []
        for tokens in (SHORT, LONG):
            began = shapes.finished()
            engine.generate(asked, sampling_params=sampling(tokens, logprobs), use_tqdm=False)
            took.append(shapes.finished() - began)
        found.append((took[1] - took[0]) / (LONG - SHORT) * 1000)
    return found


def profile(engine, asked: list[dict]) -> dict:
    """GPU milliseconds a step by kind of kernel, and the kernels that take most of it: (name, calls a step, ms a step)."""
    import torch
    from torch.profiler import ProfilerActivity

    inner, answers = engine.llm_engine, sampling(200, True)
    for number, prompt in enumerate(asked):
        inner.add_request(str(number), prompt, answers)
    for _ in range(40):  # prompts, from the cache, and some steps of the whole batch
        inner.step()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU]) as seen:
        began = shapes.finished()
        for _ in range(PROFILED):
            inner.step()
        wall = (shapes.finished() - began) / PROFILED * 1000
    inner.abort_request([str(number) for number in range(len(asked))])
    while inner.has_unfinished_requests():
        inner.step()
    kinds, names = defaultdict(float), []
    for event in seen.key_averages():
        took = event.self_device_time_total if torch.cuda.is_available() else event.self_cpu_time_total
        ms = took / 1000 / PROFILED
        if ms <= 0:
            continue
        lower = event.key.lower()
        kinds[next((kind for kind, parts in KINDS.items() if any(part in lower for part in parts)), "other")] += ms
        names.append((event.key[:160], event.count / PROFILED, round(ms, 4)))
    names.sort(key=lambda row: -row[2])
    return {"wall_ms_profiled": wall, "gpu_ms": sum(kinds.values()), "kinds_ms": dict(kinds), "kernels": names[:30]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("case", help="bare or ours, bf16 or fp8, and kv8")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of decode.jsonl")
    parser.add_argument("--shape", default="8b", choices=list(shapes.SHAPES))
    parser.add_argument("--points", default="8x1144,64x1144,128x1144,192x1144,512x248", help="completions x tokens in the cache of each")
    given = parser.parse_args()
    words, base = given.case.split(), shapes.checkpoint_of(given.shape)
    points = [tuple(map(int, point.split("x"))) for point in given.points.split(",")]
    engine = engine_of(words, base, max(count for count, _ in points), max(cached for _, cached in points) + 256)
    draw = random.Random(0)
    for count, cached in points:
        asked = [{"prompt_token_ids": [draw.randrange(3, 384) for _ in range(cached)]} for _ in range(count)]
        engine.generate(asked, sampling_params=sampling(2, False), use_tqdm=False)  # the prompts, into the cache
        found = {"case": given.case, "shape": given.shape, "completions": count, "cached": cached}
        found |= {"step_ms": step_ms(engine, asked, True), "step_ms_without_logprobs": step_ms(engine, asked, False)}
        if "ours" in words:
            found["profile"] = profile(engine, asked)
        with open(given.out / "decode.jsonl", "a") as file:
            file.write(json.dumps(found | shapes.versions()) + "\n")
        print(json.dumps({key: value for key, value in found.items() if key != "profile"}), flush=True)
        if "profile" in found:
            print(json.dumps({key: value for key, value in found["profile"].items() if key != "kernels"}), flush=True)


if __name__ == "__main__":
    main()
