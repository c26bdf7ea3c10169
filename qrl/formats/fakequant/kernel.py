"""Fake quantization in one pass over memory on a GPU: `fake`'s arithmetic as one Triton kernel.

Each program reads some groups, finds their scales, rounds, and writes what the codes stand for. Divisions are rounded to the
nearest, and every intermediate value to the dtype that eager operations keep it in, so that results are compressed-tensors'
bit for bit; `fake_fused` holds them against it.

Shapes: G groups of S values, one after the other in memory.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

INTEGER, EIGHT_BIT_FLOAT, NV_BLOCK, MX_BLOCK = range(4)  # how scales are made, and codes from values
ALIGNED = tl.constexpr(16)  # values: where a matrix may begin, so that a thread reads and writes several at once
TILE = 4096  # values that a program holds at least, where a group is smaller
CONSTANTS = (
    "SIZE",
    "ROWS",
    "BLOCK",
    "KIND",
    "EXACT",
    "OUT",
    "HALF",
    "LOW",
    "HIGH",
    "TINY",
)  # in the order of `_inputs`
_compiled: dict[
    tuple, object
] = {}  # kernels of inputs, by all that they were compiled for: finding one by Triton's own means takes the host longer than the card has work
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _e2m1(x):
    """The nearest of 0, .5, 1, 1.5, 2, 3, 4, 6, ties to the even code; x within ±6. NaN stays."""
    size = tl.abs(x)
    near = tl.where(size <= 0.25, 0.0, tl.where(size < 0.75, 0.5, tl.where(size <= 1.25, 1.0, tl.where(size < 1.75, 1.5, tl.where(
        size <= 2.5, 2.0, tl.where(size < 3.5, 3.0, tl.where(size <= 5.0, 4.0, tl.where(size > 5.0, 6.0, size))))))))  # fmt: skip
    return tl.where(x < 0.0, -near, near)


@triton.jit
def _value(
    x, tensor, ROWS: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, EXACT: tl.constexpr, OUT: tl.constexpr,
    HALF: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, TINY: tl.constexpr, THROUGH_BF16: tl.constexpr,
):  # fmt: skip
    """What the codes of x, (ROWS, BLOCK) of a group a row, stand for; `tensor` is NVFP4's global scale."""
    largest = tl.max(tl.abs(x), axis=1)
    half = tl.full([ROWS], HALF, tl.float32)
    if KIND == 3:  # the power of two that the largest has when its mantissa is rounded to one bit, over 4
        exponent = ((largest.to(tl.int32, bitcast=True) + (1 << 21)) >> 23) - 2
        scale = tl.where(exponent > 0, exponent << 23, 1 << 22).to(tl.float32, bitcast=True)
    elif KIND == 2:
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
        wide = wide.to(OUT).to(tl.float32)
    value = code * wide
    if KIND >= 2:
        value = value.to(EXACT).to(tl.float32)
    if THROUGH_BF16:
        value = value.to(tl.bfloat16).to(tl.float32)
    return value.to(OUT)


@triton.jit(do_not_specialize=["groups"])
def _inputs(given, made, scale, groups, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, EXACT: tl.constexpr,
            OUT: tl.constexpr, HALF: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, TINY: tl.constexpr, THROUGH_BF16: tl.constexpr):  # fmt: skip
    """Of one tensor."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    at = row[:, None] * SIZE + column[None, :]
    inside = (row[:, None] < groups) & (column[None, :] < SIZE)
    x = tl.load(given + at, mask=inside, other=0.0).to(EXACT).to(tl.float32)
    tensor = tl.load(scale) if KIND == 2 else 0.0
    value = _value(x, tensor, ROWS, BLOCK, KIND, EXACT, OUT, HALF, LOW, HIGH, TINY, THROUGH_BF16)
    tl.store(made + at, value, mask=inside)


@triton.jit
def _matrices(table, owners, made, scales, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, EXACT: tl.constexpr,
              OUT: tl.constexpr, HALF: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, TINY: tl.constexpr, THROUGH_BF16: tl.constexpr):  # fmt: skip
    """Of many matrices, each program some groups of one: its address, groups, first program, sixteenth of its place in `made`, place of its scale."""
    about = table + tl.load(owners + tl.program_id(0)) * 5
    given = tl.multiple_of(tl.load(about).to(tl.pointer_type(EXACT)), 16)
    groups, first, begin, place = (
        tl.load(about + 1),
        tl.load(about + 2),
        tl.load(about + 3) * ALIGNED,
        tl.load(about + 4),
    )
    row = (tl.program_id(0) - first) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    at = row[:, None] * SIZE + column[None, :]
    inside = (row[:, None] < groups) & (column[None, :] < SIZE)
    x = tl.load(given + at, mask=inside, other=0.0).to(tl.float32)
    tensor = tl.load(scales + place) if KIND == 2 else 0.0
    value = _value(x, tensor, ROWS, BLOCK, KIND, EXACT, OUT, HALF, LOW, HIGH, TINY, THROUGH_BF16)
    tl.store(made + begin + at, value, mask=inside)


def activations(given: Tensor, args: QuantizationArgs, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """What a linear's inputs become.

    Args:
        given: (..., I), contiguous, any float dtype; rounded to `dtype` first.
        args: of the format's activations.
        dtype: of the result, in which scales are computed.
        scale: (1,) float32, NVFP4's global scale.
    """
    made, size = torch.empty_like(given, dtype=dtype), args.group_size or given.shape[-1]
    settings, rows = _settings(args, size, dtype, dtype, nv=scale is not None)
    groups, told = given.numel() // size, given if scale is None else scale
    grid, constants = (triton.cdiv(groups, rows), 1, 1), [settings[name] for name in CONSTANTS]
    known = (
        given.dtype,
        given.device,
        given.data_ptr() % ALIGNED.value,
        told.data_ptr() % ALIGNED.value,
        groups < 2**31,
        *constants,
    )
    with _on(given):
        if (kernel := _compiled.get(known)) is not None:
            kernel[grid](given, made, told, groups, *constants, False)
        else:
            _compiled[known] = _inputs[grid](given, made, told, groups, THROUGH_BF16=False, **settings)
    return made


def folded(
    weights: Sequence[Tensor], args: QuantizationArgs, dtype: torch.dtype, scales: Tensor | None, places: Sequence[int]
) -> list[Tensor]:
    """Q(W) of matrices of one dtype on one device, views of one block of memory, by one launch for each width that scales have.

    Args:
        weights: (O, I) each, contiguous.
        args: of the format's weights.
        dtype: of Q(W).
        scales: (G,) float32, NVFP4's global scales.
        places: which of them each matrix has.
    """
    step = ALIGNED.value
    block = torch.empty(
        sum(-(-weight.numel() // step) * step for weight in weights), dtype=dtype, device=weights[0].device
    )
    found, begin, by_size = [], 0, {}
    for weight, place in zip(weights, places, strict=True):
        found.append(block[begin : begin + weight.numel()].view(weight.shape))
        size = args.group_size or weight.shape[-1]
        by_size.setdefault(size, []).append((weight.data_ptr(), weight.numel() // size, begin // step, place))
        begin += -(-weight.numel() // step) * step
    for size, matrices in by_size.items():
        settings, rows = _settings(args, size, weights[0].dtype, dtype, nv=scales is not None)
        table, owners = _table(tuple(matrices), rows, block.device)
        with _on(block):
            _matrices[(len(owners),)](
                table,
                owners,
                block,
                block if scales is None else scales,
                THROUGH_BF16=settings["KIND"] >= NV_BLOCK,
                **settings,
            )
    return found


@functools.lru_cache(maxsize=16)  # weights stay where they are
def _table(matrices: tuple[tuple[int, int, int, int], ...], rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """What `_matrices` reads: address, groups, first program, place in the result and place of the scale of each; whose each program is."""
    programs = torch.tensor([triton.cdiv(groups, rows) for _, groups, _, _ in matrices])
    firsts = (programs.cumsum(0) - programs).tolist()
    table = torch.tensor(
        [
            (address, groups, first, begin, place)
            for (address, groups, begin, place), first in zip(matrices, firsts, strict=True)
        ]
    )
    return table.to(device), torch.arange(len(matrices), dtype=torch.int32).repeat_interleave(programs).to(device)


def _settings(args: QuantizationArgs, size: int, exact: torch.dtype, out: torch.dtype, *, nv: bool) -> tuple[dict, int]:
    """What both kernels are compiled for, and how many groups a program has."""
    block = triton.next_power_of_2(size)
    rows = max(1, TILE // block)
    if args.type == "int":
        kind, half = INTEGER, (2**args.num_bits - 1) / 2
        low, high = -(half + 0.5), half - 0.5
    elif args.num_bits == 8:
        kind, half, low, high = EIGHT_BIT_FLOAT, 448.0, -448.0, 448.0
    else:
        kind, half, low, high = NV_BLOCK if nv else MX_BLOCK, 6.0, -6.0, 6.0
    found = {
        "SIZE": size,
        "ROWS": rows,
        "BLOCK": block,
        "KIND": kind,
        "EXACT": DTYPES[exact],
        "OUT": DTYPES[out],
        "HALF": half,
        "LOW": low,
        "HIGH": high,
    }
    return found | {"TINY": torch.finfo(exact).eps, "num_warps": 16 if block > 8192 else 8}, rows


def _on(tensor: Tensor):
    """The device that a kernel is launched on; on a CPU it is Triton's interpreter that runs it."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
