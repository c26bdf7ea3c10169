"""How fast weights are measured, and in how much memory.

    python tests/benchmarks/diagnose.py                        # Qwen2.5-0.5B's shape, against the seed study's approach
    python tests/benchmarks/diagnose.py --memory DIR           # peak memory at Qwen3-8B's shape; writes 16.4 GB to DIR
    python tests/benchmarks/diagnose.py --read DIR --device cuda   # time over that of reading the file, on a GPU

The checkpoints are random: what is measured does not depend on what the weights say.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

ROUNDS = 3
SHAPES = {
    "Qwen2.5-0.5B": {"vocab": 151936, "hidden": 896, "mlp": 4864, "layers": 24, "heads": 14, "kv_heads": 2, "head": 64, "tied": True},
    "Qwen3-8B": {"vocab": 151936, "hidden": 4096, "mlp": 12288, "layers": 36, "heads": 32, "kv_heads": 8, "head": 128, "tied": False},
}


def make(folder: Path, name: str, seed: int = 0) -> Path:
    """A random bf16 checkpoint of this shape, a shard for every few layers; the values of a layer are those of the first, shifted."""
    import torch
    from safetensors.torch import save_file

    shape = SHAPES[name]
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randn(1 << 24, generator=generator).mul_(0.02).bfloat16()
    pool[:: 1 << 20] *= 20  # outliers, as real weights have

    def matrix(rows: int, columns: int, at: int) -> torch.Tensor:
        whole = pool.roll(at).repeat(-(-rows * columns // pool.numel()))
        return whole[: rows * columns].view(rows, columns).clone()

    def shard(number: int, tensors: dict) -> None:
        file = f"model-{number:05}.safetensors"
        save_file(tensors, folder / file, {"format": "pt"})
        index.update(dict.fromkeys(tensors, file))

    folder.mkdir(parents=True, exist_ok=True)
    h, wide, narrow, index = shape["hidden"], shape["heads"] * shape["head"], shape["kv_heads"] * shape["head"], {}
    sizes = {"self_attn.q_proj": (wide, h), "self_attn.k_proj": (narrow, h), "self_attn.v_proj": (narrow, h), "self_attn.o_proj": (h, wide),
             "mlp.gate_proj": (shape["mlp"], h), "mlp.up_proj": (shape["mlp"], h), "mlp.down_proj": (h, shape["mlp"])}  # fmt: skip
    for layer in range(shape["layers"]):
        tensors = {f"model.layers.{layer}.{part}.weight": matrix(*size, 997 * layer + i) for i, (part, size) in enumerate(sizes.items())}
        tensors |= {f"model.layers.{layer}.{norm}_layernorm.weight": torch.ones(h).bfloat16() for norm in ("input", "post_attention")}
        if name.startswith("Qwen2"):
            biases = (("q", wide), ("k", narrow), ("v", narrow))
            tensors |= {f"model.layers.{layer}.self_attn.{part}_proj.bias": torch.zeros(size).bfloat16() for part, size in biases}
        shard(layer, tensors)
    tables = {"model.embed_tokens.weight": matrix(shape["vocab"], h, 1), "model.norm.weight": torch.ones(h).bfloat16()}
    shard(shape["layers"], tables)
    if not shape["tied"]:
        shard(shape["layers"] + 1, {"lm_head.weight": matrix(shape["vocab"], h, 2)})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": h, "intermediate_size": shape["mlp"],
        "num_hidden_layers": shape["layers"], "num_attention_heads": shape["heads"], "num_key_value_heads": shape["kv_heads"],
        "vocab_size": shape["vocab"], "tie_word_embeddings": shape["tied"], "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def seeds_way(folder: Path) -> dict[str, dict[str, float]]:
    """The seed study's approach: the whole model through transformers, then a pass over each matrix for each statistic."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    found = {}
    for name, parameter in [*model.named_parameters(), ("lm_head.weight", model.lm_head.weight)]:
        if parameter.ndim == 2 and "embed_tokens" not in name:
            with torch.no_grad():
                found[name] = one_statistic_a_pass(parameter.detach().float())
    return found


def one_statistic_a_pass(w) -> dict[str, float]:
    """The measures as their definitions read, in torch's float32."""
    import torch

    size = w.abs()
    median, peaks = size.flatten().median(), size.amax(1)
    padded = torch.nn.functional.pad(w, (0, -w.shape[1] % 128)).view(w.shape[0], -1, 128)
    scale = padded.abs().amax(-1, keepdim=True) / 7
    lossy = torch.round(padded / scale.clamp(min=1e-12)).clamp(-7, 7) * scale
    error = lossy.flatten(1)[:, : w.shape[1]] - w
    relative = (error.square().mean() / w.square().mean()).item()
    return {
        "max_abs": size.max().item(),
        "mean_abs": size.mean().item(),
        "median_abs": median.item(),
        "std": w.std(unbiased=False).item(),
        "rms": w.square().mean().sqrt().item(),
        "kurtosis": ((w - w.mean()).pow(4).mean() / w.var(unbiased=False) ** 2).item(),
        "abs_outlier_frac": (size > 6 * median).float().mean().item(),
        "channel_outlier_frac": (peaks > 6 * peaks.median()).float().mean().item(),
        "w4_relative_mse": relative,
        "w4_snr_db": -10 * torch.log10(torch.tensor(relative)).item(),
        "w4_max_error": error.abs().max().item(),
    }


def against_the_seed() -> None:
    """Both in turn on the same checkpoint, read once before, so that neither waits for the disk."""
    import torch

    from qrl.diagnose import weights

    with tempfile.TemporaryDirectory() as temporary:
        folder = make(Path(temporary), "Qwen2.5-0.5B")
        rows, found = [], {}
        for i in range(ROUNDS + 1):
            began = time.perf_counter()
            found["seed"] = seeds_way(folder)
            middle = time.perf_counter()
            found["ours"] = weights.measure(folder, "base").set_index("tensor")
            if i:  # the first one warms up
                rows.append((middle - began, time.perf_counter() - middle))
    theirs, ours = zip(*rows, strict=True)
    numel = int(found["ours"]["numel"].sum())
    worst = max(abs(found["ours"].loc[name, key] / value - 1) for name, row in found["seed"].items() for key, value in row.items() if value)
    print(
        f"Qwen2.5-0.5B's shape, {numel:,} weights in {len(found['ours'])} matrices, bf16, {torch.get_num_threads()} threads: "
        f"the seed's approach {statistics.median(theirs):.2f} s, ours {statistics.median(ours):.2f} s (medians of {ROUNDS}); "
        f"ratio {statistics.median(a / b for a, b in rows):.1f} ({min(a / b for a, b in rows):.1f} to {max(a / b for a, b in rows):.1f}); "
        f"largest relative difference of a measure {worst:.1e}"
    )


def memory(folder: Path, device: str) -> None:
    """Peak of a process of its own that measures the larger shape, and the movement from it to itself."""
    made = folder / "qrl-8b-shape"
    if not (made / "config.json").is_file():
        make(made, "Qwen3-8B")
    size = sum(file.stat().st_size for file in made.iterdir())
    print(f"Qwen3-8B's shape: {size / 1e9:.1f} GB in {made}; delete it when you are done")
    subprocess.run([sys.executable, __file__, "--read", str(made), "--device", device], check=True)


def read(folder: Path, device: str) -> None:
    """Time of measuring over that of reading the files' bytes once, and the peak of this process."""
    from qrl.diagnose import weights

    def plain() -> float:
        began, buffer = time.perf_counter(), bytearray(1 << 24)
        for file in sorted(folder.glob("*.safetensors")):
            with open(file, "rb", buffering=0) as stream:
                while stream.readinto(buffer):
                    pass
        return time.perf_counter() - began

    plain()
    reading = plain()
    began = time.perf_counter()
    found = weights.measure(folder, "base", embeddings=True, device=device)
    took = time.perf_counter() - began
    peak = int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 2**20  # getrusage's counts the parent's, too
    print(
        f"{folder.name} on {device}: {found['numel'].sum():,} weights in {took:.2f} s; reading the files takes {reading:.2f} s, ratio {took / reading:.1f}; "
        f"peak memory of the process {peak:.2f} GiB"
    )


if __name__ == "__main__":
    from qrl import process

    process.settle()
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory", type=Path)
    parser.add_argument("--read", type=Path)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    given = parser.parse_args()
    if given.memory:
        memory(given.memory, given.device)
    elif given.read:
        read(given.read, given.device)
    else:
        against_the_seed()
    if not given.memory:
        print(f"machine: {platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}")
