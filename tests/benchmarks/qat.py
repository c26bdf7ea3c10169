"""What quantization-aware training costs: each format's step against the step without, and the fold against a plain copy.

    python tests/benchmarks/qat.py                       # one GPU, Qwen2.5-1.5B's shape, random weights python
    tests/benchmarks/qat.py --formats int4,fp8    # some formats; the step without is measured beside each python
    tests/benchmarks/qat.py --rows 32 --steps 7   # four times as many tokens a step python tests/benchmarks/qat.py
    --profile             # and a step's operations by their time python tests/benchmarks/qat.py --thin --formats int4 #
    what the host does for a forward and a backward: as deep, but narrow, on a CPU python tests/benchmarks/qat.py
    --small               # two layers on whatever there is, to see that it runs

A step is forward, backward and fused AdamW over fp32 masters with bf16 compute (fp32 on a CPU), then one fold. The fold
reads W and writes Q(W); its rate counts those bytes alone, and a copy of the same bytes from the one dtype to the other
is the measure. The whole fold is held against the eager one, bit for bit, at these shapes, and every kernel's first
result is anyway. Limits of the issue: 1.25 times the step's seconds, 1.15 times its peak memory.
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

from qrl.formats.fakequant import fused, values
from qrl.formats.fakequant import linears as fake_linears
from qrl.train.qat import calibration
from qrl.train.qat import linear as qat

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
HEAD = (
    "format",
    "none s",
    "step s",
    "ratio",
    "its 95 %",
    "none GiB",
    "peak GiB",
    "ratio",
    "fold ms",
    "eager ms",
    "fold GB/s",
    "copy GB/s",
    "attach s",
    "equal",
)
WIDTHS = (14, 8, 8, 6, 14, 8, 8, 6, 8, 8, 9, 9, 8, 10)


def main() -> None:
    """Prints a row a format."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--thin", action="store_true")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--formats", default=",".join(values.FORMATS))
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
    print(" ".join(f"{head:>{width}}" for head, width in zip(HEAD, WIDTHS, strict=True)))
    found, plain = {}, Arm("none", shape, device, given.rows, given.tokens)
    for name in given.formats.split(","):
        arm = Arm(name, shape, device, given.rows, given.tokens)
        rounds = _in_turns(plain.step, arm.step, device, given.steps)
        seconds, (low, high) = _medians(rounds), _interval(rounds)
        row = found[name] = {"none": seconds[0], "step": seconds[1], "low": low, "high": high, "rounds": rounds}
        row |= {"none_peak": plain.peak, "peak": arm.peak, "attach": arm.attach}
        row |= _fold(arm.model, arm.compute, device)
        cells = (name, f"{seconds[0]:.4f}", f"{seconds[1]:.4f}", f"{seconds[1] / seconds[0]:.3f}", f"[{low:.3f}, {high:.3f}]", f"{plain.peak:.2f}",
                 f"{arm.peak:.2f}", f"{arm.peak / plain.peak:.3f}" if plain.peak else "-", f"{1e3 * row['fold']:.2f}", f"{1e3 * row['eager']:.1f}",
                 f"{row['fold_rate']:.0f}", f"{row['copy_rate']:.0f}", f"{arm.attach:.0f}", str(row["alike"]))  # fmt: skip
        print(" ".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True)), flush=True)
        if given.json:
            given.json.write_text(json.dumps(found, indent=1))
        arm.free()
    if given.profile:  # last, for what watches a card slows every launch after it
        _profile("none", plain.step, device)
        for name in given.formats.split(","):
            arm = Arm(name, shape, device, given.rows, given.tokens)
            _profile(name, arm.step, device)
            arm.free()


def _thin(formats: list[str], steps: int) -> None:
    """Prints seconds of a forward and a backward in bf16, where next to nothing is multiplied: the host's part of a step on a GPU, the fold apart."""
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
    """A model with its optimizer, a step of it, and the most memory that a step takes beside what lay there before."""

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
                calibration.calibrate(self.model, [self.batch])
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
    """Seconds of two steps, round by round, taken in turns, for a host has its moods and steps of this size wait for it."""
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
    """95 % interval of the second's median over the first's, by a percentile bootstrap over rounds."""
    draw = random.Random(0)
    ratios = sorted(other / one for one, other in (_medians(draw.choices(rounds, k=len(rounds))) for _ in range(2000)))
    return ratios[49], ratios[1949]


def _profile(name: str, step, device: str) -> None:
    """Prints a step's operations, by their time on the host and on the card, and the wall time of the profiled step."""
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
