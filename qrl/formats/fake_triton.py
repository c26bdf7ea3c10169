"""Fake quantization in one pass over memory on a GPU: `fake`'s arithmetic as one Triton kernel.

Each program reads some groups, finds their scales, rounds, and writes what the codes stand for. Divisions are rounded to the
nearest, and every intermediate value to the dtype that eager operations keep it in, so that results are compressed-tensors'
bit for bit; `fake_fused` holds them against it.

Shapes: G groups of S values, one after the other in memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

INTEGER, EIGHT_BIT_FLOAT, NV_BLOCK, MX_BLOCK = range(4)  # how scales are made, and codes from values
TILE = 4096  # values that a program holds at least, where a group is smaller
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _e2m1(x):
    """The nearest of 0, .5, 1, 1.5, 2, 3, 4, 6, ties to the even code; x within ±6. NaN stays."""
    size = tl.abs(x)
    near = tl.where(size <= 0.25, 0.0, tl.where(size < 0.75, 0.5, tl.where(size <= 1.25, 1.0, tl.where(size < 1.75, 1.5, tl.where(
        size <= 2.5, 2.0, tl.where(size < 3.5, 3.0, tl.where(size <= 5.0, 4.0, tl.where(size > 5.0, 6.0, size))))))))  # fmt: skip
    return tl.where(x < 0.0, -near, near)


@triton.jit(do_not_specialize=["place", "groups"])
def _fake_quantize(
    given, made, scales, place, groups,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr, EXACT: tl.constexpr,
    HALF: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, TINY: tl.constexpr, THROUGH_BF16: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    at = row[:, None] * SIZE + column[None, :]
    inside = (row[:, None] < groups) & (column[None, :] < SIZE)
    x = tl.load(given + at, mask=inside, other=0.0).to(EXACT).to(tl.float32)
    largest = tl.max(tl.abs(x), axis=1)
    half = tl.full([ROWS], HALF, tl.float32)
    if KIND == 3:  # the power of two above what is left of the largest when its mantissa is rounded to one bit, over 4
        exponent = ((largest.to(tl.int32, bitcast=True) + (1 << 21)) >> 23) - 2
        scale = tl.where(exponent > 0, exponent << 23, 1 << 22).to(tl.float32, bitcast=True)
    elif KIND == 2:
        tensor = tl.load(scales + place)
        scale = tl.div_rn(largest, half).to(EXACT).to(tl.float32) * tensor
        scale = tl.where(scale > 448.0, 448.0, scale).to(tl.float8e4nv).to(tl.float32)
        scale = tl.div_rn(tl.where(scale == 0.0, 0.125, scale), tl.zeros([ROWS], tl.float32) + tensor)
    else:
        scale = tl.div_rn(largest, half).to(EXACT).to(tl.float32)
        scale = tl.where(scale == 0.0, TINY, scale)
    wide = tl.zeros([ROWS, BLOCK], tl.float32) + scale[:, None]
    code = tl.div_rn(x, wide)
    if KIND != 2:
        code = code.to(EXACT).to(tl.float32)
    code = tl.where(code > HIGH, HIGH, tl.where(code < LOW, LOW, code))
    if KIND == 0:
        code = (code + 12582912.0) - 12582912.0  # 1.5 · 2^23: to the nearest integer, ties to even
    elif KIND == 1:
        code = code.to(tl.float8e4nv).to(tl.float32)
    else:
        code = _e2m1(code)
    if KIND < 2:  # a checkpoint's scale is rounded where it is loaded in another dtype, the product then
        wide = wide.to(made.dtype.element_ty).to(tl.float32)
    value = code * wide
    if KIND >= 2:
        value = value.to(EXACT).to(tl.float32)
    if THROUGH_BF16:
        value = value.to(tl.bfloat16).to(tl.float32)
    tl.store(made + at, value.to(made.dtype.element_ty), mask=inside)


def fake_quantize(
    given: Tensor,
    args: QuantizationArgs,
    size: int,
    *,
    exact: torch.dtype,
    out: torch.dtype,
    weights: bool,
    scales: Tensor | None = None,
    place: int = 0,
) -> Tensor:
    """What values become once they were stored in few bits and read back.

    Args:
        given: contiguous, G · S values on a GPU.
        args: of the format's weights or activations.
        size: S, values that share a scale.
        exact: the dtype that scales are computed in; values of another one are rounded to it first.
        out: of the result.
        weights: four-bit floats come rounded to bfloat16, as they are unpacked.
        scales: float32, NVFP4's global scales; `scales[place]` is this one's.

    Returns:
        The same shape, in `out`.
    """
    made = torch.empty_like(given, dtype=out)
    groups, block = given.numel() // size, triton.next_power_of_2(size)
    rows = max(1, TILE // block)
    kind, half, low, high = _grid(args, nv=scales is not None)
    with torch.cuda.device(given.device) if given.is_cuda else torch.no_grad():  # a CPU's is Triton's interpreter
        _fake_quantize[(triton.cdiv(groups, rows),)](
            given, made, given if scales is None else scales, place, groups, SIZE=size, BLOCK=block, ROWS=rows, KIND=kind, EXACT=DTYPES[exact],
            HALF=half, LOW=low, HIGH=high, TINY=torch.finfo(exact).eps, THROUGH_BF16=weights and kind >= NV_BLOCK,
            num_warps=16 if block > 8192 else 8,
        )  # fmt: skip
    return made


def _grid(args: QuantizationArgs, *, nv: bool) -> tuple[int, float, float, float]:
    """Kind, what the largest value is divided by, and the least and largest code."""
    if args.type == "int":
        return INTEGER, (2**args.num_bits - 1) / 2, -(2.0 ** (args.num_bits - 1)), 2.0 ** (args.num_bits - 1) - 1
    if args.num_bits == 8:
        return EIGHT_BIT_FLOAT, 448.0, -448.0, 448.0
    return NV_BLOCK if nv else MX_BLOCK, 6.0, -6.0, 6.0
