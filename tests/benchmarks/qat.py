"""What quantization-aware training costs: each format's step against the step without, and the fold against a plain copy.

    python tests/benchmarks/qat.py                       # one GPU, Qwen2.5-1.5B's shape, random weights
    python tests/benchmarks/qat.py --formats int4,fp8    # some formats; the step without is measured beside each
    python tests/benchmarks/qat.py --profile             # and a step's operations by their time
    python tests/benchmarks/qat.py --small               # two layers on whatever there is, to see that it runs

A step is forward, backward and fused AdamW over fp32 masters with bf16 compute (fp32 on a CPU), then one fold. The fold reads W
and writes Q(W); its rate counts those bytes alone, and a copy of the same bytes from the one dtype to the other is the measure.
The whole fold is held against the eager one, bit for bit, at these shapes, and every kernel's first result is anyway.
Limits of the issue: 1.25 times the step's seconds, 1.15 times its peak memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))

from qrl.formats import fake, fake_fused, fake_linears
from qrl.train import qat

LARGE = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2}
SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
STEPS, WARM_UP = 9, 3
HEAD = ("format", "none s", "step s", "ratio", "none GiB", "peak GiB", "ratio", "held GiB", "fold ms", "eager ms", "fold GB/s", "copy GB/s", "attach s", "equal")
WIDTHS = (14, 8, 8, 6, 8, 8, 6, 8, 8, 8, 9, 9, 8, 10)


def main() -> None:
    """Prints a row a format."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--formats", default=",".join(fake.FORMATS))
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = SMALL if given.small else LARGE
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}; {given.rows} × {given.tokens} tokens a step; medians of {STEPS}")
    print(" ".join(f"{head:>{width}}" for head, width in zip(HEAD, WIDTHS, strict=True)))
    found = {}
    for arm in given.formats.split(","):
        plain = found[f"{arm}: none"] = _measure("none", shape, device, given.rows, given.tokens)  # beside it, for a host has its moods
        row = found[arm] = _measure(arm, shape, device, given.rows, given.tokens)
        cells = (arm, f"{plain['step']:.4f}", f"{row['step']:.4f}", f"{row['step'] / plain['step']:.3f}", f"{plain['peak']:.2f}", f"{row['peak']:.2f}",
                 f"{row['peak'] / plain['peak']:.3f}" if plain["peak"] else "-", f"{row['held']:.2f}",
                 f"{1e3 * row['fold']:.2f}", f"{1e3 * row['eager']:.1f}", f"{row['fold_rate']:.0f}", f"{row['copy_rate']:.0f}",
                 f"{row['attach']:.0f}", str(row["alike"]))  # fmt: skip
        print(" ".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True)), flush=True)
        if given.json:
            given.json.write_text(json.dumps(found, indent=1))
    if given.profile:  # last, for what watches a card slows every launch after it
        for arm in ("none", *given.formats.split(",")):
            print(f"\n{arm}")
            _measure(arm, shape, device, given.rows, given.tokens, profile=True)


def _measure(arm: str, shape: dict, device: str, rows: int, tokens: int, *, profile: bool = False) -> dict[str, float | str]:
    torch.manual_seed(0)
    gc.collect()
    compute = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        model = Qwen2ForCausalLM(Qwen2Config(vocab_size=32000, tie_word_embeddings=True, **shape))
    model.gradient_checkpointing_enable()
    batch = {"input_ids": torch.randint(32000, (rows, tokens), device=device)}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    began = time.perf_counter()
    if arm != "none":
        qat.attach(model, arm, compute)
        if fake_linears.needs_calibration(arm):
            qat.calibrate(model, [batch])
    attach = time.perf_counter() - began
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=device == "cuda")

    def step() -> None:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            loss = model(**batch, labels=batch["input_ids"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        qat.refold(model)

    for _ in range(WARM_UP):
        step()
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated() / 2**30
        torch.cuda.reset_peak_memory_stats()
    seconds = _median(step, device)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    if profile:
        _profile(step, device)
        return {}
    return {"step": seconds, "peak": peak, "held": held if device == "cuda" else 0.0, "attach": attach} | _fold(model, compute, device)


def _profile(step, device: str) -> None:
    """Prints a step's operations, by their time on the host and on the card, and the wall time of the profiled step."""
    activities = [torch.profiler.ProfilerActivity.CPU] + ([torch.profiler.ProfilerActivity.CUDA] if device == "cuda" else [])
    with torch.profiler.profile(activities=activities) as seen:
        began = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    rows = seen.key_averages()
    on_card = sum(row.self_device_time_total for row in rows) / 1e6 if device == "cuda" else 0.0
    print(f"profiled step {seconds:.4f} s; on the card {on_card:.4f} s; launches {sum(row.count for row in rows if 'LaunchKernel' in row.key)}")
    for key in ("self_cpu_time_total", *(["self_device_time_total"] if device == "cuda" else [])):
        print(rows.table(sort_by=key, row_limit=25, max_name_column_width=60))


def _fold(model, compute: torch.dtype, device: str) -> dict[str, float | str]:
    """Seconds of a fold, compiled and eager, its bytes a second beside a copy's, whether the two are equal, and how many shapes are compiled."""
    folds, linears = qat.folds(model), [module for module in model.modules() if isinstance(module, qat.QATLinear)]
    if not folds:
        return {"fold": 0.0, "eager": 0.0, "fold_rate": 0.0, "copy_rate": 0.0, "alike": ""}
    bytes_moved = sum(each.weight.numel() for each in linears) * (4 + compute.itemsize)

    def eager() -> bool:
        alike = True
        for fold in folds:
            weights = [linear.weight for linear in fold.members.values()]
            with torch.no_grad():
                wanted, largest = fake.folded(weights, fold.scheme.weights, fold.dtype)
            alike &= torch.equal(largest, fold.largest)
            alike &= all(torch.equal(a, fold.weight_of(linear)) for a, linear in zip(wanted, fold.members.values(), strict=True))
        return alike

    kernels = [good for key, good in fake_fused._proven.items() if key[0] in ("weights", "activations")]
    alike = f"{eager()}, {sum(kernels)}/{len(kernels)}"
    fake_fused._proven.clear()
    slow, fold = _median(eager, device, 3), _median(lambda: qat.refold(model), device)
    targets = [torch.empty_like(each.weight, dtype=compute) for each in linears]
    copy = _median(lambda: [target.copy_(each.weight.detach()) for target, each in zip(targets, linears, strict=True)], device)
    return {"fold": fold, "eager": slow, "fold_rate": bytes_moved / fold / 1e9, "copy_rate": bytes_moved / copy / 1e9, "alike": alike}


def _median(work, device: str, steps: int = STEPS) -> float:
    """Seconds of a piece of work, the median of several, after a warm-up."""
    taken = []
    with torch.enable_grad():
        for _ in range(WARM_UP + steps):
            began = time.perf_counter()
            work()
            if device == "cuda":
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - began)
    return statistics.median(taken[WARM_UP:])


if __name__ == "__main__":
    main()
