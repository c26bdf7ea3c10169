"""Measure the cost of quantization-aware training: each format's step beside the plain step, the fold beside a copy.

    python tests/benchmarks/qat.py                        # one GPU, Qwen2.5-1.5B's shape, random weights
    python tests/benchmarks/qat.py --formats int4,fp8     # some formats, each beside the plain step
    python tests/benchmarks/qat.py --rows 32 --steps 7    # four times as many tokens per step
    python tests/benchmarks/qat.py --profile              # also a step's operations by their time
    python tests/benchmarks/qat.py --thin --formats int4  # the host's part: as deep, but narrow, on a CPU
    python tests/benchmarks/qat.py --small                # two layers on any machine, to check that it runs

A step is forward, backward and fused AdamW over fp32 masters with bf16 compute (fp32 on a CPU), then one fold. The fold
reads W and writes Q(W); its rate counts those bytes alone, and is compared with a copy of the same bytes between the
two dtypes. At these shapes the whole fold is compared with the eager one, bit for bit; so is every kernel's first
result. Limits: 1.25 times the plain step's seconds, 1.15 times its peak memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))

from qrl import names
from qrl.formats.fakequant import fused
from qrl.formats.fakequant import linears as fake_linears
from qrl.formats.fakequant import rounding as values
from qrl.train.qat import linear as qat
from qrl.train.qat import prepare

LARGE = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
}
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
THIN = LARGE | {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2}
STEPS, WARM_UP = 15, 3
COLUMNS = {  # heading → width
    "format": 14, "none s": 8, "step s": 8, "ratio": 6, "its 95 %": 14, "none GiB": 8, "peak GiB": 8, "ratio ": 6,
    "fold ms": 8, "eager ms": 8, "fold GB/s": 9, "copy GB/s": 9, "attach s": 8, "equal": 10,
}  # fmt: skip


def main() -> None:
    """Print a row per format."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--thin", action="store_true")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--formats", default=",".join(names.FORMATS))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.thin:
        _thin(given.formats.split(","), given.steps)
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = SMALL if given.small else LARGE
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(
        f"{name}, torch {torch.__version__}; {given.rows} × {given.tokens} tokens a step; medians of {given.steps}, in "
        "turns with the step without"
    )
    print(" ".join(f"{head.strip():>{width}}" for head, width in COLUMNS.items()))
    rows, plain = {}, Arm("none", shape, device, given.rows, given.tokens)
    for name in given.formats.split(","):
        arm = Arm(name, shape, device, given.rows, given.tokens)
        rounds = _in_turns(plain.step, arm.step, device, given.steps)
        seconds, (low, high) = _medians(rounds), _interval(rounds)
        row = rows[name] = {"none": seconds[0], "step": seconds[1], "low": low, "high": high, "rounds": rounds}
        row |= {"none_peak": plain.peak, "peak": arm.peak, "attach": arm.attach}
        row |= _fold(arm.model, arm.compute, device)
        cells = (
            name,
            f"{seconds[0]:.4f}",
            f"{seconds[1]:.4f}",
            f"{seconds[1] / seconds[0]:.3f}",
            f"[{low:.3f}, {high:.3f}]",
            f"{plain.peak:.2f}",
            f"{arm.peak:.2f}",
            f"{arm.peak / plain.peak:.3f}" if plain.peak else "-",
            f"{1e3 * row['fold']:.2f}",
            f"{1e3 * row['eager']:.1f}",
            f"{row['fold_rate']:.0f}",
            f"{row['copy_rate']:.0f}",
            f"{arm.attach:.0f}",
            str(row["alike"]),
        )
        print(" ".join(f"{cell:>{width}}" for cell, width in zip(cells, COLUMNS.values(), strict=True)), flush=True)
        if given.json:
            given.json.write_text(json.dumps(rows, indent=1))
        arm.free()
    if given.profile:  # last: profiling slows every launch after it
        _profile("none", plain.step, device)
        for name in given.formats.split(","):
            arm = Arm(name, shape, device, given.rows, given.tokens)
            _profile(name, arm.step, device)
            arm.free()


def _thin(formats: list[str], steps: int) -> None:
    """Print the seconds of a tiny forward and backward pass in bf16: the host's part of a step, without the fold."""
    plain = Arm("none", THIN, "cpu", 1, 8, compute=torch.bfloat16)
    for name in formats:
        arm = Arm(name, THIN, "cpu", 1, 8, compute=torch.bfloat16)
        rounds = _in_turns(lambda: plain.loss().backward(), lambda arm=arm: arm.loss().backward(), "cpu", steps)
        (without, seconds), (low, high) = _medians(rounds), _interval(rounds)
        print(
            f"{name:>14} {without:.4f} s without, {seconds:.4f} s, ratio {seconds / without:.3f} [{low:.3f}, "
            f"{high:.3f}]",
            flush=True,
        )


class Arm:
    """A model with its optimizer, its step, and the peak memory of a step beyond what was allocated before."""

    def __init__(
        self, name: str, shape: dict, device: str, rows: int, tokens: int, compute: torch.dtype | None = None
    ) -> None:
        gc.collect()
        torch.manual_seed(0)
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        self.device, self.compute = device, compute or (torch.bfloat16 if device == "cuda" else torch.float32)
        with torch.device(device):
            self.model = Qwen2ForCausalLM(Qwen2Config(vocab_size=32000, tie_word_embeddings=True, **shape))
        self.model.gradient_checkpointing_enable()
        self.batch = {"input_ids": torch.randint(32000, (rows, tokens), device=device)}
        self.batch["attention_mask"] = torch.ones_like(self.batch["input_ids"])
        began = time.perf_counter()
        if name != "none":
            qat.attach(self.model, name, self.compute)
            if fake_linears.needs_calibration(name):
                prepare.calibrate(self.model, [self.batch])
        self.attach = time.perf_counter() - began
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=device == "cuda")
        for _ in range(WARM_UP):
            self.step()
        self.peak = 0.0
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.step()
            self.peak = (torch.cuda.max_memory_allocated() - before) / 2**30

    def loss(self) -> torch.Tensor:
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.compute == torch.bfloat16):
            return self.model(**self.batch, labels=self.batch["input_ids"]).loss

    def step(self) -> None:
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        qat.refold(self.model)

    def free(self) -> None:
        del self.model, self.optimizer, self.batch
        gc.collect()


def _in_turns(one, other, device: str, steps: int) -> list[tuple[float, float]]:
    """Return the seconds of two steps per round, run in turn, since the host's load changes over time."""
    rounds = []
    for _ in range(steps):
        seconds = []
        for work in (one, other):
            began = time.perf_counter()
            work()
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        rounds.append(tuple(seconds))
    return rounds


def _medians(rounds: list[tuple[float, float]]) -> tuple[float, float]:
    return tuple(statistics.median(seconds) for seconds in zip(*rounds, strict=True))


def _interval(rounds: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the 95 % interval of the second's median over the first's, by a percentile bootstrap over rounds."""
    draw = random.Random(0)
    ratios = sorted(other / one for one, other in (_medians(draw.choices(rounds, k=len(rounds))) for _ in range(2000)))
    return ratios[49], ratios[1949]


def _profile(name: str, step, device: str) -> None:
    """Print a step's operations by their time on the host and on the card, and the wall time of the profiled step."""
    activities = [torch.profiler.ProfilerActivity.CPU] + (
        [torch.profiler.ProfilerActivity.CUDA] if device == "cuda" else []
    )
    with torch.profiler.profile(activities=activities) as seen:
        began = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    rows = seen.key_averages()
    kernels = [row for row in rows if device == "cuda" and row.device_type == torch.autograd.DeviceType.CUDA]
    on_card = sum(row.self_device_time_total for row in kernels) / 1e6
    print(
        f"\n{name}: profiled step {seconds:.4f} s; on the card {on_card:.4f} s; launches "
        f"{sum(row.count for row in rows if 'LaunchKernel' in row.key)}"
    )
    for key in ("self_cpu_time_total", *(["self_device_time_total"] if device == "cuda" else [])):
        print(rows.table(sort_by=key, row_limit=25, max_name_column_width=60))


def _fold(model, compute: torch.dtype, device: str) -> dict[str, float | str]:
    """Return a fold's seconds, compiled and eager, its rate beside a copy's, and which kernels equal the eager one."""
    folds, linears = qat.folds(model), [module for module in model.modules() if isinstance(module, qat.QATLinear)]
    if not folds:
        return {"fold": 0.0, "eager": 0.0, "fold_rate": 0.0, "copy_rate": 0.0, "alike": ""}
    bytes_moved = sum(each.weight.numel() for each in linears) * (4 + compute.itemsize)

    def eager() -> bool:
        alike = True
        for fold in folds:
            weights = [linear.weight for linear in fold.members.values()]
            with torch.no_grad():
                wanted, largest = values.folded(weights, fold.scheme.weights, fold.dtype)
            alike &= torch.equal(largest, fold.largest)
            alike &= all(
                torch.equal(a, fold.weight_of(linear)) for a, linear in zip(wanted, fold.members.values(), strict=True)
            )
        return alike

    kernels = [good for key, good in fused._proven.items() if key[0] in ("weights", "activations")]
    alike = f"{eager()}, {sum(kernels)}/{len(kernels)}"
    fused._proven.clear()
    slow, fold = _median(eager, device, 3), _median(lambda: qat.refold(model), device)
    targets = [torch.empty_like(each.weight, dtype=compute) for each in linears]
    copy = _median(
        lambda: [target.copy_(each.weight.detach()) for target, each in zip(targets, linears, strict=True)], device
    )
    return {
        "fold": fold,
        "eager": slow,
        "fold_rate": bytes_moved / fold / 1e9,
        "copy_rate": bytes_moved / copy / 1e9,
        "alike": alike,
    }


def _median(work, device: str, steps: int = STEPS) -> float:
    """Return the median seconds of some work, after a warm-up."""
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
