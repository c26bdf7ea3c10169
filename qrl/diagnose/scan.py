"""All statistics of one matrix, in a single pass over it.

Single weights are counted by their bit patterns (`patterns`), which costs one look at each; their statistics are then
sums over patterns in float64. What needs neighbours, the groups of the round-to-nearest proxy and the channels, is
computed on the same block while it is in the processor's cache, in memory that is allocated once: fresh pages cost more
than the arithmetic.

A float32 matrix is counted by its upper bits; its moments are summed separately, and it needs a second pass.

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
from qrl.formats import proxy

QUANTILES = {"abs_q99": 0.99, "abs_q999": 0.999, "abs_q9999": 0.9999}


def proxy_prefix(bits: int) -> str:
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
        weighted_squares = squares * counts
        return cls(
            n=n.item(),
            mean=mean.item(),
            m2=weighted_squares.sum().item(),
            m3=(weighted_squares @ centred).item(),
            m4=(weighted_squares @ squares).item(),
            size=(values.abs() @ counts).item(),
        )

    def merge(self, moments: Moments) -> None:
        """Add another set."""
        a = self.n
        b = moments.n
        n = a + b
        if not n:
            return
        delta = moments.mean - self.mean
        m2 = self.m2  # as it is before the sums below
        m3 = self.m3
        self.m4 += moments.m4 + delta**4 * a * b * (a * a - a * b + b * b) / n**3
        self.m4 += 6 * delta**2 * (a * a * moments.m2 + b * b * m2) / n**2 + 4 * delta * (a * moments.m3 - b * m3) / n
        self.m3 += moments.m3 + delta**3 * a * b * (a - b) / n**2 + 3 * delta * (a * moments.m2 - b * m2) / n
        self.m2 += moments.m2 + delta**2 * a * b / n
        self.mean += delta * b / n
        self.size += moments.size
        self.n = n


class Scratch(threading.local):
    """Working memory of each thread, allocated once."""

    buffer: Tensor | None = None  # (3, numel) float32, for the largest block so far

    def parts(self, numel: int, device: torch.device) -> Tensor:
        """Return (3, numel) float32 with any values."""
        if self.buffer is None or self.buffer.shape[1] < numel:
            self.buffer = torch.empty(3, numel, dtype=torch.float32, device=device)
        return self.buffer[:, :numel]


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
        padded_width = math.ceil(block.shape[1] / self.group_size) * self.group_size
        values_buffer, *free_buffers = self.scratch.parts(len(block) * padded_width, block.device)
        self.dtype = block.dtype
        self.counts += patterns.count(block, values_buffer.view(torch.int32))
        values = values_buffer[: block.numel()].view(block.shape).copy_(block)
        if not patterns.exact(self.dtype):
            flat = values.flatten().double()
            self.moments.merge(Moments.of(flat, flat.new_ones(()).expand_as(flat)))
        groups = proxy.grouped(values, self.group_size)
        largest = torch.maximum(groups.amax(-1, keepdim=True), groups.amin(-1, keepdim=True).neg_())
        self.peaks.append((first, largest.amax(1).flatten().cpu()))
        squared_error, self.max_error = proxy.scan(
            groups, largest, self.bits, known_error=self.max_error, scratch=free_buffers
        )
        self.squared_error += squared_error

    def merge(self, scan: Scan) -> None:
        """Add the rows of another scan of the same matrix."""
        self.dtype = scan.dtype
        self.counts += scan.counts.cpu()  # on a GPU each thread has a queue of its own, and tensors are not shared
        self.moments.merge(scan.moments)
        self.peaks += scan.peaks
        self.squared_error += scan.squared_error
        self.max_error = max(self.max_error, scan.max_error)

    @cached_property
    def sizes(self) -> Sorted:
        """The weights by size, once all rows are in."""
        return patterns.by_size(self.counts, self.dtype)

    def result(self, outlier_multiplier: float, exact_median: ExactMedian | None = None) -> dict[str, float]:
        """Return the statistics that `weights.measure` names; `exact_median` is needed unless sizes are exact."""
        n = self.sizes.n
        moments = self.moments
        if exact_median:
            median, outliers = exact_median.result()
        else:
            median, _, _ = self.sizes.median_range()
            moments = Moments.of(self.sizes.values, self.sizes.counts.double())
            outliers = self.sizes.above(outlier_multiplier * median)
        peaks = torch.cat([peaks for _, peaks in sorted(self.peaks, key=lambda peak: peak[0])]).double()

        power = moments.m2 / n + moments.mean**2
        relative_mse = math.nan  # of a matrix of zeros
        max_error = math.nan
        if power:
            relative_mse = self.squared_error / n / power
            max_error = self.max_error
        prefix = proxy_prefix(self.bits)
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
            f"{prefix}_relative_mse": relative_mse,
            f"{prefix}_snr_db": proxy.snr_db(relative_mse),
            f"{prefix}_max_error": max_error,
        }
