"""What quantization-aware training measures before its first step: activation scales, and how far Q(W) is from W."""

import contextlib
import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from qrl.errors import BadInput
from qrl.formats.fakequant import rounding
from qrl.train.qat.linear import QATLinear, off


def calibrate(model: nn.Module, batches: Sequence[dict[str, Tensor]]) -> dict[str, float]:
    """Set the scale of each linear's inputs from the largest |x| over texts, in full precision.

    Args:
        model: with linears attached, in evaluation mode.
        batches: keyword arguments of the model: input_ids and attention_mask, (B, L); padding does not count.

    Returns:
        Linear's name → global scale, for `set_activation_scales`.
    """
    largest: dict[str, Tensor] = {}

    def note(path: str, module: QATLinear, inputs: tuple[Tensor]) -> None:
        seen = inputs[0][mask].abs().amax().float()
        largest[path] = torch.maximum(largest.get(path, seen), seen)

    with off(model), torch.no_grad(), contextlib.ExitStack() as hooks:
        for path, module in _attached(model).items():
            hooks.enter_context(module.register_forward_pre_hook(functools.partial(note, path)))
        for batch in batches:
            mask = batch["attention_mask"].bool()
            model(**batch, use_cache=False)
    scales = {path: float(rounding.global_scale(value)) for path, value in largest.items()}
    set_activation_scales(model, scales)
    return scales


def set_activation_scales(model: nn.Module, scales: dict[str, float]) -> None:
    """Set the scales of an earlier calibration; raise BadInput if they belong to another model."""
    attached = _attached(model)
    if missing := sorted(set(attached) ^ set(scales)):
        raise BadInput(f"The activation scales do not fit the model ({missing[0]} is in only one): calibrate again.")
    shared: dict[float, Tensor] = {}  # one tensor per value, so that members of a fold recognize equal inputs
    for path, module in attached.items():
        scale = torch.tensor([scales[path]], dtype=torch.float32, device=module.weight.device)
        module.input_global_scale = shared.setdefault(scales[path], scale)


def _attached(model: nn.Module) -> dict[str, QATLinear]:
    return {path: module for path, module in model.named_modules() if isinstance(module, QATLinear)}


def logprob_gap(model: nn.Module, batches: Sequence[dict[str, Tensor]]) -> tuple[float, float]:
    """Return how far Q(W) moves log-probabilities, in nats: mean and largest |log p_Q − log p| per token.

    Args:
        model: with linears attached and calibrated, in evaluation mode.
        batches: input_ids and attention_mask, (B, L), padded on the right; padding does not count.
    """
    gaps = []
    with torch.no_grad():
        for batch in batches:
            quantized = _logprobs(model, batch)
            with off(model):
                gaps.append((quantized - _logprobs(model, batch)).abs()[batch["attention_mask"][:, 1:].bool()])
    every = torch.cat(gaps)
    return float(every.mean()), float(every.max())


def _logprobs(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the log-probability of each next token, (B, L - 1), float32."""
    logits = model(**batch, use_cache=False).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None]).squeeze(-1)
