"""Moments that add up: of parts of a matrix, or of values that are counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


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
