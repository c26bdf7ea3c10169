"""What kind of codes a checkpoint's config.json speaks of, so that a cell is not called by another scheme than it holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qrl import names

INT4, INT8, FP4, FP8 = "4-bit integers", "8-bit integers", "4-bit floats", "8-bit floats"
_ROUNDED = " with rounded activations"
# Scheme → kinds that it may hold. Several schemes share a kind: what else tells them apart is who made them.
KINDS = {
    **dict.fromkeys((names.AWQ_CT, names.GPTQ), (INT4, INT8)),  # bits are the recipe's choice
    **dict.fromkeys((names.AWQ, "rtn-int4"), (INT4,)),
    **dict.fromkeys((names.INT8, names.W8A16, "rtn-int8", "rtn-int8-attention"), (INT8,)),
    **dict.fromkeys((names.NF4, names.NVFP4A16, names.MXFP4A16, "rtn-nvfp4-a16", "rtn-mxfp4"), (FP4,)),
    **dict.fromkeys((names.NVFP4, "rtn-nvfp4-a4"), (FP4 + _ROUNDED,)),
    **dict.fromkeys((names.FP8, "rtn-fp8"), (FP8 + _ROUNDED,)),
    names.W8A8: (INT8 + _ROUNDED,),
}


def of(quantization: Mapping[str, Any]) -> set[str]:
    """The kinds of codes that a `quantization_config` of bitsandbytes or compressed-tensors speaks of; none where it does not say."""
    if quantization.get("load_in_8bit") or quantization.get("load_in_4bit"):
        return {INT8 if quantization.get("load_in_8bit") else FP4}
    groups = (quantization.get("config_groups") or {}).values()
    return {_kind(**group) for group in groups if group.get("weights")}


def _kind(weights: Mapping[str, Any], input_activations: Mapping[str, Any] | None = None, **_rest: object) -> str:
    values = "floats" if weights.get("type") == "float" else "integers"
    return f"{weights.get('num_bits')}-bit {values}{_ROUNDED if input_activations else ''}"
