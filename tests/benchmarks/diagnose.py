"""How fast weights are measured, and in how much memory.

    python tests/benchmarks/diagnose.py                        # Qwen2.5-0.5B's shape, against study 000's approach
    python tests/benchmarks/diagnose.py --memory DIR           # peak memory at Qwen3-8B's shape; writes 90 GB to DIR
    python tests/benchmarks/diagnose.py --make DIR             # a checkpoint of that shape, 16.4 GB, for:
    python tests/benchmarks/diagnose.py --read DIR --device cuda   # time over that of reading the file, on a GPU

The checkpoints are random: time and memory do not depend on the values of the weights.
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

ROUNDS = 5
MEASURES = ("scan", "movement", "ranks")
SMALL, LARGE = "Qwen2.5-0.5B", "Qwen3-8B"
SHAPES = {
    "dry-run": {
        "vocab": 3000,
        "hidden": 256,
        "mlp": 512,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head": 64,
        "tied": False,
    },
    "Qwen2.5-0.5B": {
        "vocab": 151936,
        "hidden": 896,
        "mlp": 4864,
        "layers": 24,
        "heads": 14,
        "kv_heads": 2,
        "head": 64,
        "tied": True,
    },
    "Qwen3-8B": {
        "vocab": 151936,
        "hidden": 4096,
        "mlp": 12288,
        "layers": 36,
        "heads": 32,
        "kv_heads": 8,
        "head": 128,
        "tied": False,
    },
}


def make(folder: Path, name: str, seed: int = 0) -> Path:
    """Write a random bf16 checkpoint of this shape in shards; a layer's values are those of the first, shifted."""
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
    sizes = {
        "self_attn.q_proj": (wide, h),
        "self_attn.k_proj": (narrow, h),
        "self_attn.v_proj": (narrow, h),
        "self_attn.o_proj": (h, wide),
        "mlp.gate_proj": (shape["mlp"], h),
        "mlp.up_proj": (shape["mlp"], h),
        "mlp.down_proj": (h, shape["mlp"]),
    }
    for layer in range(shape["layers"]):
        tensors = {
            f"model.layers.{layer}.{part}.weight": matrix(*size, 997 * layer + i)
            for i, (part, size) in enumerate(sizes.items())
        }
        tensors |= {
            f"model.layers.{layer}.{norm}_layernorm.weight": torch.ones(h).bfloat16()
            for norm in ("input", "post_attention")
        }
        if name.startswith("Qwen2"):
            biases = (("q", wide), ("k", narrow), ("v", narrow))
            tensors |= {
                f"model.layers.{layer}.self_attn.{part}_proj.bias": torch.zeros(size).bfloat16()
                for part, size in biases
            }
        shard(layer, tensors)
    tables = {"model.embed_tokens.weight": matrix(shape["vocab"], h, 1), "model.norm.weight": torch.ones(h).bfloat16()}
    shard(shape["layers"], tables)
    if not shape["tied"]:
        shard(shape["layers"] + 1, {"lm_head.weight": matrix(shape["vocab"], h, 2)})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": h,
        "intermediate_size": shape["mlp"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"],
        "vocab_size": shape["vocab"],
        "tie_word_embeddings": shape["tied"],
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def as_in_the_seed(folder: Path) -> dict[str, dict[str, float]]:
    """Measure as study 000 did: load the model with transformers, then pass over each matrix per statistic."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    rows = {}
    for name, parameter in [*model.named_parameters(), ("lm_head.weight", model.lm_head.weight)]:
        if parameter.ndim == 2 and "embed_tokens" not in name:
            with torch.no_grad():
                rows[name] = one_statistic_a_pass(parameter.detach().float())
    return rows


def one_statistic_a_pass(w) -> dict[str, float]:
    """Compute the statistics by their definitions, in torch's float32."""
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


def against_the_seed(shape: str, rounds: int) -> None:
    """Time both in turn on the same checkpoint, read once before, so that neither waits for the disk."""
    import torch

    from qrl.diagnose import weights

    with tempfile.TemporaryDirectory() as temporary:
        folder = make(Path(temporary), shape)
        times, results = [], {}
        for i in range(rounds + 1):
            began = time.perf_counter()
            results["seed"] = as_in_the_seed(folder)
            middle = time.perf_counter()
            results["ours"] = weights.measure(folder, "base").set_index("tensor")
            if i:  # the first one warms up
                times.append((middle - began, time.perf_counter() - middle))
    theirs, ours = zip(*times, strict=True)
    ratios = [a / b for a, b in times]
    numel = int(results["ours"]["numel"].sum())
    worst = max(
        abs(results["ours"].loc[name, key] / value - 1)
        for name, row in results["seed"].items()
        for key, value in row.items()
        if value
    )
    print(
        f"{shape}'s shape, {numel:,} weights in {len(results['ours'])} matrices, bf16, "
        f"{torch.get_num_threads()} threads: "
        f"the seed's approach {_spread(theirs)} s, ours {_spread(ours)} s (medians of {rounds}); "
        f"ratio {_spread(ratios, 1)}; largest relative difference of a measure {worst:.1e}"
    )


def _spread(values: list[float], digits: int = 2) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def memory(folder: Path, shape: str, device: str, wanted: list[str]) -> None:
    """Print peaks at the larger shape, each measure in a process of its own."""
    paths = [folder / f"qrl-{shape}-{i}" for i in range(2)]
    for i, path in enumerate(paths):
        if not (path / "config.json").is_file():
            make(path, shape, seed=i)
    size = sum(file.stat().st_size for file in paths[0].iterdir())
    print(
        f"{shape}'s shape: {size / 1e9:.1f} GB in {paths[0]}, as much in {paths[1]}; delete them when you are done",
        flush=True,
    )
    for what in (each for each in wanted if each not in STORED):
        _alone(what, paths, device)
    for scheme in (each for each in wanted if each in STORED):
        packed = [folder / f"qrl-{shape}-{i}-{scheme}" for i in range(2)]
        for path, full in zip(packed, paths, strict=True):
            if not (path / "config.json").is_file():
                store(full, path, scheme)
        _alone(scheme, [*paths, *packed], device)


def _alone(what: str, paths: list[Path], device: str) -> None:
    subprocess.run([sys.executable, __file__, "--peak", what, *map(str, paths), "--device", device], check=True)


def peak(what: str, paths: list[Path], device: str) -> None:
    """Run one measure; print its time and this process's peak memory."""
    from qrl.diagnose import movement, schemes, weights
    from qrl.recipe.sections import Diagnose

    began, base = time.perf_counter(), _peak_gib()
    if what == "scan":
        rows = weights.measure(paths[0], "base", Diagnose(embeddings=True), device=device)
    elif what in ("movement", "ranks"):
        rows = movement.movement(*paths, Diagnose(embeddings=True, effective_rank=what == "ranks"), device=device)
    else:
        rows = schemes.measure(
            dict(zip(("base", "grpo"), paths[:2], strict=True)),
            dict(zip(("base", "grpo"), paths[2:], strict=True)),
            what,
        )
    print(
        f"{what}: {len(rows)} rows, {rows['numel'].sum():,} weights in {time.perf_counter() - began:.1f} s; "
        f"peak memory of the process {_peak_gib():.2f} GiB, {base:.2f} of it before",
        flush=True,
    )


def _peak_gib() -> float:
    """Return this process's peak; getrusage includes its parent's."""
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 2**20


def store(full: Path, folder: Path, scheme: str) -> None:
    """Write a checkpoint in a scheme's layout and size; codes are random, and the same for matrices of one shape."""
    import torch
    from safetensors.torch import save_file

    from qrl import checkpoint

    folder.mkdir(parents=True, exist_ok=True)
    settings, make_parts = STORED[scheme]
    generator, made, index = torch.Generator().manual_seed(0), {}, {}
    shards: dict[str, dict] = {}
    for name, entry in checkpoint.entries(full).items():
        if "_proj.weight" in name:
            if entry.shape not in made:
                made[entry.shape] = make_parts(*entry.shape, generator)
            shards.setdefault(entry.file, {}).update(
                {name.removesuffix(".weight") + part: value.clone() for part, value in made[entry.shape].items()}
            )
        elif "norm" in name:
            shards.setdefault(entry.file, {})[name] = torch.ones(entry.shape).bfloat16()
    for file, tensors in shards.items():
        save_file(tensors, folder / file, {"format": "pt"})
        index.update(dict.fromkeys(tensors, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config = json.loads((full / "config.json").read_text()) | {"quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))


def _bytes(shape: tuple[int, ...], generator) -> object:
    import torch

    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def _nf4_parts(rows: int, columns: int, generator) -> dict:
    import torch

    blocks = rows * columns // 64
    state = {
        "quant_type": "nf4",
        "blocksize": 64,
        "dtype": "bfloat16",
        "shape": [rows, columns],
        "nested_blocksize": 256,
        "nested_dtype": "float32",
        "nested_offset": 0.05,
    }
    return {
        ".weight": _bytes((rows * columns // 2, 1), generator),
        ".weight.absmax": _bytes((blocks,), generator),
        ".weight.quant_map": torch.linspace(-1, 1, 16),
        ".weight.nested_absmax": torch.full((-(-blocks // 256),), 0.01),
        ".weight.nested_quant_map": torch.linspace(-1, 1, 256),
        ".weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }


def _int8_parts(rows: int, columns: int, generator) -> dict:
    import torch

    return {".weight": _bytes((rows, columns), generator).view(torch.int8), ".SCB": torch.full((rows,), 0.1)}


def _awq_parts(rows: int, columns: int, generator) -> dict:
    import torch

    words = {".qweight": (columns, rows // 2), ".qzeros": (columns // 128, rows // 2)}
    return {part: _bytes(shape, generator).view(torch.int32) for part, shape in words.items()} | {
        ".scales": torch.full((columns // 128, rows), 0.01).half()
    }


def _fp8_parts(rows: int, columns: int, generator) -> dict:
    import torch

    return {
        ".weight": torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn),
        ".weight_scale": torch.full((rows, 1), 0.01).bfloat16(),
    }


def _nvfp4_parts(rows: int, columns: int, generator) -> dict:
    import torch

    scales = torch.rand(rows, columns // 16, generator=generator).add_(1).to(torch.float8_e4m3fn)
    return {
        ".weight_packed": _bytes((rows, columns // 2), generator),
        ".weight_scale": scales,
        ".weight_global_scale": torch.tensor([100.0]),
    }


def _group(layout: str, **weights) -> dict:
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
        "format": layout,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


STORED = {
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, _nf4_parts),
    "int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, _int8_parts),
    "awq": ({"quant_method": "awq", "bits": 4, "version": "gemm", "group_size": 128}, _awq_parts),
    "fp8": (
        _group("float-quantized", num_bits=8, type="float", symmetric=True, strategy="channel", dynamic=False),
        _fp8_parts,
    ),
    "nvfp4a16": (
        _group(
            "nvfp4-pack-quantized",
            num_bits=4,
            type="float",
            symmetric=True,
            strategy="tensor_group",
            group_size=16,
            dynamic=False,
        ),
        _nvfp4_parts,
    ),
}


def read(folder: Path, device: str, rounds: int) -> None:
    """Compare the time of measuring with that of a plain read, and of a read by the same threads to the device."""
    from qrl.diagnose import weights
    from qrl.diagnose.sweep import sweep
    from qrl.recipe.sections import Diagnose

    class Nothing:
        """An accumulator that keeps nothing."""

        def add(self, block) -> None:
            """Do nothing: the rows have arrived when this is called."""

        def merge(self, other) -> None:
            """Do nothing."""

    def plain() -> None:
        buffer = bytearray(1 << 24)
        for file in sorted(folder.glob("*.safetensors")):
            with open(file, "rb", buffering=0) as stream:
                while stream.readinto(buffer):
                    pass

    def carried() -> None:
        for _ in sweep(
            weights.matrices(folder, True), lambda _: Nothing(), lambda to, _, block: to.add(block), device=device
        ):
            pass

    def measured() -> None:
        results["rows"] = weights.measure(folder, "base", Diagnose(embeddings=True), device=device)

    results: dict = {}
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    for cache in ("warm", "cold"):
        took = {each: [] for each in (plain, carried, measured)}
        for i in range(rounds + 1):
            for each, times in took.items():
                if cache == "cold":
                    _forget(folder)
                began = time.perf_counter()
                each()
                if i:  # the first one warms up
                    times.append(time.perf_counter() - began)
        against = {each: [a / b for a, b in zip(took[measured], took[each], strict=True)] for each in (plain, carried)}
        print(
            f"{folder.name} on {device}, page cache {cache}: {results['rows']['numel'].sum():,} weights, "
            f"{size / 1e9:.1f} GB; measured in {_spread(took[measured])} s; "
            f"a plain read into host memory {_spread(took[plain])} s, ratio {_spread(against[plain], 1)}; "
            f"a read to the {device} by the same threads {_spread(took[carried])} s, "
            f"ratio {_spread(against[carried], 1)} (medians of {rounds}); "
            f"peak memory of the process {_peak_gib():.2f} GiB",
            flush=True,
        )


def _forget(folder: Path) -> None:
    """Drop the files from the page cache, as far as the kernel does."""
    for file in folder.glob("*.safetensors"):
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


if __name__ == "__main__":
    from qrl import process

    process.prepare_process()
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory", type=Path)
    parser.add_argument("--read", type=Path)
    parser.add_argument(
        "--peak", nargs="+", metavar=("WHAT", "DIR"), help="one measure in this process; --memory calls it"
    )
    parser.add_argument("--make", type=Path, help="write a checkpoint of the shape there, for --read")
    parser.add_argument(
        "--only", nargs="+", default=[*MEASURES, *STORED], choices=[*MEASURES, *STORED], help="what --memory measures"
    )
    parser.add_argument("--layers", type=int, help="other than the shape's own")
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    if options.layers:
        SHAPES[options.shape or LARGE]["layers"] = options.layers
    if options.make:
        make(options.make, options.shape or LARGE)
    elif options.memory:
        memory(options.memory, options.shape or LARGE, options.device, options.only)
    elif options.peak:
        peak(options.peak[0], [Path(each) for each in options.peak[1:]], options.device)
    elif options.read:
        read(options.read, options.device, options.rounds)
    else:
        against_the_seed(options.shape or SMALL, options.rounds)
    if not (options.peak or options.make):
        print(
            f"machine: {platform.processor() or platform.machine()}, "
            f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
            f"Python {platform.python_version()}"
        )
