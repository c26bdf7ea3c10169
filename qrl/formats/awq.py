"""AutoAWQ's packed 4-bit weights ("GEMM" layout) and the matrices that they stand for.

A linear of O outputs and I inputs, in groups of S inputs, is stored as
    qweight  (I, O/8)    int32, eight 4-bit codes each
    qzeros   (I/S, O/8)  int32, eight 4-bit zero points each
    scales   (I/S, O)    float16
and its weight is (code - zero) · scale. Nibble n of a word, from the lowest, holds output ORDER[n] of its eight.
Source: awq/utils/packing_utils.py and awq/modules/linear/gemm.py of AutoAWQ 0.2.9.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

BITS = 4
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output, of eight, that each nibble holds
PARTS = ("qweight", "qzeros", "scales")


def unpack(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return a packed linear's weight and its codes minus their zero points.

    Args:
        qweight: (I, O/8) int32.
        qzeros: (I/S, O/8) int32.
        scales: (I/S, O), float16 as stored.

    Returns:
        (O, I) in the scales' dtype, bit for bit as AutoAWQ dequantizes it, and (I, O) int8.
    """
    group_size = qweight.shape[0] // qzeros.shape[0]
    codes = _nibbles(qweight) - _nibbles(qzeros).repeat_interleave(group_size, dim=0)
    return (codes * scales.repeat_interleave(group_size, dim=0)).T.contiguous(), codes


def _nibbles(words: Tensor) -> Tensor:
    """Unpack eight 4-bit values from each int32, in the order of the outputs: (R, C) → (R, 8·C) int8."""
    import torch

    values = torch.empty(*words.shape, len(ORDER), dtype=torch.int8)
    for nibble, output in enumerate(ORDER):  # one at a time: all eight as int32 would need 32 bits a code
        values[:, :, output] = (words >> BITS * nibble) & (2**BITS - 1)
    return values.flatten(1)
