"""Counts of the bit patterns among the weights of a matrix.

Sixteen bits have 65,536 patterns, so their counts determine every statistic of single weights exactly: mean, median,
quantiles, kurtosis, outliers. Of float32 the upper sixteen bits of |w| are counted: ranges of sizes, each 1/256 wide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PATTERNS = 1 << 16
_SHIFT = 15  # of float32's 31 bits without sign


class Counts:
    """Counts of the patterns of one dtype; those of other rows of the same matrix add up by `merge`."""

    def __init__(self) -> None:
        self.dtype: torch.dtype | None = None
        self.of: Tensor | None = None  # (65536,) int64

    def add(self, block: Tensor, scratch: Tensor | None = None) -> None:
        """Count weights as stored.

        Args:
            block: any shape.
            scratch: int32, at least as many elements, to write patterns to without allocating memory.
        """
        import torch

        self.dtype = block.dtype
        if scratch is None:
            scratch = torch.empty(block.numel(), dtype=torch.int32, device=block.device)
        patterns = scratch[: block.numel()]
        if self.exact():
            patterns.copy_(block.view(torch.uint16).flatten())
        else:
            bits = block.float().view(torch.int32).flatten()
            torch.bitwise_and(bits, 0x7FFFFFFF, out=patterns).bitwise_right_shift_(_SHIFT)
        counts = torch.bincount(patterns, minlength=PATTERNS)
        self.of = counts if self.of is None else self.of.add_(counts)

    def merge(self, other: Counts) -> None:
        """Add counts of other rows."""
        self.dtype = other.dtype
        counts = other.of.cpu()  # on a GPU each thread has a queue of its own, and tensors are not shared
        self.of = counts if self.of is None else self.of.add_(counts)

    def exact(self) -> bool:
        """Return whether a pattern is one weight, not a range of them."""
        return self.dtype.itemsize == 2

    def sorted(self) -> Sorted:
        """Return the weights that occur, by size."""
        values, order, finite = _by_size(self.dtype)
        counts = self.of.cpu()[order]
        there = counts.nonzero().flatten()
        return Sorted(values[there], counts[there], int(counts[finite:].sum()), self.exact())


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
        at = _at(self.counts.cumsum(0), (self.n - 1) // 2)
        low = self.values[at].abs().item()
        return low, low if self.exact else _next_range(low), int(self.counts[:at].sum())

    def quantiles(self, shares: dict[str, float]) -> dict[str, float]:
        """Return by name the |w| that this share of weights does not exceed; of float32 up to 1/256 too small."""
        below = self.counts.cumsum(0)
        ranks = {name: math.ceil(share * self.n) - 1 for name, share in shares.items()}
        return {name: self.values[_at(below, rank)].abs().item() for name, rank in ranks.items()}


def _at(below: Tensor, rank: int) -> int:
    import torch

    return int(torch.searchsorted(below, rank, right=True))


@cache
def _by_size(dtype: torch.dtype) -> tuple[Tensor, Tensor, int]:
    """Return the weight of each pattern by size, NaN and infinity last; its pattern; and how many are finite.

    The first two are (65536,), float64 and int64; of float32 a weight is the smallest |w| of its range.
    """
    import torch

    patterns = torch.arange(PATTERNS, dtype=torch.int32)
    stored = patterns.to(torch.int16).view(dtype) if dtype.itemsize == 2 else (patterns << _SHIFT).view(torch.float32)
    values = stored.double()
    order = values.abs().nan_to_num(math.inf, posinf=math.inf).sort(stable=True).indices
    return values[order], order, int(torch.isfinite(values).sum())


def _next_range(low: float) -> float:
    """Return the size at which the next range of float32 begins."""
    import torch

    bits = torch.tensor(low, dtype=torch.float32).view(torch.int32) + (1 << _SHIFT)
    return bits.view(torch.float32).item()
