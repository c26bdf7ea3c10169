"""Fake quantization in few passes over memory: the arithmetic of `fake`, traced and handed to torch's compiler.

Eager, compressed-tensors' functions read and write a matrix some twenty times. Compiled, they are a few kernels. What the
compiler may not do is round otherwise: it is told to divide and to cast as eager operations do, and the first result of
every kernel is held against the eager one, bit for bit. Where they differ, or where nothing can be compiled, eager it stays.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from qrl.formats import fake

if TYPE_CHECKING:
    import torch
    from compressed_tensors.quantization import QuantizationArgs
    from torch import Tensor

# Inductor's options for eager rounding, under the names that torch 2.10 to 2.13 give them.
_ROUNDING = ("emulate_precision_casts", "eager_numerics.division_rounding", "emulate_divison_rounding")
_made: dict[tuple, Callable | None] = {}  # format, dtypes, shapes and device → what was compiled for them; None: eager it stays


def folded(weights: Sequence[Tensor], args: QuantizationArgs, dtype: torch.dtype | None = None) -> tuple[list[Tensor], Tensor]:
    """`fake.folded`, compiled for the weights' shapes where they lie on a GPU."""
    weights = [weight.detach() for weight in weights]
    if not weights[0].is_cuda:
        return fake.folded(weights, args, dtype)
    key = ("weights", _name(args), dtype, *((weight.shape, weight.dtype, weight.device) for weight in weights))
    return _call(key, lambda *each: fake.folded(each, args, dtype), weights, dynamic=False)


def activations(inputs: Tensor, args: QuantizationArgs, global_scale: Tensor | None = None) -> Tensor:
    """`fake.activations`, compiled for any number of tokens where they lie on a GPU."""
    if not inputs.is_cuda:
        return fake.activations(inputs, args, global_scale)
    tokens = inputs.detach().reshape(-1, inputs.shape[-1])
    given = [tokens] if global_scale is None else [tokens, global_scale]
    key = ("activations", _name(args), tokens.shape[-1], tokens.dtype, tokens.device)
    return _call(key, lambda each, *scale: fake.activations(each, args, *scale), given, dynamic=True).reshape(inputs.shape)


def _name(args: QuantizationArgs) -> tuple:
    return args.type, args.num_bits, args.strategy, args.group_size, args.scale_dtype


def _call(key: tuple, work: Callable, given: list[Tensor], *, dynamic: bool):
    """What a piece of work gives, compiled; the first time it is compiled, and compared with what it gives eagerly."""
    import torch

    with torch.no_grad(), torch.autocast(given[0].device.type, enabled=False):  # one state, one kernel
        if key in _made:
            made = _made[key]
            return (work if made is None else made)(*given)
        wanted = work(*given)
        try:
            made = compiled(work, given, dynamic=dynamic)
            alike = all(torch.equal(a, b) for a, b in zip(_tensors(made(*given)), _tensors(wanted), strict=True))
            reason = "" if alike else "the compiled values differ from eager ones"
        except Exception as error:  # whatever a compiler that is missing or too old raises
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}" if str(error).strip() else type(error).__name__
        if reason:
            warnings.warn(f"Fake quantization runs uncompiled, several times slower ({reason}).", stacklevel=4)
        _made[key] = None if reason else made
        return wanted


def compiled(work: Callable, given: Sequence[Tensor], *, dynamic: bool) -> Callable:
    """A function of tensors, traced on given ones and compiled with eager operations' rounding.

    Args:
        work: made of torch's and compressed-tensors' functions, with no branch on a tensor's values.
        given: tensors to trace on.
        dynamic: for tensors of other shapes too; else for these shapes alone.
    """
    import torch._inductor
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch_operations_only():
        work(*given)  # fills compressed-tensors' caches with real numbers
        mode = {"tracing_mode": "symbolic", "_allow_non_fake_inputs": True} if dynamic else {}
        graph = make_fx(work, **mode)(*given)
    known = torch._inductor.list_options()
    options = {name: True for name in _ROUNDING if name in known}
    return torch.compile(graph, dynamic=dynamic, fullgraph=True, options=options)


@contextlib.contextmanager
def torch_operations_only() -> Iterator[None]:
    """compressed-tensors without kernels of its own, which cannot be traced; 0.17 has none."""
    try:
        from compressed_tensors.utils import impl_backend
    except ImportError:
        yield
        return
    before, impl_backend.ENFORCE_EAGER = impl_backend.ENFORCE_EAGER, True
    try:
        yield
    finally:
        impl_backend.ENFORCE_EAGER = before


def _tensors(found) -> list[Tensor]:
    """The tensors of a fold, or of activations."""
    return [*found[0], found[1]] if isinstance(found, tuple) else [found]
