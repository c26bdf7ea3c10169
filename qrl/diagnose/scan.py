"""Everything that is measured of one matrix, in a single pass over it.

Single weights are counted by their patterns of bits (`patterns`), which costs one look at each; measures of them are then sums over
patterns in float64. What needs neighbours, the groups of the 4-bit proxy and the channels, is done on the same block while the
processor's cache still holds it, in memory that is asked for once: fresh pages cost more than the arithmetic.

A float32 matrix is counted by its upper bits; its moments are summed beside that, and the two narrow ranges in which the median and the
outliers' threshold lie are looked at once more (`closer`), so its median and outliers are exact, too.

Shapes: R rows of a block, I input features, G groups of a row, S inputs in a group.
"""

from __future__ import annotations

import math
import threading
from functools import cached_property
from typing import TYPE_CHECKING

from qrl.diagnose.exact_median import Closer
from qrl.diagnose.moments import Moments
from qrl.diagnose.patterns import Counts, Sorted
from qrl.formats import rtn

if TYPE_CHECKING:
    import torch
    from torch import Tensor

QUANTILES = {"abs_q99": 0.99, "abs_q999": 0.999, "abs_q9999": 0.9999}


class Scratch(threading.local):
    """Memory to work in, each thread's own, asked for once."""

    whole: Tensor | None = None  # (3, numel) float32, for the largest block so far

    def parts(self, numel: int, device: torch.device) -> Tensor:
        """Three flat tensors of this size: (3, numel) float32, holding anything."""
        import torch

        if self.whole is None or self.whole.shape[1] < numel:
            self.whole = torch.empty(3, numel, dtype=torch.float32, device=device)
        return self.whole[:, :numel]


class Scan:
    """Sums over the rows of a matrix, fed in blocks; scans of different rows add up by `merge`.

    Args:
        bits, group_size: of the round-to-nearest proxy.
        scratch: shared by the scans of one walk; None: its own.
    """

    def __init__(self, bits: int = 4, group_size: int = 128, scratch: Scratch | None = None) -> None:
        self.bits, self.group_size, self.scratch = bits, group_size, scratch or Scratch()
        self.counts = Counts()
        self.moments = Moments()
        self.peaks: list[tuple[int, Tensor]] = []  # largest |w| of each row, by the first row's number
        self.squared_error = 0.0
        self.max_error = 0.0

    def add(self, block: Tensor, first: int = 0) -> None:
        """Takes in rows (R, I) as stored, the first of which is row `first` of the matrix."""
        import torch

        size = len(block) * (block.shape[1] + -block.shape[1] % self.group_size)
        own, *free = self.scratch.parts(size, block.device)
        self.counts.add(block, own.view(torch.int32))
        values = own[: block.numel()].view(block.shape).copy_(block)
        if not self.exact():
            self.moments.merge(Moments.of(values))
        groups = rtn.grouped(values, self.group_size)
        largest = torch.maximum(groups.amax(-1, keepdim=True), groups.amin(-1, keepdim=True).neg_())
        self.peaks.append((first, largest.amax(1).flatten().cpu()))
        squared, self.max_error = rtn.scan(groups, largest, self.bits, least=self.max_error, scratch=free)
        self.squared_error += squared

    def merge(self, other: Scan) -> None:
        """Takes in what another scan of the same matrix has seen."""
        self.counts.merge(other.counts)
        self.moments.merge(other.moments)
        self.peaks += other.peaks
        self.squared_error += other.squared_error
        self.max_error = max(self.max_error, other.max_error)

    def exact(self) -> bool:
        """Whether the counts alone are enough, or a `Closer` must look at the matrix once more."""
        return self.counts.exact()

    @cached_property
    def sizes(self) -> Sorted:
        """Weights by size, once all rows are in."""
        return self.counts.sorted()

    def result(self, outlier_multiplier: float = 6.0, closer: Closer | None = None) -> dict[str, float]:
        """The measures, as `weights.describe` names them; `closer` where `exact` says no."""
        import torch

        n = self.sizes.n
        if self.exact():
            median, moments = (
                self.sizes.median_range()[0],
                Moments.weighted(self.sizes.values, self.sizes.counts.double()),
            )
            outliers = self.sizes.above(outlier_multiplier * median)
        else:
            median, moments, outliers = closer.median, self.moments, closer.outliers
        peaks = torch.cat([part for _, part in sorted(self.peaks, key=lambda part: part[0])]).double()
        power = moments.m2 / n + moments.mean**2
        relative = self.squared_error / n / power if power else math.nan
        return {
            "numel": n,
            "max_abs": abs(peaks.max().item()),  # -0 of a matrix of zeros is 0
            "mean": moments.mean,
            "mean_abs": moments.size / n,
            "median_abs": median,
            **self.sizes.quantiles(QUANTILES),
            "std": math.sqrt(moments.m2 / n),
            "rms": math.sqrt(power),
            "kurtosis": n * moments.m4 / moments.m2**2 if moments.m2 else math.nan,
            "abs_outlier_frac": outliers / n,
            "channel_outlier_frac": (peaks > outlier_multiplier * peaks.median()).double().mean().item(),
            "w4_relative_mse": relative,
            "w4_snr_db": rtn.snr_db(relative),
            "w4_max_error": self.max_error if power else math.nan,
        }
