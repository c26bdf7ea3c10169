"""All statistics of one matrix, in a single pass over it.

Single weights are counted by their bit patterns (`patterns`), which costs one look at each; their statistics are then
sums over patterns in float64. What needs neighbours, the groups of the round-to-nearest proxy and the channels, is
computed on the same block while it is in the processor's cache, in memory that is allocated once: fresh pages cost more
than the arithmetic.

A float32 matrix is counted by its upper bits, and its moments are summed beside that. The two narrow ranges that hold
the median and the outliers' threshold get a second pass (`exact_median`), so both are exact.

Shapes: R rows of a block, I input features, G groups of a row, S inputs in a group.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from qrl.diagnose.exact_median import ExactMedian
from qrl.diagnose.patterns import Counts, Sorted
from qrl.formats import rtn

if TYPE_CHECKING:
    import torch
    from torch import Tensor

QUANTILES = {"abs_q99": 0.99, "abs_q999": 0.999, "abs_q9999": 0.9999}


def proxy(bits: int) -> str:
    """Return the prefix of the proxy's columns: `w4` as in the seed study for 4 bits, else `rtn`."""
    return "w4" if bits == 4 else "rtn"


@dataclass
class Moments:
    """Sums of powers about the mean, which add up without loss: m_k = Σ (w - mean)^k over n weights.

    Source: Pébay, SAND2008-6212, equations 2.1 to 2.4, for two sets.
    """

    n: float = 0
    mean: float = 0.0
    m2: float = 0.0
    m3: float = 0.0
    m4: float = 0.0
    size: float = 0.0  # Σ |w|

    @classmethod
    def of(cls, values: Tensor) -> Moments:
        """Return the moments of every weight of a tensor."""
        import torch

        flat = values.flatten().double()
        return cls.weighted(flat, torch.ones((), dtype=torch.float64, device=flat.device).expand_as(flat))

    @classmethod
    def weighted(cls, values: Tensor, counts: Tensor) -> Moments:
        """Return the moments of float64 values (K,) that occur as often as counts (K,) say."""
        n = counts.sum()
        mean = values @ counts / n
        centred = values - mean
        squares = centred * centred
        heavy = squares * counts
        sums = (n, mean, heavy.sum(), heavy @ centred, heavy @ squares, values.abs() @ counts)
        return cls(*(value.item() for value in sums))

    def merge(self, other: Moments) -> None:
        """Add another set."""
        n = self.n + other.n
        if not n:
            return
        a, b, delta = self.n, other.n, other.mean - self.mean
        m2, m3 = self.m2, self.m3
        self.m4 += other.m4 + delta**4 * a * b * (a * a - a * b + b * b) / n**3
        self.m4 += 6 * delta**2 * (a * a * other.m2 + b * b * m2) / n**2 + 4 * delta * (a * other.m3 - b * m3) / n
        self.m3 += other.m3 + delta**3 * a * b * (a - b) / n**2 + 3 * delta * (a * other.m2 - b * m2) / n
        self.m2 += other.m2 + delta**2 * a * b / n
        self.mean += delta * b / n
        self.size += other.size
        self.n = n


class Scratch(threading.local):
    """Working memory of each thread, allocated once."""

    whole: Tensor | None = None  # (3, numel) float32, for the largest block so far

    def parts(self, numel: int, device: torch.device) -> Tensor:
        """Return (3, numel) float32 with any values."""
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
        self.peaks: list[tuple[int, Tensor]] = []  # first row of a block, and the largest |w| of each of its rows
        self.squared_error = 0.0
        self.max_error = 0.0

    def add(self, block: Tensor, first: int = 0) -> None:
        """Add rows (R, I) as stored, the first of which is row `first` of the matrix."""
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
        """Add the rows of another scan of the same matrix."""
        self.counts.merge(other.counts)
        self.moments.merge(other.moments)
        self.peaks += other.peaks
        self.squared_error += other.squared_error
        self.max_error = max(self.max_error, other.max_error)

    def exact(self) -> bool:
        """Return whether the counts are enough; else an `ExactMedian` must pass over the matrix too."""
        return self.counts.exact()

    @cached_property
    def sizes(self) -> Sorted:
        """The weights by size, once all rows are in."""
        return self.counts.sorted()

    def result(self, outlier_multiplier: float = 6.0, second: ExactMedian | None = None) -> dict[str, float]:
        """Return the statistics that `weights.describe` names; `second` is needed unless `exact`."""
        import torch

        n, moments = self.sizes.n, self.moments
        if second:
            median, outliers = second.median, second.outliers
        else:
            median, moments = (
                self.sizes.median_range()[0],
                Moments.weighted(self.sizes.values, self.sizes.counts.double()),
            )
            outliers = self.sizes.above(outlier_multiplier * median)
        peaks = torch.cat([part for _, part in sorted(self.peaks, key=lambda part: part[0])]).double()
        power = moments.m2 / n + moments.mean**2
        relative, worst = (self.squared_error / n / power, self.max_error) if power else (math.nan, math.nan)
        error = {"relative_mse": relative, "snr_db": rtn.snr_db(relative), "max_error": worst}
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
            **{f"{proxy(self.bits)}_{name}": value for name, value in error.items()},
        }
