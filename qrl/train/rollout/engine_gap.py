"""How far the sampling engine is from the trained model, in log-probabilities of the sampled tokens.

GRPO assumes that completions were drawn from the model that is updated. vLLM computes with other kernels, and perhaps
in another format, so it draws from a slightly different distribution q, while the trainer has p. TRL corrects for it
with the weights p/q; here their size is measured, so that a watcher can stop a training before they lose their meaning.
"""

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
    scored = mask.bool() & ~torch.isnan(engine)
    log_ratio = torch.where(scored, trainer.double() - engine.double(), 0.0)  # log p/q
    ratio = log_ratio.exp()
    k3_terms = ratio - 1 - log_ratio

    position = scored.cumsum(dim=1)  # of a token among the scored ones of its completion, from 1
    length = scored.sum(dim=1, keepdim=True)
    quarter = (length + 3) // 4
    in_first = scored & (position <= quarter)
    in_last = scored & (position > length - quarter)

    # One exchange between the processes for all sums.
    local_sums = [
        scored.sum(),
        -log_ratio.sum(),
        k3_terms.sum(),
        ratio[scored].sum(),
        ratio[scored].square().sum(),
        quarter.sum(),
        k3_terms[in_first].sum(),
        k3_terms[in_last].sum(),
    ]
    sums = gather(torch.stack([value.double() for value in local_sums])[None]).sum(dim=0).tolist()
    tokens, k1, k3, weights, squared_weights, quarter_tokens, k3_first, k3_last = sums
    sequence_log_ratios = gather(torch.where(scored.any(dim=1), log_ratio.sum(dim=1), torch.nan))
    if tokens < 1:
        raise ValueError("no token was scored by both the engine and the trainer")
    return Gap(
        kl_k1=k1 / tokens,
        kl_k3=k3 / tokens,
        kl_k3_first_quarter=k3_first / quarter_tokens,
        kl_k3_last_quarter=k3_last / quarter_tokens,
        token_ess=weights * weights / (tokens * squared_weights),
        sequence_ess=effective_share(sequence_log_ratios[~sequence_log_ratios.isnan()]),
    )


def effective_share(log_weights: Tensor) -> float:
    """Return the effective sample size of n weights, as a share of n, from their logarithms (n,) of any magnitude."""
    log_size = 2 * torch.logsumexp(log_weights, 0) - torch.logsumexp(2 * log_weights, 0)
    return float(log_size.exp() / len(log_weights))
