"""Which kind of codes a config.json describes, so that a cell's scheme can be checked against its weights."""

from collections.abc import Mapping
from typing import Any

from qrl import names

INT2, INT3, INT4, INT8 = "2-bit integers", "3-bit integers", "4-bit integers", "8-bit integers"
FP4, FP8 = "4-bit floats", "8-bit floats"
_ROUNDED = " with rounded activations"
# Scheme → kinds that it may hold. Schemes that share a kind differ in who wrote them.
KINDS = {
    **dict.fromkeys((names.AWQ_CT, names.GPTQ), (INT4, INT8)),  # the recipe chooses the bits
    **dict.fromkeys((names.AWQ, names.AUTOROUND, names.SPINQUANT, "rtn-int4"), (INT4,)),
    **dict.fromkeys((names.GPTQ_INT3, "rtn-int3"), (INT3,)),
    **dict.fromkeys((names.GPTQ_INT2, "rtn-int2"), (INT2,)),
    **dict.fromkeys((names.INT8, names.W8A16, "rtn-int8", "rtn-int8-attention"), (INT8,)),
    **dict.fromkeys((names.NF4, names.NVFP4A16, names.MXFP4A16, "rtn-nvfp4-a16", "rtn-mxfp4"), (FP4,)),
    **dict.fromkeys((names.NVFP4, "rtn-nvfp4-a4"), (FP4 + _ROUNDED,)),
    **dict.fromkeys((names.FP8, names.FP8_BLOCK, names.MXFP8, "rtn-fp8"), (FP8 + _ROUNDED,)),
    **dict.fromkeys((names.FP8_STATIC, "rtn-fp8-static"), (FP8 + _ROUNDED,)),
    names.W4AFP8: (INT4 + _ROUNDED,),
    **dict.fromkeys((names.W8A8, names.W8A8_STATIC, "rtn-int8-a8-static"), (INT8 + _ROUNDED,)),
    "rtn-file": (INT4, INT8, FP4, FP8, INT4 + _ROUNDED, INT8 + _ROUNDED, FP4 + _ROUNDED, FP8 + _ROUNDED),
}

VLLM_INTEGER_BITS = {4, 8}  # for which vLLM has a kernel
WITHOUT_VLLM_KERNEL = tuple(scheme for scheme, kinds in KINDS.items() if set(kinds) <= {INT2, INT3})


def of_weights_alone(quantization: Mapping[str, Any]) -> bool:
    """Return whether a `quantization_config` leaves activations as they are, so that plain matrices give the same."""
    return not (quantization.get("load_in_8bit") or rounded_activations(quantization))


def rounded_activations(quantization: Mapping[str, Any]) -> list[str]:
    """Return what a `quantization_config` of compressed-tensors rounds activations to, by group of layers: `float4`."""
    input_activations = [group.get("input_activations") for group in _groups(quantization)]
    return [f"{args.get('type')}{args.get('num_bits')}" for args in input_activations if args]


def activation_scales(quantization: Mapping[str, Any]) -> str:
    """Return how a `quantization_config` of compressed-tensors scales the activations that it rounds, for people.

    `static, per tensor`: calibrated and stored. `dynamic, per token`: from the values themselves. `dynamic, per
    tensor_group`: NVFP4's, under a calibrated scale of the tensor. Empty where no activation is rounded.
    """
    kinds = []
    for group in _groups(quantization):
        args = group.get("input_activations")
        if args:
            origin = "dynamic" if args.get("dynamic") else "static"
            kinds.append(f"{origin}, per {args.get('strategy')}")
    return "; ".join(dict.fromkeys(kinds))


def kv_scales(quantization: Mapping[str, Any]) -> str:
    """Return which scales of keys and values a `quantization_config` stores: `static, per layer`, or nothing."""
    return "static, per layer" if has_kv_scales(quantization) else ""


def has_kv_scales(quantization: Mapping[str, Any] | None) -> bool:
    """Return whether a checkpoint stores scales of keys and values, by its `quantization_config`, if it has one."""
    return bool((quantization or {}).get("kv_cache_scheme"))


def has_weights_alone(quantization: Mapping[str, Any]) -> bool:
    """Return whether a group of layers in a `quantization_config` of compressed-tensors leaves activations alone."""
    return any(not group.get("input_activations") for group in _groups(quantization))


def of(quantization: Mapping[str, Any]) -> set[str]:
    """Return the kinds of codes in a `quantization_config` of bitsandbytes or compressed-tensors; else none."""
    if quantization.get("load_in_8bit"):
        return {INT8}
    if quantization.get("load_in_4bit"):
        return {FP4}
    kinds = set()
    for group in _groups(quantization):
        weights = group.get("weights")
        if not weights:
            continue
        values = "floats" if weights.get("type") == "float" else "integers"
        suffix = _ROUNDED if group.get("input_activations") else ""
        kinds.add(f"{weights.get('num_bits')}-bit {values}{suffix}")
    return kinds


def _groups(quantization: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list((quantization.get("config_groups") or {}).values())
