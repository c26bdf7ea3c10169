"""What quantization-aware training measures before its first step: scales of activations, and how far Q(W) is from W."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from qrl.errors import BadInput
from qrl.formats.fakequant import rounding
from qrl.train.qat.linear import QATLinear, off

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def calibrate(model: PreTrainedModel, batches: Sequence[dict[str, Tensor]]) -> dict[str, float]:
    """Sets the scale of each linear's inputs from the largest |x| over texts, in full precision.

    Args:
        model: with linears attached.
        batches: keyword arguments of the model: input_ids and attention_mask, (B, L); padding does not count.

    Returns:
        Linear's name → global scale, as `set_activation_scales` takes it.
    """
    named = {path: module for path, module in model.named_modules() if isinstance(module, QATLinear)}
    largest: dict[str, Tensor] = {}
    mask: list[Tensor] = []

    def watch(path: str):
        def note(module, given):
            seen = given[0][mask[0]].abs().amax().float()
            largest[path] = torch.maximum(largest.get(path, seen), seen)

        return note

    hooks = [module.register_forward_pre_hook(watch(path)) for path, module in named.items()]
    training = model.training
    try:
        with off(model), torch.no_grad():
            model.eval()
            for batch in batches:
                mask[:] = [batch["attention_mask"].bool()]
                model(**batch, use_cache=False)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    found = {path: float(rounding.global_scale(each)) for path, each in largest.items()}
    set_activation_scales(model, found)
    return found


def set_activation_scales(model: nn.Module, found: dict[str, float]) -> None:
    """Puts scales of an earlier calibration back.

    Raises:
        BadInput: they belong to another model.
    """
    named = {path: module for path, module in model.named_modules() if isinstance(module, QATLinear)}
    if missing := sorted(set(named) ^ set(found)):
        raise BadInput(
            f"The activation scales do not fit the model: {missing[0]} is missing or unknown; calibrate anew."
        )
    shared: dict[float, Tensor] = {}  # one tensor a value, by which members of a fold know that they are fed the same
    for path, module in named.items():
        scale = torch.tensor([found[path]], dtype=torch.float32, device=module.weight.device)
        module.input_global_scale = shared.setdefault(found[path], scale)


def logprob_gap(model: PreTrainedModel, batches: Sequence[dict[str, Tensor]]) -> tuple[float, float]:
    """How far Q(W) moves the log-probabilities of given tokens, in nats: mean and largest |log p_Q − log p| a token.

    Args:
        model: with linears attached, and activations calibrated where the format asks for it.
        batches: input_ids and attention_mask, (B, L), padded on the right; padding does not count.
    """
    gaps = []
    training = model.training
    with torch.no_grad():
        model.eval()
        for batch in batches:
            quantized = _logprobs(model, batch)
            with off(model):
                gaps.append((quantized - _logprobs(model, batch)).abs()[batch["attention_mask"][:, 1:].bool()])
    model.train(training)
    every = torch.cat(gaps)
    return float(every.mean()), float(every.max())


def _logprobs(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """Of each next token, (B, L - 1), float32."""
    logits = model(**batch, use_cache=False).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None]).squeeze(-1)
