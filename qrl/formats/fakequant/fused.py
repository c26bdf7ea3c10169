"""Fake quantization as it is called in training: `fake`'s arithmetic, on a GPU in one launch for a model's matrices, or a linear's inputs.

Eager, compressed-tensors' functions read and write a matrix some twenty times. Here it is read once for its largest weight, and
once by `fake_triton`'s kernel, which writes what its codes stand for. The first result for every shape is held against the eager one,
bit for bit: where they differ, or where there is no Triton, eager it stays, and a warning says so.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from qrl.formats.fakequant import values

if TYPE_CHECKING:
    import torch
    from compressed_tensors.quantization import QuantizationArgs
    from torch import Tensor

Folded = tuple[list["Tensor"], "Tensor"]  # as `fake.folded` gives it
_proven: dict[
    tuple, bool
] = {}  # format, dtypes, shapes and device → whether the kernel gives what eager operations give


def folded(groups: Sequence[Sequence[Tensor]], args: QuantizationArgs, dtype: torch.dtype) -> list[Folded]:
    """`fake.folded` of many groups of matrices, all of them at once.

    Args:
        groups: each as `fake.folded` takes it, all of one dtype and on one device.
        args: of the format's weights.
        dtype: of Q(W).
    """
    groups = [[weight.detach() for weight in weights] for weights in groups]
    with _exactly(groups[0][0]):
        fused = [
            place
            for place, weights in enumerate(groups)
            if all(map(_fits, weights)) and _is_proven(weights, args, dtype)
        ]
        found = dict(zip(fused, _fused([groups[place] for place in fused], args, dtype), strict=True)) if fused else {}
        return [
            found[place] if place in found else values.folded(weights, args, dtype)
            for place, weights in enumerate(groups)
        ]


def _fused(groups: Sequence[Sequence[Tensor]], args: QuantizationArgs, dtype: torch.dtype) -> list[Folded]:
    """What the kernel makes of groups on a GPU."""
    from qrl.formats.fakequant import kernel

    sizes = [len(weights) for weights in groups]
    largest = _largest(groups)
    scales = _global_scales(largest, tuple(sizes)) if args.strategy == "tensor_group" else None
    places = [place for place, size in enumerate(sizes) for _ in range(size)]
    made = iter(kernel.folded([weight for weights in groups for weight in weights], args, dtype, scales, places))
    return [([next(made) for _ in range(size)], seen) for size, seen in zip(sizes, largest.split(sizes), strict=True)]


def _fits(weight: Tensor) -> bool:
    """Whether the kernel can read it."""
    return weight.is_cuda and weight.is_contiguous() and weight.data_ptr() % 64 == 0


def _is_proven(weights: Sequence[Tensor], args: QuantizationArgs, dtype: torch.dtype) -> bool:
    key = ("weights", _name(args), dtype, *((weight.shape, weight.dtype, weight.device) for weight in weights))
    return _holds(key, lambda: _fused([weights], args, dtype)[0], lambda: values.folded(weights, args, dtype))


def activations(inputs: Tensor, args: QuantizationArgs, global_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`fake.activations` of inputs in a dtype.

    Args:
        inputs: (..., I), of any float dtype; rounded to `dtype` first.
        args: of the format's activations.
        global_scale: (1,), calibrated, for NVFP4.
        dtype: that is multiplied in.
    """
    inputs = inputs.detach()
    if inputs.is_cuda and inputs.is_contiguous() and inputs.numel():
        from qrl.formats.fakequant import kernel

        def fused() -> Tensor:
            return kernel.activations(inputs, args, dtype, global_scale)

        key = ("activations", _name(args), inputs.shape[-1], inputs.dtype, dtype, inputs.device)
        if _holds(key, fused, lambda: values.activations(inputs.to(dtype), args, global_scale)):
            return fused()
    with _exactly(inputs):
        return values.activations(inputs.to(dtype), args, global_scale)


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
    return torch.vmap(values.global_scale)(shared).squeeze(1)


@functools.lru_cache
def _owners(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Which group each matrix belongs to."""
    import torch

    return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)).to(device)


def _name(args: QuantizationArgs) -> tuple:
    return args.type, args.num_bits, args.strategy, args.group_size, args.scale_dtype


def _holds(key: tuple, fused: Callable, eager: Callable) -> bool:
    """Whether the kernel gives what eager operations give: found out the first time that a key is asked for."""
    import torch

    if key not in _proven:
        try:
            with torch.no_grad(), torch.autocast("cuda", enabled=False):
                alike = all(
                    a.dtype == b.dtype and torch.equal(a, b)
                    for a, b in zip(_tensors(fused()), _tensors(eager()), strict=True)
                )
            reason = "" if alike else "the kernel's values differ from eager ones"
        except Exception as error:  # whatever a Triton that is missing, or a card that it does not know, raises
            reason = f"{type(error).__name__}: {str(error).strip()[:200]}".splitlines()[0]
        _proven[key] = not reason
        if reason:
            warnings.warn(f"Fake quantization runs eagerly, many times slower ({reason}).", stacklevel=5)
    return _proven[key]


@contextlib.contextmanager
def _exactly(tensor: Tensor) -> Iterator[None]:
    """Eager operations in the dtypes that they are given, whoever calls."""
    import torch

    with torch.no_grad(), torch.autocast(tensor.device.type, enabled=False):
        yield


def _tensors(found) -> list[Tensor]:
    """The tensors of a fold, or of activations."""
    return [*found[0], found[1]] if isinstance(found, tuple) else [found]
