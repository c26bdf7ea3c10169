"""How far the engine that samples is from the model that is trained, in log-probabilities of the sampled tokens."""

from __future__ import annotations

from collections.abc import Callable
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


def measure(
    trainer: torch.Tensor,
    engine: torch.Tensor,
    mask: torch.Tensor,
    gather: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
) -> Gap:
    """The gap over a batch, or over the batches of all processes.

    Args:
        trainer: (B, T) log p of the sampled tokens under the model that is trained.
        engine: (B, T) log q of the same tokens as the engine gave them; NaN where it could not say.
        mask: (B, T) true where a token was sampled.
        gather: puts the processes' tensors together along the first dimension.

    Raises:
        ValueError: no token was scored by both.

    Source: k1 and k3, Schulman, "Approximating KL Divergence" (2020), with samples from q; ESS = (Σw)² / (n Σw²), Kish 1965.
    """
    import torch

    known = mask.bool() & ~torch.isnan(engine)
    difference = torch.where(known, trainer.double() - engine.double(), 0.0)
    a_token, ratio = difference[known], difference[known].exp()
    parts = [known.sum(), -a_token.sum(), (ratio - 1 - a_token).sum(), ratio.sum(), ratio.square().sum()]
    tokens, k1, k3, w, w2 = gather(torch.stack([part.double() for part in parts])[None]).sum(dim=0).tolist()
    whole = gather(torch.where(known.any(dim=1), difference.sum(dim=1), torch.nan))
    if tokens < 1:
        raise ValueError("no token was scored by both the engine and the trainer")
    return Gap(k1 / tokens, k3 / tokens, w * w / (tokens * w2), effective_share(whole[~whole.isnan()]))


def effective_share(logs: torch.Tensor) -> float:
    """Effective sample size, as a share, of n weights given by their logarithms (n,), however small or large."""
    import torch

    return float((2 * torch.logsumexp(logs, 0) - torch.logsumexp(2 * logs, 0)).exp() / len(logs))
