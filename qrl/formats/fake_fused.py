"""Fake quantization as it is called in training: `fake`'s arithmetic, on a GPU in one kernel a matrix, or a linear's inputs.

Eager, compressed-tensors' functions read and write a matrix some twenty times. `fake_triton` reads it once more than the
largest weights need, and writes what its codes stand for. The first result for every shape is held against the eager one,
bit for bit: where they differ, or where there is no Triton, eager it stays, and a warning says so.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from qrl.formats import fake

if TYPE_CHECKING:
    import torch
    from compressed_tensors.quantization import QuantizationArgs
    from torch import Tensor

Folded = tuple[list["Tensor"], "Tensor"]  # as `fake.folded` gives it
_proven: dict[tuple, bool] = {}  # format, dtypes, shapes and device → whether the kernel gives what eager operations give


def folded(groups: Sequence[Sequence[Tensor]], args: QuantizationArgs, dtypes: Sequence[torch.dtype]) -> list[Folded]:
    """`fake.folded` of many groups of matrices.

    Args:
        groups: each as `fake.folded` takes it; contiguous.
        args: of the format's weights.
        dtypes: of each group's Q(W).
    """
    groups = [[weight.detach() for weight in weights] for weights in groups]
    if not all(weight.is_cuda and weight.is_contiguous() for weights in groups for weight in weights):
        return [fake.folded(weights, args, dtype) for weights, dtype in zip(groups, dtypes, strict=True)]
    largest = _largest(groups)
    scales = _global_scales(largest, tuple(map(len, groups))) if args.strategy == "tensor_group" else None
    found = []
    for place, (weights, dtype, seen) in enumerate(zip(groups, dtypes, largest.split([len(each) for each in groups]), strict=True)):
        key = ("weights", _name(args), dtype, *((weight.shape, weight.dtype, weight.device) for weight in weights))

        def fused(weights=weights, dtype=dtype, seen=seen, place=place) -> Folded:
            return [_fused(each, args, each.dtype, dtype, scales, place, weights=True) for each in weights], seen

        found.append(_chosen(key, fused, functools.partial(fake.folded, weights, args, dtype)))
    return found


def activations(inputs: Tensor, args: QuantizationArgs, global_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`fake.activations` of inputs in a dtype.

    Args:
        inputs: (..., I), of any float dtype; rounded to `dtype` first.
        args: of the format's activations.
        global_scale: (1,), calibrated, for NVFP4.
        dtype: that is multiplied in.
    """
    inputs = inputs.detach()
    if not (inputs.is_cuda and inputs.is_contiguous()) or not inputs.numel():
        return fake.activations(inputs.to(dtype), args, global_scale)
    key = ("activations", _name(args), inputs.shape[-1], inputs.dtype, dtype, inputs.device)
    return _chosen(
        key,
        lambda: _fused(inputs, args, dtype, dtype, global_scale, 0, weights=False),
        lambda: fake.activations(inputs.to(dtype), args, global_scale),
    )


def _fused(given: Tensor, args: QuantizationArgs, exact, out, scales: Tensor | None, place: int, *, weights: bool) -> Tensor:
    from qrl.formats import fake_triton

    return fake_triton.fake_quantize(given, args, args.group_size or given.shape[-1], exact=exact, out=out, weights=weights, scales=scales, place=place)


def _largest(groups: Sequence[Sequence[Tensor]]) -> Tensor:
    """Largest |w| of every matrix, in one pass over all of them; NaN where there is one."""
    import torch

    return torch.stack(torch._foreach_norm([weight for weights in groups for weight in weights], math.inf))


def _global_scales(largest: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """NVFP4's scale of each group of matrices, (G,) float32.

    Args:
        largest: (sum of sizes,), of every matrix.
        sizes: matrices of each group.
    """
    import torch

    shared = largest.new_zeros(len(sizes)).scatter_reduce_(0, _owners(sizes, largest.device), largest, "amax")
    return torch.vmap(fake.global_scale)(shared).squeeze(1)


@functools.lru_cache
def _owners(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Which group each matrix belongs to."""
    import torch

    return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)).to(device)


def _name(args: QuantizationArgs) -> tuple:
    return args.type, args.num_bits, args.strategy, args.group_size, args.scale_dtype


def _chosen(key: tuple, fused: Callable, eager: Callable):
    """What the kernel gives; the first time for a key it is compared with what eager operations give."""
    import torch

    with torch.no_grad(), torch.autocast("cuda", enabled=False):
        if key in _proven:
            return fused() if _proven[key] else eager()
        wanted = eager()
        try:
            alike = all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(_tensors(fused()), _tensors(wanted), strict=True))
            reason = "" if alike else "the kernel's values differ from eager ones"
        except Exception as error:  # whatever a Triton that is missing, or a card that it does not know, raises
            reason = f"{type(error).__name__}: {str(error).strip()[:200]}".splitlines()[0]
        _proven[key] = not reason
        if reason:
            warnings.warn(f"Fake quantization runs eagerly, many times slower ({reason}).", stacklevel=4)
        return wanted


def _tensors(found) -> list[Tensor]:
    """The tensors of a fold, or of activations."""
    return [*found[0], found[1]] if isinstance(found, tuple) else [found]
