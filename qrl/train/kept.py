"""How much of an update the stored weights keep: their dtype rounds away steps that are smaller than its spacing.

W is a weight before training, W + Δ the same weight as trained, in fp32, and Q rounds to the dtype of the checkpoint.
The *share kept* is <Q(W + Δ) − Q(W), Δ> / ‖Δ‖² over all weights as one vector: the projection of the stored update on
the true one. 1: the update is stored in full, whatever rounding adds beside it; 0: nothing of it is stored. It is the
`update_projection` of `diagnose`, with the checkpoint's dtype in place of a scheme. Shares of moved weights are those
of Zhu et al., The Path Not Taken (arXiv 2511.08567), which tells masters and stored weights apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from qrl.formats.kept import Kept

BLOCK = 1 << 22  # weights compared at once, which limits memory


@dataclass
class Update:
    """Sums over weights before training, as trained, and as stored."""

    stored_in: str  # dtype of the checkpoint: "bfloat16"
    weights: int = 0
    moved: int = 0  # by training
    moved_stored: int = 0  # as stored
    length: float = 0.0  # ‖Δ‖²
    product: float = 0.0  # <Q(W + Δ) − Q(W), Δ>
    lost: float = 0.0  # ‖Q(W + Δ) − (W + Δ)‖²

    def add(self, before: Tensor, after: Tensor) -> None:
        """Add a weight before training and as trained, of one shape on one device, in blocks."""
        dtype = getattr(torch, self.stored_in)
        for block, trained in zip(before.flatten().split(BLOCK), after.flatten().split(BLOCK), strict=True):
            old, new = block.float(), trained.float()
            stored_old, stored_new = old.to(dtype).float(), new.to(dtype).float()
            delta = new - old
            self.weights += old.numel()
            self.moved += int(delta.count_nonzero())
            self.moved_stored += int((stored_new != stored_old).sum())
            self.length += _sum_of_squares(delta)
            self.product += torch.sum(delta * (stored_new - stored_old), dtype=torch.float64).item()
            self.lost += _sum_of_squares(stored_new - new)

    @property
    def kept(self) -> Kept | None:
        """The shares; None where there is no weight to count."""
        if not self.weights:
            return None
        share = self.product / self.length if self.length else math.nan
        return Kept(share, self.moved / self.weights, self.moved_stored / self.weights, self.stored_in)

    @property
    def residual(self) -> float:
        """‖Q(W + Δ) − (W + Δ)‖ / ‖Δ‖: the length of what rounding changes over that of the update; 0 without one."""
        return math.sqrt(self.lost / self.length) if self.length else 0.0


def _sum_of_squares(values: Tensor) -> float:
    return torch.linalg.vector_norm(values, dtype=torch.float64).item() ** 2
