"""The second pass over a float32 matrix, for sizes near its median and near the outliers' threshold only.

The first pass counts float32 weights in ranges of sizes (`patterns`), which brackets both without giving them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from qrl.diagnose.patterns import Sorted


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
        self.edges = (outlier_multiplier * self.low * (1 - 1e-6), outlier_multiplier * self.high * (1 + 1e-6))
        self.middle: list[Tensor] = []
        self.near: list[Tensor] = []
        self.above = 0

    def add(self, block: Tensor) -> None:
        """Add rows (R, I), each row of the matrix once."""
        sizes = block.float().abs().flatten()
        self.middle.append(sizes[(sizes >= self.low) & (sizes < self.high)].cpu())
        self.near.append(sizes[(sizes >= self.edges[0]) & (sizes < self.edges[1])].cpu())
        self.above += int((sizes >= self.edges[1]).sum())

    def merge(self, other: ExactMedian) -> None:
        """Add the rows of another pass over the same matrix."""
        self.middle += other.middle
        self.near += other.near
        self.above += other.above

    @property
    def median(self) -> float:
        """The lower median of |w|."""
        import torch

        return torch.cat(self.middle).kthvalue(self.rank + 1).values.item()

    @property
    def outliers(self) -> int:
        """How many |w| are larger than the multiplier times the median."""
        import torch

        return self.above + int((torch.cat(self.near).double() > self.multiplier * self.median).sum())
