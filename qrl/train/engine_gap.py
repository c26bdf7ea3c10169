"""How far the engine that samples is from the model that is trained, in log-probabilities of the sampled tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Gap:
    """KL of the engine's distribution to the trainer's, a token, and what correcting for it leaves of the sample."""

    kl_k1: float  # mean of log q − log p, in nats a token: unbiased, may be negative
    kl_k3: float  # mean of p/q − 1 − log(p/q), in nats a token: unbiased, never negative
    token_ess: float  # effective sample size of the weights p/q over tokens, as a share of them
    sequence_ess: float  # the same over whole completions, whose weights are products


def sums(trainer: torch.Tensor, engine: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """What `gap` is made of, additive over batches and processes.

    Args:
        trainer: (B, T) log p of the sampled tokens under the model that is trained.
        engine: (B, T) log q of the same tokens as the engine gave them; NaN where it could not say.
        mask: (B, T) true where a token was sampled.

    Returns:
        (8,) float64: tokens, Σk1, Σk3, Σw, Σw² with w = p/q of a token; completions, ΣW, ΣW² with W = p/q of a whole one.
    """
    import torch

    known = mask.bool() & ~torch.isnan(engine)
    difference = torch.where(known, trainer.double() - engine.double(), 0.0)
    ratio = difference.exp()[known]
    a_token = difference[known]
    rows = known.any(dim=1)
    whole = difference.sum(dim=1)[rows].clamp(-80, 80).exp()
    parts = [known.sum(), -a_token.sum(), (ratio - 1 - a_token).sum(), ratio.sum(), ratio.square().sum()]
    parts += [rows.sum(), whole.sum(), whole.square().sum()]
    return torch.stack([part.double() for part in parts])


def gap(total: torch.Tensor) -> Gap:
    """The gap from added-up `sums`.

    Raises:
        ValueError: no token was scored.

    Source: k1 and k3, Schulman, "Approximating KL Divergence" (2020), with samples from q; ESS = (Σw)² / (n Σw²), Kish 1965.
    """
    tokens, k1, k3, w, w2, sequences, whole, whole2 = total.tolist()
    if tokens < 1:
        raise ValueError("no token was scored by both the engine and the trainer")
    return Gap(k1 / tokens, k3 / tokens, w * w / (tokens * w2), whole * whole / (sequences * whole2))
