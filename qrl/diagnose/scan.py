"""All statistics of one matrix, in a single pass over it.

Single weights are counted by their bit patterns (`patterns`), which costs one look at each; their statistics are then
sums over patterns in float64. What needs neighbours, the groups of the round-to-nearest proxy and the channels, is
computed on the same block while it is in the processor's cache, in memory that is allocated once: fresh pages cost more
than the arithmetic.

A float32 matrix is counted by its upper bits, its moments are summed beside that, and it needs a second pass.

Shapes: R rows of a block, I input features, G groups of a row, S inputs in a group.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from qrl.diagnose import patterns
from qrl.diagnose.patterns import ExactMedian, Sorted
from qrl.formats import rtn

QUANTILES = {"abs_q99": 0.99, "abs_q999": 0.999, "abs_q9999": 0.9999}


def proxy(bits: int) -> str:
    """Return the prefix of the proxy's columns: `w4` as in study 000 for 4 bits, else `rtn`."""
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
    def of(cls, values: Tensor, counts: Tensor) -> Moments:
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
        a, b, delta = self.n, other.n, other.mean - self.mean
        n, m2, m3 = a + b, self.m2, self.m3
        if not n:
            return
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
        if self.whole is None or self.whole.shape[1] < numel:
            self.whole = torch.empty(3, numel, dtype=torch.float32, device=device)
        return self.whole[:, :numel]


@dataclass
class Scan:
    """Sums over the rows of a matrix, fed in blocks; scans of different rows add up by `merge`."""

    bits: int  # of the round-to-nearest proxy
    group_size: int
    scratch: Scratch  # shared by the scans of one walk
    dtype: torch.dtype | None = None
    counts: Tensor | int = 0
    moments: Moments = field(default_factory=Moments)
    peaks: list[tuple[int, Tensor]] = field(default_factory=list)  # first row of a block, and its rows' largest |w|
    squared_error: float = 0.0
    max_error: float = 0.0

    def add(self, first: int, block: Tensor) -> None:
        """Add rows (R, I) as stored, the first of which is row `first` of the matrix."""
        size = len(block) * (block.shape[1] + -block.shape[1] % self.group_size)
        own, *free = self.scratch.parts(size, block.device)
        self.dtype = block.dtype
        self.counts += patterns.count(block, own.view(torch.int32))
        values = own[: block.numel()].view(block.shape).copy_(block)
        if not patterns.exact(self.dtype):
            flat = values.flatten().double()
            self.moments.merge(Moments.of(flat, flat.new_ones(()).expand_as(flat)))
        groups = rtn.grouped(values, self.group_size)
        largest = torch.maximum(groups.amax(-1, keepdim=True), groups.amin(-1, keepdim=True).neg_())
        self.peaks.append((first, largest.amax(1).flatten().cpu()))
        squared, self.max_error = rtn.scan(groups, largest, self.bits, least=self.max_error, scratch=free)
        self.squared_error += squared

    def merge(self, other: Scan) -> None:
        """Add the rows of another scan of the same matrix."""
        self.dtype = other.dtype
        self.counts += other.counts.cpu()  # on a GPU each thread has a queue of its own, and tensors are not shared
        self.moments.merge(other.moments)
        self.peaks += other.peaks
        self.squared_error += other.squared_error
        self.max_error = max(self.max_error, other.max_error)

    @cached_property
    def sizes(self) -> Sorted:
        """The weights by size, once all rows are in."""
        return patterns.by_size(self.counts, self.dtype)

    def result(self, outlier_multiplier: float, second: ExactMedian | None = None) -> dict[str, float]:
        """Return the statistics that `weights.measure` names; `second` is needed unless `sizes.exact`."""
        n, moments = self.sizes.n, self.moments
        if second:
            median, outliers = second.result()
        else:
            median = self.sizes.median_range()[0]
            moments = Moments.of(self.sizes.values, self.sizes.counts.double())
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
