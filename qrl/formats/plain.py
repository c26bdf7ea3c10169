"""A checkpoint of 4-bit integers as plain matrices, for vLLM on a CPU that it has no kernel for.

vLLM's product with packed 4-bit weights on x86 (`cpu_gemm_wna16`) is built for AVX512 alone: on other CPUs AWQ and GPTQ load,
and die at the first product. What the codes stand for, in float32, is what evaluation computes with there anyhow.
"""

from __future__ import annotations

import json
import platform
import shutil
from pathlib import Path

from qrl import checkpoint
from qrl.formats import stored


def needed(path: Path) -> bool:
    """Whether vLLM could not compute with a checkpoint on this machine's CPU, but could with its plain matrices."""
    if platform.machine() not in ("x86_64", "AMD64") or _has_avx512():
        return False
    quantization = checkpoint.config(path).get("quantization_config") or {}
    if quantization.get("quant_method") == "awq":
        return True
    groups = (quantization.get("config_groups") or {}).values()
    return any(group["weights"]["type"] == "int" and group["weights"]["num_bits"] == 4 for group in groups)


def write(path: Path, out: Path) -> Path:
    """Writes a quantized checkpoint's values into a new folder, float32 throughout, as an ordinary checkpoint.

    Args:
        path: a folder that `stored.matrices` reads.
        out: a folder that does not exist.

    Returns:
        `out`.
    """
    import torch
    from safetensors.torch import save_file

    packed = stored.names(path)
    modules = {name.removesuffix("weight") for name in packed}
    others = [
        name
        for name in checkpoint.entries(path)
        if name.endswith(".bias") or f"{name.rpartition('.')[0]}." not in modules
    ]
    state = {name: tensor.to(torch.float32) for name, tensor in checkpoint.tensors(path, others)}
    state |= {name: matrix.values.contiguous() for name, matrix in stored.matrices(path, packed)}
    out.mkdir()
    save_file(state, out / checkpoint.WEIGHTS, {"format": "pt"})
    settings = {
        key: value
        for key, value in checkpoint.config(path).items()
        if key not in ("quantization_config", "torch_dtype")
    }
    (out / "config.json").write_text(json.dumps(settings | {"dtype": "float32"}, indent=1))
    for name in ("generation_config.json", *checkpoint.TOKENIZER_FILES):
        if (path / name).is_file():
            shutil.copyfile(path / name, out / name)
    return out


def _has_avx512() -> bool:
    try:
        return "avx512f" in Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux: vLLM has no such kernel there either
        return False
