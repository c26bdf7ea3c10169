"""How often each pattern of bits occurs among the weights of a matrix.

Sixteen bits have 65,536 patterns, so their counts say all there is to say of single weights, exactly: mean, median, quantiles,
kurtosis, outliers. Of float32 the upper sixteen bits of |w| are counted: ranges of sizes, each 1/256 wide.
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
        """Takes in weights as stored.

        Args:
            block: any shape.
            scratch: int32, as many at least: where patterns are written, so that no memory is asked for.
        """
        import torch

        self.dtype = block.dtype
        found = (
            torch.empty(block.numel(), dtype=torch.int32, device=block.device)
            if scratch is None
            else scratch[: block.numel()]
        )
        if self.exact():
            found.copy_(block.view(torch.uint16).flatten())
        else:
            torch.bitwise_and(block.float().view(torch.int32).flatten(), 0x7FFFFFFF, out=found).bitwise_right_shift_(
                _SHIFT
            )
        counts = torch.bincount(found, minlength=PATTERNS)
        self.of = counts if self.of is None else self.of.add_(counts)

    def merge(self, other: Counts) -> None:
        """Takes in what was counted elsewhere."""
        self.dtype, counts = (
            other.dtype,
            other.of.cpu(),
        )  # each thread has a queue of its own on a GPU: nothing of it is shared
        self.of = counts if self.of is None else self.of.add_(counts)

    def exact(self) -> bool:
        """Whether a pattern is one weight, not a range of them."""
        return self.dtype.itemsize == 2

    def sorted(self) -> Sorted:
        """What was counted, by size."""
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
        """Weights in all."""
        return int(self.counts.sum())

    def above(self, size: float) -> int:
        """How many |w| are larger; a range counts by its lower end."""
        return int(self.counts[self.values.abs() > size].sum())

    def median_range(self) -> tuple[float, float, int]:
        """Sizes between which the lower median of |w| lies, low ≤ median < high, and how many weights are below low."""
        at = _at(self.counts.cumsum(0), (self.n - 1) // 2)
        low = self.values[at].abs().item()
        return low, low if self.exact else _end_of_range(low), int(self.counts[:at].sum())

    def quantiles(self, shares: dict[str, float]) -> dict[str, float]:
        """By name, the smallest |w| that this share of weights does not exceed; of float32 up to 1/256 too small."""
        below = self.counts.cumsum(0)
        return {
            name: self.values[_at(below, math.ceil(share * self.n) - 1)].abs().item() for name, share in shares.items()
        }


def _at(below: Tensor, rank: int) -> int:
    import torch

    return int(torch.searchsorted(below, rank, right=True))


@cache
def values_of(dtype: torch.dtype) -> Tensor:
    """(65536,) float64: the weight that each pattern stands for; of float32 the smallest |w| of each range."""
    import torch

    every = torch.arange(PATTERNS, dtype=torch.int32)
    if dtype.itemsize == 2:
        return every.to(torch.int16).view(dtype).double()
    return (every << _SHIFT).view(torch.float32).double()


@cache
def _by_size(dtype: torch.dtype) -> tuple[Tensor, Tensor, int]:
    """Values by size, those that are no numbers last; which pattern each is of; how many are numbers: (65536,) and (65536,)."""
    import torch

    values = values_of(dtype)
    order = values.abs().nan_to_num(math.inf, posinf=math.inf).sort(stable=True).indices
    return values[order], order, int(torch.isfinite(values).sum())


def _end_of_range(low: float) -> float:
    """The size at which the next range of float32 begins."""
    import torch

    bits = torch.tensor(low, dtype=torch.float32).view(torch.int32) + (1 << _SHIFT)
    return bits.view(torch.float32).item()
