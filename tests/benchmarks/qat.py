"""What quantization-aware training costs: each format's step against the step without, and the fold against a plain copy.

    python tests/benchmarks/qat.py            # one GPU, Qwen2.5-1.5B's shape, random weights
    python tests/benchmarks/qat.py --small    # two layers on whatever there is, to see that it runs

A step is forward, backward and AdamW over fp32 masters with bf16 compute (fp32 on a CPU), then one fold. The fold reads W and
writes Q(W); its rate counts those bytes alone, and a copy of the same bytes from the one dtype to the other is the measure.
Limits of the issue: 1.25 times the step's seconds, 1.15 times its peak memory.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from qrl.formats import fake, fake_linears
from qrl.train import qat

LARGE = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2}
SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
STEPS, WARM_UP = 7, 2


def main() -> None:
    """Prints a row a format."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = SMALL if given.small else LARGE
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}; {given.rows} × {given.tokens} tokens a step; median of {STEPS}")
    print(f"{'format':<16}{'step s':>9}{'ratio':>7}{'peak GiB':>10}{'ratio':>7}{'fold ms':>9}{'fold GB/s':>11}{'copy GB/s':>11}")
    plain = None
    for arm in ("none", *fake.FORMATS):
        row = _measure(arm, shape, device, given.rows, given.tokens)
        plain = plain or row
        print(
            f"{arm:<16}{row['step']:>9.3f}{row['step'] / plain['step']:>7.2f}{row['peak']:>10.2f}"
            f"{row['peak'] / plain['peak'] if plain['peak'] else float('nan'):>7.2f}"
            f"{1e3 * row['fold']:>9.1f}{row['fold_rate']:>11.1f}{row['copy_rate']:>11.1f}",
            flush=True,
        )


def _measure(arm: str, shape: dict, device: str, rows: int, tokens: int) -> dict[str, float]:
    torch.manual_seed(0)
    compute = torch.bfloat16 if device == "cuda" else torch.float32
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=32000, tie_word_embeddings=True, **shape)).to(device)
    model.gradient_checkpointing_enable()
    batch = {"input_ids": torch.randint(32000, (rows, tokens), device=device)}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    if arm != "none":
        qat.attach(model, arm, compute)
        if fake_linears.needs_calibration(arm):
            qat.calibrate(model, [batch])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()

    def step() -> None:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            loss = model(**batch, labels=batch["input_ids"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        qat.refold(model)

    seconds = _median(step, device)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    linears = [module for module in model.modules() if isinstance(module, qat.QATLinear)]
    moved = sum(each.weight.numel() for each in linears) * (4 + compute.itemsize)
    fold = _median(lambda: qat.refold(model), device) if linears else 0.0
    targets = [torch.empty_like(each.weight, dtype=compute) for each in linears]
    copy = _median(lambda: [target.copy_(each.weight) for target, each in zip(targets, linears, strict=True)], device) if linears else 0.0
    return {
        "step": seconds,
        "peak": peak,
        "fold": fold,
        "fold_rate": moved / fold / 1e9 if fold else 0.0,
        "copy_rate": moved / copy / 1e9 if copy else 0.0,
    }


def _median(work, device: str) -> float:
    """Seconds of a piece of work, the median of several, after a warm-up."""
    taken = []
    with torch.enable_grad():
        for _ in range(WARM_UP + STEPS):
            began = time.perf_counter()
            work()
            if device == "cuda":
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - began)
    return statistics.median(taken[WARM_UP:])


if __name__ == "__main__":
    main()
