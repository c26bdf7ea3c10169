"""Counts of the bit patterns among the weights of a matrix.

Sixteen bits have 65,536 patterns, so their counts determine every statistic of single weights exactly: mean, median,
quantiles, kurtosis, outliers. Of float32 the upper sixteen bits of |w| are counted: ranges of sizes, each 1/256 wide.
They bracket median and outliers without giving them; a second pass over sizes near both does (`ExactMedian`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

PATTERNS = 1 << 16
_SHIFT = 15  # of float32's 31 bits without sign


def count(block: Tensor, scratch: Tensor) -> Tensor:
    """Return how often each pattern occurs, (65536,) int64; counts of other rows of the same matrix add up.

    Args:
        block: weights as stored, any shape.
        scratch: int32, as many elements at least, to write patterns to without allocating memory.
    """
    patterns = scratch[: block.numel()]
    if exact(block.dtype):
        patterns.copy_(block.view(torch.uint16).flatten())
    else:
        bits = block.float().view(torch.int32).flatten()
        torch.bitwise_and(bits, 0x7FFFFFFF, out=patterns).bitwise_right_shift_(_SHIFT)
    return torch.bincount(patterns, minlength=PATTERNS)


def exact(dtype: torch.dtype) -> bool:
    """Return whether a pattern is one weight, not a range of them."""
    return dtype.itemsize == 2


def by_size(counts: Tensor, dtype: torch.dtype) -> Sorted:
    """Return the weights that occur, by size."""
    values, order, finite = _patterns(dtype)
    counts = counts.cpu()[order]
    occurring = counts.nonzero().flatten()
    return Sorted(values[occurring], counts[occurring], int(counts[finite:].sum()), exact(dtype))


@dataclass(frozen=True)
class Sorted:
    """Weights that occur, the smallest |w| first, and how often: (K,) both."""

    values: Tensor  # float64; of float32 the lower end of each range of |w|
    counts: Tensor  # int64
    broken: int  # NaN or infinite ones among them
    exact: bool  # values are weights, not ranges

    @property
    def n(self) -> int:
        """The number of weights."""
        return int(self.counts.sum())

    def above(self, size: float) -> int:
        """Return how many |w| are larger; a range counts by its lower end."""
        return int(self.counts[self.values.abs() > size].sum())

    def median_range(self) -> tuple[float, float, int]:
        """Return low and high with low ≤ lower median of |w| < high, and how many weights are below low."""
        index = _index_of_rank(self.counts.cumsum(0), (self.n - 1) // 2)
        low = self.values[index].abs()
        high = low
        if not self.exact:
            next_range_bits = low.float().view(torch.int32) + (1 << _SHIFT)
            high = next_range_bits.view(torch.float32)
        return low.item(), high.item(), int(self.counts[:index].sum())

    def quantiles(self, shares: dict[str, float]) -> dict[str, float]:
        """Return by name the |w| that this share of weights does not exceed; of float32 up to 1/256 too small."""
        cumulative = self.counts.cumsum(0)
        quantiles = {}
        for name, share in shares.items():
            rank = math.ceil(share * self.n) - 1
            quantiles[name] = self.values[_index_of_rank(cumulative, rank)].abs().item()
        return quantiles


class ExactMedian:
    """Median and outliers of a float32 matrix, exact; passes over different rows add up by `merge`.

    Args:
        sizes: of the whole matrix.
        outlier_multiplier: an outlier is larger than this times the median.
    """

    def __init__(self, sizes: Sorted, outlier_multiplier: float) -> None:
        self.low, self.high, below = sizes.median_range()
        self.rank = (sizes.n - 1) // 2 - below  # of the median among the sizes near it
        self.multiplier = outlier_multiplier
        # Sizes between these may be outliers or not, which the exact median decides; larger ones are.
        self.outlier_low = outlier_multiplier * self.low * (1 - 1e-6)
        self.outlier_high = outlier_multiplier * self.high * (1 + 1e-6)
        self.near_median: list[Tensor] = []
        self.near_threshold: list[Tensor] = []
        self.above = 0

    def add(self, _first: int, block: Tensor) -> None:
        """Add rows (R, I), each row of the matrix once."""
        sizes = block.float().abs().flatten()
        self.near_median.append(sizes[(sizes >= self.low) & (sizes < self.high)].cpu())
        self.near_threshold.append(sizes[(sizes >= self.outlier_low) & (sizes < self.outlier_high)].cpu())
        self.above += int((sizes >= self.outlier_high).sum())

    def merge(self, rows: ExactMedian) -> None:
        """Add other rows of the same matrix."""
        self.near_median += rows.near_median
        self.near_threshold += rows.near_threshold
        self.above += rows.above

    def result(self) -> tuple[float, int]:
        """Return the lower median of |w|, and how many |w| are larger than the multiplier times it."""
        median = torch.cat(self.near_median).kthvalue(self.rank + 1).values.item()
        outliers = torch.cat(self.near_threshold).double() > self.multiplier * median
        return median, self.above + int(outliers.sum())


def _index_of_rank(cumulative: Tensor, rank: int) -> int:
    """Return the index of the value with this rank, counted from 0, by cumulative counts."""
    return int(torch.searchsorted(cumulative, rank, right=True))


@cache
def _patterns(dtype: torch.dtype) -> tuple[Tensor, Tensor, int]:
    """Return the weight of each pattern by size, NaN and infinity last; its pattern; and how many are finite.

    The first two are (65536,), float64 and int64; of float32 a weight is the smallest |w| of its range.
    """
    patterns = torch.arange(PATTERNS, dtype=torch.int32)
    if exact(dtype):
        values = patterns.to(torch.int16).view(dtype).double()
    else:
        values = (patterns << _SHIFT).view(torch.float32).double()
    order = values.abs().nan_to_num(math.inf, posinf=math.inf).sort(stable=True).indices
    return values[order], order, int(torch.isfinite(values).sum())
