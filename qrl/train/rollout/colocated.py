"""Training and an engine that share one GPU: whose memory it is, and whose random numbers."""

import contextlib
from collections.abc import Iterator

import torch

from qrl.recipe import Rollout

_TAKEN = 0.5  # largest share of the GPU for weights, gradients, optimizer and an awake engine; the rest: activations


def sleeps(settings: Rollout, model) -> bool:
    """Return whether a colocated engine gives its memory back during updates; `auto` depends on model and GPU."""
    if settings.sleep != "auto":
        return settings.sleep == "on"
    weights = list(model.parameters())
    stored = sum(weight.numel() * weight.element_size() for weight in weights)
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    card = torch.cuda.get_device_properties(weights[0].device).total_memory
    return memory_is_short(stored, trained, settings.gpu_memory_utilization, card)


def memory_is_short(stored: int, trained: int, share: float, card: int) -> bool:
    """Return whether training and an awake engine leave activations too little of a card; card and stored in bytes."""
    # A trained weight has a gradient and AdamW's two moments: 12 bytes in fp32.
    return stored + 12 * trained + share * card > _TAKEN * card


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Let an engine draw from its own seed, without changing what training draws afterwards.

    On a CPU vLLM samples tokens with torch's generator; on a GPU it may seed each completion from numpy's.
    """
    import numpy

    state = numpy.random.get_state()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        numpy.random.seed(seed % 2**32)
        try:
            yield
        finally:
            numpy.random.set_state(state)
