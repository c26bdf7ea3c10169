"""Fake quantization in one pass over memory on a GPU: `rounding`'s arithmetic as a Triton kernel.

Each program reads some groups, computes their scales, rounds, and writes the values of the codes. Divisions round to
nearest, and every intermediate value is rounded to the dtype that eager operations keep it in, so that results equal
compressed-tensors' bit for bit; `fused` compares the two.

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

INTEGER, EIGHT_BIT_FLOAT, NV_BLOCK, MX_BLOCK = range(4)  # how scales are computed, and codes from values
ALIGNED = tl.constexpr(16)  # values: alignment of each matrix, so that a thread reads and writes several at once
TILE = 4096  # least number of values in a program, where groups are smaller
# In the order of the arguments of `_inputs`: a compiled kernel is called by position.
CONSTANTS = ("SIZE", "ROWS", "BLOCK", "KIND", "EXACT", "OUT", "HALF", "LOW", "HIGH", "TINY")
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# Kernels of inputs by everything that they were compiled for: Triton's own look-up is slower than the GPU's work.
_compiled: dict[tuple, object] = {}


@triton.jit
def _e2m1(x):
    """The nearest of 0, .5, 1, 1.5, 2, 3, 4, 6, ties to the even code; x within ±6. NaN stays NaN."""
    size = tl.abs(x)
    nearest = tl.where(size <= 5.0, 4.0, tl.where(size > 5.0, 6.0, size))
    nearest = tl.where(size <= 2.5, 2.0, tl.where(size < 3.5, 3.0, nearest))
    nearest = tl.where(size <= 1.25, 1.0, tl.where(size < 1.75, 1.5, nearest))
    nearest = tl.where(size <= 0.25, 0.0, tl.where(size < 0.75, 0.5, nearest))
    return tl.where(x < 0.0, -nearest, nearest)


@triton.jit
def _value(
    x, tensor, ROWS: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, EXACT: tl.constexpr, OUT: tl.constexpr,
    HALF: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, TINY: tl.constexpr, THROUGH_BF16: tl.constexpr,
):  # fmt: skip
    """The values of x's codes; x is (ROWS, BLOCK), a group in each row; `tensor` is NVFP4's global scale."""
    largest = tl.max(tl.abs(x), axis=1)
    half_range = tl.full([ROWS], HALF, tl.float32)
    if KIND == 3:  # the largest's power of two once its mantissa is rounded to one bit, over 4
        exponent = ((largest.to(tl.int32, bitcast=True) + (1 << 21)) >> 23) - 2
        scale = tl.where(exponent > 0, exponent << 23, 1 << 22).to(tl.float32, bitcast=True)
    elif KIND == 2:
        scale = tl.div_rn(largest, half_range).to(EXACT).to(tl.float32) * tensor
        scale = tl.where(scale > 448.0, 448.0, scale).to(tl.float8e4nv).to(tl.float32)
        scale = tl.div_rn(tl.where(scale == 0.0, 0.125, scale), tl.zeros([ROWS], tl.float32) + tensor)
    else:
        scale = tl.div_rn(largest, half_range).to(EXACT).to(tl.float32)
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
    if KIND < 2:  # a checkpoint that is loaded in another dtype rounds its scale first and then the product
        wide = wide.to(OUT).to(tl.float32)
    value = code * wide
    if KIND >= 2:
        value = value.to(EXACT).to(tl.float32)
    if THROUGH_BF16:
        value = value.to(tl.bfloat16).to(tl.float32)
    return value.to(OUT)


@triton.jit(do_not_specialize=["groups"])
def _inputs(
    source, target, scale, groups, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr,
    EXACT: tl.constexpr, OUT: tl.constexpr, HALF: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    TINY: tl.constexpr, THROUGH_BF16: tl.constexpr,
):  # fmt: skip
    """One tensor."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    at = row[:, None] * SIZE + column[None, :]
    inside = (row[:, None] < groups) & (column[None, :] < SIZE)
    x = tl.load(source + at, mask=inside, other=0.0).to(EXACT).to(tl.float32)
    tensor = tl.load(scale) if KIND == 2 else 0.0
    value = _value(x, tensor, ROWS, BLOCK, KIND, EXACT, OUT, HALF, LOW, HIGH, TINY, THROUGH_BF16)
    tl.store(target + at, value, mask=inside)


@triton.jit
def _matrices(
    table, owners, target, scales, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr,
    EXACT: tl.constexpr, OUT: tl.constexpr, HALF: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    TINY: tl.constexpr, THROUGH_BF16: tl.constexpr,
):  # fmt: skip
    """Many matrices; each program computes some groups of one, which a row of `_table` describes."""
    entry = table + tl.load(owners + tl.program_id(0)) * 5
    source = tl.multiple_of(tl.load(entry).to(tl.pointer_type(EXACT)), 16)
    groups = tl.load(entry + 1)
    first = tl.load(entry + 2)
    begin = tl.load(entry + 3) * ALIGNED
    scale_index = tl.load(entry + 4)
    row = (tl.program_id(0) - first) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    at = row[:, None] * SIZE + column[None, :]
    inside = (row[:, None] < groups) & (column[None, :] < SIZE)
    x = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    tensor = tl.load(scales + scale_index) if KIND == 2 else 0.0
    value = _value(x, tensor, ROWS, BLOCK, KIND, EXACT, OUT, HALF, LOW, HIGH, TINY, THROUGH_BF16)
    tl.store(target + begin + at, value, mask=inside)


def activations(inputs: Tensor, args: QuantizationArgs, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """Return contiguous inputs (..., I) rounded in `dtype`; `scale` is NVFP4's global scale, (1,) float32."""
    target = torch.empty_like(inputs, dtype=dtype)
    size = args.group_size or inputs.shape[-1]
    settings, rows = _settings(args, size, dtype, dtype, nv=scale is not None)
    groups = inputs.numel() // size
    scale_or_any = inputs if scale is None else scale  # the kernel needs a pointer that it does not read
    grid = (triton.cdiv(groups, rows), 1, 1)
    constants = [settings[name] for name in CONSTANTS]

    # All that Triton specializes a kernel by.
    alignments = [tensor.data_ptr() % ALIGNED.value for tensor in (inputs, scale_or_any)]
    key = (inputs.dtype, inputs.device, *alignments, groups < 2**31, *constants)
    compiled = _compiled.get(key)
    with _on(inputs):
        if compiled is not None:
            compiled[grid](inputs, target, scale_or_any, groups, *constants, False)
        else:
            _compiled[key] = _inputs[grid](inputs, target, scale_or_any, groups, THROUGH_BF16=False, **settings)
    return target


def folded(
    weights: Sequence[Tensor],
    args: QuantizationArgs,
    dtype: torch.dtype,
    scales: Tensor | None,
    scale_indices: Sequence[int],
) -> list[Tensor]:
    """Return Q(W) of matrices, views of one block of memory, by one launch per group size.

    Args:
        weights: (O, I) each, contiguous, of one dtype on one device.
        args: of the format's weights.
        dtype: of Q(W).
        scales: (G,) float32, NVFP4's global scales.
        scale_indices: of each matrix's scale.
    """
    # One block of memory for all results; each begins at a multiple of `step` values, as the kernel assumes.
    step = ALIGNED.value
    lengths = [-(-weight.numel() // step) for weight in weights]  # of each matrix, in steps
    block = torch.empty(sum(lengths) * step, dtype=dtype, device=weights[0].device)
    views = []
    by_size: dict[int, list[tuple[int, int, int, int]]] = {}  # group size → the first fields of `_table`
    begin = 0
    for weight, length, scale_index in zip(weights, lengths, scale_indices, strict=True):
        views.append(block[begin * step : begin * step + weight.numel()].view(weight.shape))
        size = args.group_size or weight.shape[-1]
        by_size.setdefault(size, []).append((weight.data_ptr(), weight.numel() // size, begin, scale_index))
        begin += length

    scales_or_any = block if scales is None else scales  # the kernel needs a pointer that it does not read
    for size, matrices in by_size.items():
        settings, rows = _settings(args, size, weights[0].dtype, dtype, nv=scales is not None)
        table, owners = _table(tuple(matrices), rows, block.device)
        through_bf16 = settings["KIND"] >= NV_BLOCK
        with _on(block):
            _matrices[(len(owners),)](table, owners, block, scales_or_any, THROUGH_BF16=through_bf16, **settings)
    return views


@functools.lru_cache(maxsize=256)  # weights keep their addresses; gathered ones take turns
def _table(matrices: tuple[tuple[int, int, int, int], ...], rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return what `_matrices` reads: a row for each matrix, and the matrix of each program.

    A row is (M, 5): address, groups, first program, begin of the result in aligned steps, index of the scale.
    """
    programs = torch.tensor([triton.cdiv(groups, rows) for _, groups, _, _ in matrices])
    first_programs = (programs.cumsum(0) - programs).tolist()
    table = []
    for (address, groups, begin, scale_index), first_program in zip(matrices, first_programs, strict=True):
        table.append((address, groups, first_program, begin, scale_index))
    owners = torch.arange(len(matrices), dtype=torch.int32).repeat_interleave(programs)
    return torch.tensor(table).to(device), owners.to(device)


def _settings(
    args: QuantizationArgs, size: int, input_dtype: torch.dtype, output_dtype: torch.dtype, *, nv: bool
) -> tuple[dict, int]:
    """Return the constants that a kernel is compiled for, and the number of groups in a program."""
    block = triton.next_power_of_2(size)
    rows = max(1, TILE // block)
    if args.type == "int":
        kind = INTEGER
        half_range = (2**args.num_bits - 1) / 2
        low = -(half_range + 0.5)
        high = half_range - 0.5
    else:
        if args.num_bits == 8:
            kind = EIGHT_BIT_FLOAT
        else:
            kind = NV_BLOCK if nv else MX_BLOCK
        half_range = 448.0 if args.num_bits == 8 else 6.0  # the format's largest value
        low = -half_range
        high = half_range
    settings = {
        "SIZE": size,
        "ROWS": rows,
        "BLOCK": block,
        "KIND": kind,
        "EXACT": DTYPES[input_dtype],
        "OUT": DTYPES[output_dtype],
        "HALF": half_range,
        "LOW": low,
        "HIGH": high,
        "TINY": torch.finfo(input_dtype).eps,
        "num_warps": 16 if block > 8192 else 8,
    }
    return settings, rows


def _on(tensor: Tensor):
    """Return a context with the tensor's GPU as the current device; a CPU's tensors go to Triton's interpreter."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
