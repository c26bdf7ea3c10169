"""How far the sampling engine is from the trained model, in log-probabilities of the sampled tokens."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

PREFIX = "rollout/"  # of the metrics' names, in TRL's log and in MLflow
METRICS = ("kl_k1", "kl_k3", "kl_k3_first_quarter", "kl_k3_last_quarter", "token_ess", "sequence_ess")
METRICS += ("sync_s", "generate_s", "completions_per_s", "tokens_per_s")


@dataclass(frozen=True)
class Gap:
    """KL of the engine's distribution q to the trainer's p, and the sample size left after correcting for it."""

    kl_k1: float  # mean of log q − log p, in nats per token: unbiased, may be negative
    kl_k3: float  # mean of p/q − 1 − log(p/q), in nats per token: unbiased, never negative
    kl_k3_first_quarter: float  # the same over the first quarter of each completion's tokens, rounded up
    kl_k3_last_quarter: float  # and over the last: the engine's errors add up along a completion
    token_ess: float  # effective sample size of the weights p/q over tokens, as a share of them
    sequence_ess: float  # the same over whole completions, weighted by products over their tokens


def measure(trainer: Tensor, engine: Tensor, mask: Tensor, gather: Callable = lambda tensor: tensor) -> Gap:
    """Return the gap over a batch, or over the batches of all processes.

    Args:
        trainer: (B, T) log p of the sampled tokens under the trained model.
        engine: (B, T) log q of the same tokens from the engine; NaN where it gave none.
        mask: (B, T) true where a token was sampled.
        gather: concatenates the processes' tensors along the first dimension.

    Raises:
        ValueError: no token was scored by both.

    Source: k1 and k3, Schulman, "Approximating KL Divergence" (2020), with samples from q; ESS = (Σw)² / (n Σw²), Kish
    1965.
    """
    known = mask.bool() & ~torch.isnan(engine)
    difference = torch.where(known, trainer.double() - engine.double(), 0.0)
    ratio = difference.exp()
    k3_terms, place, count = ratio - 1 - difference, known.cumsum(dim=1), known.sum(dim=1, keepdim=True)
    quarter = (count + 3) // 4
    first, last = known & (place <= quarter), known & (place > count - quarter)
    parts = [known.sum(), -difference.sum(), k3_terms.sum(), ratio[known].sum(), ratio[known].square().sum()]
    parts += [quarter.sum(), k3_terms[first].sum(), k3_terms[last].sum()]
    sums = gather(torch.stack([part.double() for part in parts])[None]).sum(dim=0).tolist()
    tokens, k1, k3, w, w2, quarters, k3_first, k3_last = sums
    by_sequence = gather(torch.where(known.any(dim=1), difference.sum(dim=1), torch.nan))
    if tokens < 1:
        raise ValueError("no token was scored by both the engine and the trainer")
    return Gap(
        kl_k1=k1 / tokens,
        kl_k3=k3 / tokens,
        kl_k3_first_quarter=k3_first / quarters,
        kl_k3_last_quarter=k3_last / quarters,
        token_ess=w * w / (tokens * w2),
        sequence_ess=effective_share(by_sequence[~by_sequence.isnan()]),
    )


def effective_share(logs: Tensor) -> float:
    """Return the effective sample size of n weights, as a share of n, from their logarithms (n,) of any magnitude."""
    return float((2 * torch.logsumexp(logs, 0) - torch.logsumexp(2 * logs, 0)).exp() / len(logs))
