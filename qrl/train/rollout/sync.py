"""What is sent to a rollout engine: full-precision weights under their checkpoint's names, computed out of place.

TRL merges the adapter into the base, reads the base and takes the adapter out again. In four bits that streams packed codes
and rounds the base anew at every step (its error grew from 10 % to 22 % in three steps); in bf16 it drifts more slowly. Here
nothing of the trained model is written to: each tensor is the dequantized base plus the adapter's share, made, sent and let go.
Where linears compute with Q(W) the engine is sent Q(W), so that it samples from what the loss sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn


def named_weights(model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """The policy's weights as its checkpoint would name them, one at a time; the model is left bit for bit as it is.

    Args:
        model: a transformers model, or a PEFT model over one; its linears in full precision, NF4 or INT8.
        dtype: to send in; None sends a plain weight as it is stored, and a dequantized or adapted one in the dtype that it
            dequantizes to.

    Yields:
        (name, tensor of the weight's own shape); tied weights once. A tensor may be the model's own: read it, never write.

    Source: ΔW = Σ over active adapters of (α/r) B A (arXiv 2106.09685); base and ΔW are added in fp32 and rounded once.
    """
    import torch

    from qrl.train.qat import linear

    layers = {id(layer.base_layer): layer for layer in model.modules() if _is_lora(layer)}
    sent = set()
    with torch.no_grad():
        for prefix, module in model.named_modules():
            for name, weight in module.named_parameters(prefix, recurse=False):
                if id(weight) in sent or ".lora_" in name:
                    continue
                sent.add(id(weight))
                layer = layers.get(id(module)) if name.endswith(".weight") else None
                if isinstance(module, linear.QATLinear) and weight is module.weight:
                    value = module.multiplied  # what the loss sees, not the master
                else:
                    value = full(weight, module) if layer is None else adapted(layer)
                yield _checkpoint_name(name), value if dtype is None else value.to(dtype)


def full(weight: torch.Tensor, module: nn.Module) -> torch.Tensor:
    """A weight's values, whatever it is stored in; NF4 and INT8 give a new tensor (out_features, in_features)."""
    from peft.utils.integrations import dequantize_bnb_weight, get_bnb_param_type

    if not get_bnb_param_type(weight):
        return weight.detach()
    return dequantize_bnb_weight(weight, state=getattr(module, "state", None)).detach()


def adapted(layer: nn.Module) -> torch.Tensor:
    """Base plus ΔW of one LoRA layer as a new tensor (out_features, in_features), in the dtype of the base's values."""
    base = full(layer.base_layer.weight, layer.base_layer)
    total = base.float()
    total = total.clone() if total.data_ptr() == base.data_ptr() else total
    for name in layer.active_adapters:
        if name in layer.lora_A:
            a, b = layer.lora_A[name].weight.detach().float(), layer.lora_B[name].weight.detach().float()
            total.addmm_(b, a, alpha=layer.scaling[name])
    return total.to(base.dtype)


def _is_lora(module: nn.Module) -> bool:
    return hasattr(module, "base_layer") and hasattr(module, "lora_A")


def _checkpoint_name(name: str) -> str:
    for prefix in ("module.", "base_model.model."):
        name = name.removeprefix(prefix)
    return name.replace(".base_layer", "").replace("_checkpoint_wrapped_module.", "")
