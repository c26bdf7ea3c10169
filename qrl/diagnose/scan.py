"""Everything that is measured of one matrix, in a single pass over it.

Sixteen bits have 65,536 patterns, so how often each occurs says all there is to say of single weights, exactly: mean, median,
kurtosis, outliers. Counting costs one look at each weight; the measures are then sums over patterns in float64. What needs
neighbours, the groups of the 4-bit proxy and the channels, is done on the same block while the processor's cache still holds it.

A float32 matrix is counted by its upper bits; its moments are summed beside that, and the two narrow ranges of patterns in
which the median and the outliers' threshold lie are looked at once more, so its median and outliers are exact, too.

Shapes: O output features, I input features, G groups of a row, S inputs in a group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from qrl.formats import rtn

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PATTERNS = 1 << 16
QUANTILES = {"abs_q99": 0.99, "abs_q999": 0.999, "abs_q9999": 0.9999}
CACHED = 1 << 19  # weights looked at together by all but the counting: few enough for a cache, enough to pay for a dozen calls
_SHIFT = 15  # of float32's 31 bits without sign: 65,536 ranges of sizes, each 1/256 wide


class Scan:
    """Sums over the rows of a matrix, fed in blocks; scans of different rows add up by `merge`.

    Args:
        bits, group_size: of the round-to-nearest proxy.
    """

    def __init__(self, bits: int = 4, group_size: int = 128) -> None:
        self.bits, self.group_size = bits, group_size
        self.dtype: torch.dtype | None = None
        self.counts: Tensor | None = None  # (65536,) int64
        self.moments = Moments()
        self.peaks: list[tuple[int, Tensor]] = []  # largest |w| of each row, by the first row's number
        self.squared_error = 0.0
        self.max_error = 0.0

    def add(self, block: Tensor, first: int = 0) -> None:
        """Takes in rows (R, I) as stored, the first of which is row `first` of the matrix."""
        import torch

        self.dtype = block.dtype
        counts = torch.bincount(self._patterns(block), minlength=PATTERNS)
        self.counts = counts if self.counts is None else self.counts.add_(counts)
        step = max(1, CACHED // block.shape[1]) if block.device.type == "cpu" else len(block)
        for part in block.split(step):
            values = part.float()
            if not self.exact():
                self.moments.merge(Moments.of(values))
            groups = rtn.grouped(values, self.group_size)
            largest = groups.abs().amax(-1, keepdim=True)
            self.peaks.append((first, largest.amax(1).flatten().cpu()))
            squared, self.max_error = rtn.scan(groups, largest, self.bits, least=self.max_error)
            self.squared_error += squared
            first += len(part)

    @staticmethod
    def _patterns(block: Tensor) -> Tensor:
        """Which of the 65,536 patterns each weight has: int32, flat."""
        import torch

        if block.dtype.itemsize == 2:
            return block.view(torch.int16).flatten().int().bitwise_and_(PATTERNS - 1)
        return block.float().view(torch.int32).flatten().bitwise_and(0x7FFFFFFF).bitwise_right_shift_(_SHIFT)

    def merge(self, other: Scan) -> None:
        """Takes in what another scan of the same matrix has seen."""
        self.dtype = other.dtype
        self.counts = other.counts if self.counts is None else self.counts.add_(other.counts)
        self.moments.merge(other.moments)
        self.peaks += other.peaks
        self.squared_error += other.squared_error
        self.max_error = max(self.max_error, other.max_error)

    @property
    def numel(self) -> int:
        """Weights seen."""
        return int(self.counts.sum())

    @property
    def broken(self) -> int:
        """How many of them are NaN or infinite."""
        return int(self.counts[~self._values().isfinite()].sum())

    def _values(self) -> Tensor:
        return values_of(self.dtype)

    def exact(self) -> bool:
        """Whether the counts alone are enough, or `Closer` must look at the matrix once more."""
        return self.dtype.itemsize == 2

    def quantiles(self) -> dict[str, float]:
        """abs_q99 and so on: the smallest |w| that this share of weights does not exceed; of float32 up to 1/256 too small."""
        sizes, below = self._sorted()
        ranks = [math.ceil(share * self.numel) - 1 for share in QUANTILES.values()]
        return {name: sizes[self._at(below, rank)].item() for name, rank in zip(QUANTILES, ranks, strict=True)}

    def _sorted(self) -> tuple[Tensor, Tensor]:
        """The patterns' sizes in order, and how many weights are no larger than each: (65536,) both."""
        sizes, order = sizes_of(self.dtype)
        return sizes, self.counts.cpu()[order].cumsum(0)

    @staticmethod
    def _at(below: Tensor, rank: int) -> int:
        import torch

        return int(torch.searchsorted(below, rank, right=True))

    def median_range(self) -> tuple[float, float, int]:
        """Sizes between which the lower median of |w| lies, low ≤ median < high, and how many weights are below low."""
        sizes, below = self._sorted()
        at = self._at(below, (self.numel - 1) // 2)
        low = sizes[at].item()
        if self.exact():
            return low, low, 0
        return low, sizes[at + 1].item(), int(below[at - 1]) if at else 0

    def result(self, outlier_multiplier: float = 6.0, closer: Closer | None = None) -> dict[str, float]:
        """The measures, as `weights.describe` names them; `closer` where `exact` says no."""
        import torch

        n, counts = self.numel, self.counts.cpu()
        if self.exact():
            median = self.median_range()[0]
            values = self._values()
            present = counts > 0
            moments = Moments.weighted(values[present], counts[present].double())
            outliers = int(counts[values.abs() > outlier_multiplier * median].sum())
        else:
            moments, median, outliers = self.moments, closer.median, closer.outliers(outlier_multiplier)
        peaks = torch.cat([part for _, part in sorted(self.peaks, key=lambda part: part[0])]).double()
        power = moments.m2 / n + moments.mean**2
        relative = self.squared_error / n / power if power else math.nan
        return {
            "numel": n,
            "max_abs": peaks.max().item(),
            "mean": moments.mean,
            "mean_abs": moments.size / n,
            "median_abs": median,
            **self.quantiles(),
            "std": math.sqrt(moments.m2 / n),
            "rms": math.sqrt(power),
            "kurtosis": n * moments.m4 / moments.m2**2 if moments.m2 else math.nan,
            "abs_outlier_frac": outliers / n,
            "channel_outlier_frac": (peaks > outlier_multiplier * peaks.median()).double().mean().item(),
            "w4_relative_mse": relative,
            "w4_snr_db": rtn.snr_db(relative),
            "w4_max_error": self.max_error if power else math.nan,
        }


@cache
def values_of(dtype: torch.dtype) -> Tensor:
    """(65536,) float64: the weight that each pattern stands for; of float32 the smallest |w| of each range."""
    import torch

    every = torch.arange(PATTERNS, dtype=torch.int32)
    if dtype.itemsize == 2:
        return every.to(torch.int16).view(dtype).double()
    return (every << _SHIFT).view(torch.float32).double()


@cache
def sizes_of(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The patterns' sizes in order, NaN at the end, and which pattern each is of: (65536,) both."""
    return values_of(dtype).abs().nan_to_num(math.inf).sort(stable=True)


class Closer:
    """The second look at a float32 matrix, at sizes near its median and near the outliers' threshold only.

    Args:
        scan: of the whole matrix.
        outlier_multiplier: an outlier is larger than this times the median.
    """

    def __init__(self, scan: Scan, outlier_multiplier: float) -> None:
        self.low, self.high, below = scan.median_range()
        self.rank = (scan.numel - 1) // 2 - below  # of the median among the sizes near it
        self.edges = (outlier_multiplier * self.low * (1 - 1e-6), outlier_multiplier * self.high * (1 + 1e-6))
        self.middle: list[Tensor] = []
        self.near: list[Tensor] = []
        self.above = 0

    def add(self, block: Tensor) -> None:
        """Takes in rows (R, I), each row of the matrix once."""
        sizes = block.float().abs().flatten()
        self.middle.append(sizes[(sizes >= self.low) & (sizes < self.high)].cpu())
        self.near.append(sizes[(sizes >= self.edges[0]) & (sizes < self.edges[1])].cpu())
        self.above += int((sizes >= self.edges[1]).sum())

    def merge(self, other: Closer) -> None:
        """Takes in what another look at the same matrix has seen."""
        self.middle += other.middle
        self.near += other.near
        self.above += other.above

    @property
    def median(self) -> float:
        """The lower median of |w|."""
        import torch

        return torch.cat(self.middle).kthvalue(self.rank + 1).values.item()

    def outliers(self, multiplier: float) -> int:
        """How many |w| are larger than `multiplier` times the median."""
        import torch

        return self.above + int((torch.cat(self.near).double() > multiplier * self.median).sum())


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
        """Of every weight of a tensor."""
        import torch

        flat = values.flatten().double()
        return cls.weighted(flat, torch.ones((), dtype=torch.float64, device=flat.device).expand_as(flat))

    @classmethod
    def weighted(cls, values: Tensor, counts: Tensor) -> Moments:
        """Of float64 values (K,), each as often as counts (K,) says."""
        n = counts.sum()
        mean = values @ counts / n
        centred = values - mean
        squares = centred * centred
        heavy = squares * counts
        sums = (n, mean, heavy.sum(), heavy @ centred, heavy @ squares, values.abs() @ counts)
        return cls(*(value.item() for value in sums))

    def merge(self, other: Moments) -> None:
        """Takes in another set."""
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
