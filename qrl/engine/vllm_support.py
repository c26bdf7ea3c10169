"""What vLLM can run on this machine, checked before a weight is read or a worker started, and its share of memory.

vLLM says that it lacks a kernel minutes after its start, in a traceback of its worker, or not at all: some kernels
run a scheme in another way than its format says. `check_runs` and `check_format` refuse the first before the start;
`describe_departure` describes the second from the names of the kernels that vLLM chose. Most of the file is therefore
one table, written as conditions: scheme and machine → what vLLM 0.31 lacks.
"""

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from qrl import checkpoint
from qrl.errors import BadInput
from qrl.formats import kind, layers

# With this kernel one or two answers of 1,000 depend on the batch even in the deterministic mode: measured in
# tests/benchmarks/results/schemes.md.
_BATCH_VARIANT = "Int8ScaledMM"
_UNROUNDED = ("Marlin", "EmulationMxfp8", "W4A16", "CPUFp8")  # kernels that multiply activations as they are
_INT8_ON_CPU = "CPUInt8"  # begins the name of a kernel that, with AMX, scales each token by itself, in 16 bits alone
_OF_CODES = "CompressedTensors"  # begins the names of vLLM's methods for stored codes
_MIN_SHARE = 0.01  # of a GPU's memory that must be free, where the cache has a fixed size
# Compute capabilities, times 10.
_HOPPER = 90
_FP4_UNITS = 100  # the first GPUs that multiply 4-bit floats
# First five letters of a format → what vLLM's kernels for CPUs lack.
_CPU_LACKS = {"nvfp4": "4-bit floats on a CPU", "mxfp4": "4-bit floats on a CPU", "mxfp8": "MXFP8 on a CPU"}


def batch_invariant(kernels: Iterable[str]) -> bool:
    """Return whether answers computed with these kernels were independent of the batch in every measurement so far."""
    return not any(_BATCH_VARIANT in kernel for kernel in kernels)


def memory_options(memory: float, cache_gib: float | None) -> dict[str, Any]:
    """Return vLLM's options for a GPU's memory.

    Args:
        memory: largest share for the engine's weights, activations and cache; it must be free at the start.
        cache_gib: size of the key-value cache instead. The engine then measures nothing, so what other processes take
            and free while it starts does no harm.
    """
    if cache_gib is None:
        return {"gpu_memory_utilization": memory}
    return {"gpu_memory_utilization": _MIN_SHARE, "kv_cache_memory_bytes": int(cache_gib * 2**30)}


def emulation_options(path: Path, device: str) -> dict[str, str]:
    """Return vLLM's option for a checkpoint that rounds activations to 4-bit floats on a GPU that cannot multiply them.

    They are then rounded in software. vLLM's own choice, Marlin, would leave them as they are, and the cell of `nvfp4`
    would be one of `nvfp4a16`.
    """
    if device == "cpu" or "float4" not in _rounded(path):
        return {}
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    if capability and capability.to_int() < _FP4_UNITS:
        return {"linear_backend": "emulation"}
    return {}


def cache_options(path: Path, *, kv_fp8: bool) -> dict[str, Any]:
    """Return vLLM's options for the key-value cache of a checkpoint: in FP8, or as wide as activations.

    vLLM reads scales of keys and values from the checkpoint where it has any, and takes them for a wish of an FP8
    cache. A cell without FP8 cache of the same checkpoint therefore gets its config.json without them.
    """
    if kv_fp8:
        return {"kv_cache_dtype": "fp8"}
    options: dict[str, Any] = {"kv_cache_dtype": "auto"}
    quantization = checkpoint.config(path).get("quantization_config") or {}
    if kind.has_kv_scales(quantization):
        options["hf_overrides"] = {"quantization_config": quantization | {"kv_cache_scheme": None}}
    return options


def describe_departure(path: Path, kernels: Iterable[str]) -> str:
    """Describe how kernels depart from a checkpoint's format; empty if they do not."""
    rounded_to = _rounded(path)
    if not rounded_to:
        return ""
    quantization = checkpoint.config(path)["quantization_config"]
    kernels = sorted(kernels)
    unrounded = [kernel for kernel in kernels if any(part in kernel for part in _UNROUNDED)]
    # Where other linears of the file round no activations, such kernels are theirs, if there are kernels of both kinds.
    others = [kernel for kernel in kernels if kernel.startswith(_OF_CODES) and kernel not in unrounded]
    if unrounded and not (others and kind.has_weights_alone(quantization)):
        return f"activations not rounded to {rounded_to[0]}: the kernel here is {unrounded[0]}"
    if any("Emulation" in kernel for kernel in kernels):
        return f"activations rounded to {rounded_to[0]} in software, products in 16 bits"
    is_static = kind.activation_scales(quantization).startswith("static")
    if is_static and any(f"/{_INT8_ON_CPU}" in kernel for kernel in kernels) and _has_amx():
        return "activations rounded under each token's own scale, as by the kernel for AMX, not under the stored one"
    return ""


def _has_amx() -> bool:
    """Return whether this machine's processor multiplies matrices in tiles."""
    import torch

    return torch.cpu._is_amx_tile_supported()


def _rounded(path: Path) -> list[str]:
    return kind.rounded_activations(checkpoint.config(path).get("quantization_config") or {})


def check_runs(path: Path, device: str, deterministic: bool = False, dtype: str = "auto") -> None:
    """Check that vLLM has a kernel for a checkpoint's scheme on this machine.

    Args:
        path: a folder that `checkpoint.check` accepts.
        device: "cpu" or "cuda".
        deterministic: whether the kernel must be batch-invariant.
        dtype: of activations, as `Vllm` takes it.

    Raises:
        BadInput: a kernel is missing; the sentence names it.
    """
    quantization = checkpoint.config(path).get("quantization_config")
    if not quantization:
        return
    unpacked = ", evaluate.unpacked=true" if kind.of_weights_alone(quantization) else ""
    split = layers.split_set(layers.stored_plan(quantization))
    if split:
        raise BadInput(
            f"{path} does not store {', '.join(split)} alike, but vLLM fuses them into one linear: choose "
            f"quantize.layers that treat them alike{unpacked}, or evaluate.engine=transformers."
        )
    if device == "cpu" and dtype == "fp32" and "int8" in _rounded(path) and _has_amx():
        raise BadInput(
            f"{path} rounds activations to int8, and vLLM's kernel for this machine, with AMX, takes 16 bits alone: "
            "set evaluate.dtype=bf16, or evaluate.engine=transformers."
        )
    reason = _unfit(quantization, device, deterministic)
    if reason:
        raise BadInput(
            f"{path} is stored as {quantization['quant_method']}, {reason}; choose another scheme or machine"
            f"{unpacked}, or evaluate.engine=transformers."
        )


def check_format(quantization: dict, device: str) -> None:
    """Check that vLLM has a kernel for what a rollout engine is sent, a checkpoint's `quantization_config`.

    Raises:
        BadInput: a kernel is missing; the sentence names it.
    """
    reason = _unfit(quantization, device, deterministic=False)
    if reason:
        raise BadInput(
            f"The rollout engine would hold {quantization['format']} weights, {reason}; set rollout.quantization = "
            "none, which simulates the format."
        )


def _unfit(quantization: dict, device: str, deterministic: bool) -> str:
    """Return a clause that says what vLLM lacks here; empty if nothing is known to be missing."""
    missing = _missing(quantization, device, deterministic)
    if not missing:
        return ""
    import vllm

    machine = "machine" if device == "cpu" else "GPU"
    return f"which vLLM {vllm.__version__} cannot run on this {machine}: {missing}"


def _missing(quantization: dict, device: str, deterministic: bool) -> str:
    """Say what the scheme needs and vLLM lacks here; empty if nothing is known to be missing."""
    from vllm.model_executor.layers import quantization as methods
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    method = quantization["quant_method"]
    if method not in methods.QUANTIZATION_METHODS:
        plugin = " without vllm-bnb-plugin" if method == "bitsandbytes" else ""
        return f"it knows no {method}{plugin}"
    groups = list((quantization.get("config_groups") or {}).values())
    integer_bits = {group["weights"]["num_bits"] for group in groups if group["weights"]["type"] == "int"}
    unsupported_bits = integer_bits - kind.VLLM_INTEGER_BITS
    if unsupported_bits:
        return f"it has no kernel for {min(unsupported_bits)}-bit integers"

    # A group without a format of its own has the checkpoint's.
    groups = [group | {"format": group.get("format") or quantization.get("format") or ""} for group in groups]
    if device == "cpu":
        return _missing_on_cpu(method, groups)
    return _missing_on_gpu(methods.get_quantization_config(method).get_min_capability(), groups, deterministic)


def _missing_on_gpu(min_capability: int, groups: list[dict], deterministic: bool) -> str:
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    if capability and capability.to_int() < min_capability:
        return f"it needs compute capability {min_capability / 10:.1f}, and this GPU has {capability.to_int() / 10:.1f}"
    weights_only = [group for group in groups if not group.get("input_activations")]
    if capability and capability.to_int() != _HOPPER and any(map(_is_w4afp8, groups)):
        return "it multiplies 4-bit integers by FP8 on Hopper alone (compute capability 9.0)"
    if deterministic and any(group["format"].startswith("nvfp4") for group in weights_only):
        return (
            "its batch-invariant kernels for NVFP4 round activations, which this scheme does not "
            "(without evaluate.deterministic it runs)"
        )
    return ""


def _is_w4afp8(group: dict) -> bool:
    activations = group.get("input_activations") or {}
    return group["weights"]["type"] == "int" and activations.get("type") == "float"


def _missing_on_cpu(method: str, groups: list[dict]) -> str:
    import torch

    importlib.import_module("vllm._custom_ops")  # loads the kernels of this CPU
    for group in groups:
        missing_kernel = _missing_cpu_kernel(group)
        if missing_kernel:
            return f"it has no kernel for {missing_kernel}"
    weights_only = [group["weights"] for group in groups if not group.get("input_activations")]
    bits = [weights["num_bits"] for weights in weights_only if weights["type"] == "int"]
    if bits and max(bits) > 4:
        return "it has no kernel for 8-bit weights with full-precision activations on a CPU"
    if (bits or method == "awq") and not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        return "its build has no kernel for 4-bit integers on this CPU (cpu_gemm_wna16)"
    return ""


def _missing_cpu_kernel(group: dict) -> str:
    if group["weights"].get("strategy") == "block" and not _has_amx():
        return "FP8 in blocks on a CPU without AMX"
    if _is_w4afp8(group):
        return "4-bit integers with FP8 activations on a CPU"
    activations = group.get("input_activations") or {}
    is_static = activations.get("dynamic") is False
    if is_static and activations.get("type") == "float" and group["weights"].get("strategy") != "tensor":
        return "FP8 activations under one stored scale, with FP8 weights scaled by row, on a CPU"
    return _CPU_LACKS.get(group["format"][:5], "")
