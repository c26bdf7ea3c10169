"""The rounding of a linear's inputs as one operation of torch, which CUDA graphs and torch.compile keep whole.

A rollout engine calls it before each product; `rounding.activations` defines its values, so an engine rounds as the
loss does. What an engine must know of a format travels as JSON, in vLLM's field for a checkpoint's quantization.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qrl.formats.fakequant import fused, presets, rounding

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs

METHOD = "qrl-fakequant"  # the name under which vLLM knows the quantization method
SCALE = "input_global_scale"  # of all inputs of a linear, (1,) float32: calibrated, and sent at every sync


@torch.library.custom_op("qrl::rounded", mutates_args=())
def rounded(inputs: Tensor, spec: str, calibrated: Tensor | None) -> Tensor:
    """Return inputs (..., I) rounded to a format, as `fused.activations` does.

    Args:
        inputs: of the dtype that the product computes in.
        spec: the format's `input_activations`, as `engine_config` returns them.
        calibrated: (1,) float32, as `rounding.calibrated_scale`; None for scales per token.
    """
    return fused.activations(inputs.contiguous(), arguments(spec), calibrated, inputs.dtype)


@rounded.register_fake
def _(inputs: Tensor, spec: str, calibrated: Tensor | None) -> Tensor:
    return torch.empty_like(inputs, memory_format=torch.contiguous_format)


@functools.lru_cache
def arguments(spec: str) -> QuantizationArgs:
    """Return a format's rounding of inputs from its JSON text."""
    return presets.library().QuantizationArgs.model_validate_json(spec)


def engine_config(name: str, format_of: Mapping[str, str] | None = None) -> dict[str, Any] | None:
    """Return what an engine must know of a format, as a checkpoint's `quantization_config`; None if inputs stay.

    Args:
        name: one of `names.FORMATS`, or a file; "none" has no format.
        format_of: linear → its format, where not all have this one; linears that it lacks are left alone.

    Raises:
        BadInput: as for `rounding.scheme`.
    """
    config: dict[str, Any] = {"quant_method": METHOD, "version": version()}
    if format_of is None:
        spec = _spec(name)
        return config | {"input_activations": spec} if spec else None
    spec_of = {path: _spec(format_name) for path, format_name in format_of.items()}
    specs = {path: spec for path, spec in spec_of.items() if spec}
    return config | {"linears": specs} if specs else None


def _spec(name: str) -> str | None:
    """Return how a format rounds inputs, as JSON; None if it does not."""
    args = None if name == "none" else rounding.scheme(name).input_activations
    if args is None:
        return None
    return args.model_dump_json(exclude_none=True, exclude={"observer", "observer_kwargs"})


@functools.cache
def version() -> str:
    """Return a digest of the code that rounds, vLLM's plugin too; trainer and engine must have the same."""
    files = [*sorted(Path(__file__).parent.glob("*.py")), Path(__file__).parents[2] / "engine" / "vllm_fakequant.py"]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]
