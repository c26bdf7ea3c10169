"""Fake quantization as training calls it: `rounding`'s arithmetic, in one GPU launch for all matrices of a model.

Eager, compressed-tensors' functions read and write a matrix some twenty times. Here it is read once for its largest
weight and once by `kernel`, which writes the rounded values. The first result for every shape is compared with the
eager one bit for bit. Where they differ, or Triton is missing, a warning is shown and fake quantization stays eager.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qrl.formats.fakequant import rounding
from qrl.formats.fakequant.rounding import Folded

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs

_proven: dict[tuple, bool] = {}  # (format, dtypes, shapes, device) → whether the kernel's result equals the eager one


def folded(groups: Sequence[Sequence[Tensor]], args: QuantizationArgs, dtype: torch.dtype) -> list[Folded]:
    """Return `rounding.folded` of many groups of matrices, all of one dtype and on one device, computed together."""
    groups = [[weight.detach() for weight in weights] for weights in groups]
    with _without_autocast(groups[0][0]):
        results: list[Folded | None] = [None] * len(groups)
        for_kernel = [index for index, weights in enumerate(groups) if _kernel_can_fold(weights, args, dtype)]
        if for_kernel:
            kernel_results = _fused([groups[index] for index in for_kernel], args, dtype)
            for index, result in zip(for_kernel, kernel_results, strict=True):
                results[index] = result
        return [
            result or rounding.folded(weights, args, dtype) for weights, result in zip(groups, results, strict=True)
        ]


def _kernel_can_fold(weights: Sequence[Tensor], args: QuantizationArgs, dtype: torch.dtype) -> bool:
    return all(map(_fits, weights)) and _is_proven(weights, args, dtype)


def activations(inputs: Tensor, args: QuantizationArgs, calibrated: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return `rounding.activations` of inputs (..., I), any float dtype, converted first to the product's `dtype`.

    A static scale needs no kernel: a division, a rounding and a product, none of which waits for the GPU.
    """
    inputs = inputs.detach()
    can_use_kernel = inputs.is_cuda and inputs.is_contiguous() and inputs.numel() and not rounding.is_static(args)
    if can_use_kernel and by_kernel(inputs, args, calibrated, dtype):
        from qrl.formats.fakequant import kernel

        return kernel.activations(inputs, args, dtype, calibrated)
    with _without_autocast(inputs):
        return rounding.activations(inputs.to(dtype), args, calibrated)


def by_kernel(inputs: Tensor, args: QuantizationArgs, global_scale: Tensor | None, dtype: torch.dtype) -> bool:
    """Return whether the kernel rounds contiguous inputs (..., I) on a GPU as the eager functions do."""

    def run_kernel() -> Tensor:
        from qrl.formats.fakequant import kernel

        return kernel.activations(inputs, args, dtype, global_scale)

    key = ("activations", _name(args), inputs.shape[-1], inputs.dtype, dtype, inputs.device)
    return _equals_eager(key, run_kernel, lambda: rounding.activations(inputs.to(dtype), args, global_scale))


def _fused(groups: Sequence[Sequence[Tensor]], args: QuantizationArgs, dtype: torch.dtype) -> list[Folded]:
    from qrl.formats.fakequant import kernel

    sizes = [len(weights) for weights in groups]
    matrices = [weight for weights in groups for weight in weights]
    group_of: list[int] = []  # of each matrix
    for group, size in enumerate(sizes):
        group_of += [group] * size
    largest = _largest(groups)
    scales = _global_scales(largest, tuple(group_of)) if args.strategy == "tensor_group" else None
    rounded = iter(kernel.folded(matrices, args, dtype, scales, group_of))
    return [
        (list(islice(rounded, size)), group_largest)
        for size, group_largest in zip(sizes, largest.split(sizes), strict=True)
    ]


def _fits(weight: Tensor) -> bool:
    return weight.is_cuda and weight.is_contiguous() and weight.data_ptr() % 64 == 0


def _largest(groups: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return the largest |w| of every matrix, in one pass over all of them; NaN where there is one."""
    matrices = [weight for weights in groups for weight in weights]
    return torch.stack(torch._foreach_norm(matrices, math.inf))


def _global_scales(largest: Tensor, group_of: tuple[int, ...]) -> Tensor:
    """Return NVFP4's scale of each group, (G,) float32, from the largest |w| of M matrices, and each one's group."""
    groups = group_of[-1] + 1
    group_largest = largest.new_zeros(groups).scatter_reduce_(0, _on_device(group_of, largest.device), largest, "amax")
    return torch.vmap(rounding.global_scale)(group_largest).squeeze(1)


@functools.lru_cache
def _on_device(indices: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(indices).to(device)


def _is_proven(weights: Sequence[Tensor], args: QuantizationArgs, dtype: torch.dtype) -> bool:
    key = ("weights", _name(args), dtype, *((weight.shape, weight.dtype, weight.device) for weight in weights))
    return _equals_eager(key, lambda: _fused([weights], args, dtype)[0], lambda: rounding.folded(weights, args, dtype))


def _name(args: QuantizationArgs) -> tuple:
    return args.type, args.num_bits, args.strategy, args.group_size, str(args.block_structure), args.scale_dtype


def _equals_eager(key: tuple, run_kernel: Callable, run_eager: Callable) -> bool:
    """Return whether the kernel's result equals the eager one, compared the first time that a key comes up."""
    if key not in _proven:
        try:
            with torch.no_grad(), torch.autocast("cuda", enabled=False):
                pairs = list(zip(_tensors(run_kernel()), _tensors(run_eager()), strict=True))
            equal = all(ours.dtype == theirs.dtype and torch.equal(ours, theirs) for ours, theirs in pairs)
            reason = "" if equal else "the kernel's values differ from eager ones"
        except Exception as error:  # whatever a missing Triton, or a card that it does not know, raises
            reason = f"{type(error).__name__}: {str(error).strip()[:200]}".splitlines()[0]
        _proven[key] = not reason
        if reason:
            warnings.warn(f"Fake quantization runs eagerly, many times slower ({reason}).", stacklevel=5)
    return _proven[key]


@contextlib.contextmanager
def _without_autocast(tensor: Tensor) -> Iterator[None]:
    """Run eager operations in the dtypes of their arguments, without gradients."""
    with torch.no_grad(), torch.autocast(tensor.device.type, enabled=False):
        yield


def _tensors(result: Folded | Tensor) -> list[Tensor]:
    return [*result[0], result[1]] if isinstance(result, tuple) else [result]
