"""The formats that have a name: what each rounds to, as a scheme of compressed-tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from qrl import names
from qrl.errors import BadInput
from qrl.formats import groups

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

# Recipe's name → preset of compressed-tensors and vLLM; they have none for int8, int3 and int2.
PRESETS = {
    "int8": None,  # per output channel; activations not rounded
    "int8-attention": None,  # the same for attention only: the scope of study 002's straight-through arm
    "int4": "W4A16",  # groups of quantize.group_size
    "nvfp4-a16": "NVFP4A16",  # blocks of 16 with FP8 scales, one scale per tensor; activations not rounded
    "nvfp4-a4": "NVFP4",  # activations too: blocks of 16 scaled dynamically, one calibrated scale per tensor
    "fp8": "FP8_DYNAMIC",  # per output channel; activations per token, scaled dynamically
    "mxfp4": "MXFP4A16",  # blocks of 32, scales are powers of two; activations not rounded
    "int3": None,  # the same groups; no kernel of vLLM runs these codes
    "int2": None,
    "fp8-static": "FP8_DYNAMIC",  # as fp8, but activations under one calibrated scale per tensor
    "int8-a8-static": "W8A8",  # likewise, in 8-bit integers
}
_STATIC = "-static"  # ends the names of formats with one calibrated scale for a linear's inputs


def scheme(name: str, group_size: int = groups.USUAL) -> QuantizationScheme:
    """Return how a format of `names.FORMATS` rounds weights and activations.

    Args:
        name: of the format.
        group_size: inputs that share a scale, for `names.GROUPED_FORMATS`; the others define their own.

    Raises:
        BadInput: the format is unknown, or compressed-tensors is not installed.
    """
    if name not in PRESETS:
        raise BadInput(
            f"There is no format '{name}' to train in: expected one of {', '.join(names.FORMATS)}, or FILE.yaml."
        )
    quantization = library()
    preset = PRESETS[name]
    if preset is not None:
        preset_scheme = quantization.preset_name_to_scheme(preset, ["Linear"])
        if name in names.GROUPED_FORMATS:
            preset_scheme.weights = preset_scheme.weights.model_copy(update={"group_size": group_size})
        if name.endswith(_STATIC):
            preset_scheme.input_activations = static_inputs(preset_scheme.input_activations.type)
        return preset_scheme

    bits = int(name.removeprefix("int")[0])
    grid = {"strategy": "channel"} if bits == 8 else {"strategy": "group", "group_size": group_size}
    weights = quantization.QuantizationArgs(num_bits=bits, type="int", symmetric=True, **grid)
    return quantization.QuantizationScheme(targets=["Linear"], weights=weights)


def static_inputs(value_type: Literal["float", "int"]) -> QuantizationArgs:
    """Return the rounding of a tensor to eight bits under one stored scale, from the largest |x| of all texts."""
    return library().QuantizationArgs(
        num_bits=8, type=value_type, strategy="tensor", dynamic=False, symmetric=True, observer="static_minmax"
    )


def library():
    """Return compressed-tensors' module of quantization functions; raise BadInput where it is not installed."""
    try:
        from compressed_tensors import quantization
    except ImportError:
        raise BadInput(
            "Quantization-aware training needs compressed-tensors, which is not installed here: run the step in an "
            "environment that has it, or set train.qat=none."
        ) from None
    return quantization
