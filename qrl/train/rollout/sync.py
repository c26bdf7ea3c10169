"""The weights a rollout engine is sent: full precision, under their checkpoint's names, computed out of place.

TRL merges and unmerges the adapter in place, and the base drifts (README.md). Here the trained model is never written
to: each tensor is the dequantized base plus the adapter's share, sent and then freed; of quantized linears it is Q(W).
"""

from collections.abc import Iterator

import torch
from torch import nn

from qrl.train import sharded


def named_weights(
    model: nn.Module, dtype: torch.dtype | None = None, *, adapters: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the policy's weights under their checkpoint's names, one at a time; the model stays bit for bit the same.

    Where FSDP 2 shards them, all processes iterate together, and at most one fold is gathered.

    Args:
        model: a transformers model, or a PEFT model over one; its linears in full precision, NF4 or INT8.
        dtype: to send in; None keeps a plain weight's own, and a dequantized or adapted one's after dequantization.
        adapters: add ΔW to the base; False yields the dequantized base alone.

    Yields:
        (name, tensor of the weight's own shape); tied weights once. A tensor may be the model's own: never write to it.

    Source: ΔW = Σ over active adapters of (α/r) B A (arXiv 2106.09685); base and ΔW are added in fp32 and rounded once.
    """
    from qrl.train.qat import linear

    layers = {id(layer.base_layer): layer for _, layer in _adapted(model)} if adapters else {}
    sent = set()
    with torch.no_grad():
        for prefix, module in model.named_modules():
            for name, weight in module.named_parameters(prefix, recurse=False):
                if id(weight) in sent or ".lora_" in name:
                    continue
                sent.add(id(weight))
                layer = layers.get(id(module)) if name.endswith(".weight") else None
                if isinstance(module, linear.QATLinear) and weight is module.weight:
                    value = module.multiplied  # the loss's matrix, not the master
                else:
                    value = full(weight, module) if layer is None else adapted(layer)
                yield checkpoint_name(name), value if dtype is None else value.to(dtype)


def named_scales(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the calibrated scales of a policy's activations, (1,) float32 each, under the names of their linears.

    They come before the weights: a server then completes one linear after the other and keeps none of them twice.
    """
    from qrl.formats.fakequant import operation
    from qrl.train.qat import linear

    for name, module in model.named_modules():
        if isinstance(module, linear.QATLinear) and module.input_global_scale is not None:
            yield checkpoint_name(f"{name}.{operation.SCALE}"), module.input_global_scale


def named_adapter(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield the adapter of each linear that has one, under the linear's name in the checkpoint, as new tensors.

    Yields:
        (name, A (r, in_features), (α/r) B (out_features, r)), float32; several active adapters are concatenated along
        r. ΔW is the product of the second by the first.
    """
    for name, layer in _adapted(model):
        active = [each for each in layer.active_adapters if each in layer.lora_A]
        down = [layer.lora_A[each].weight.detach().float() for each in active]
        up = [layer.lora_B[each].weight.detach().float() * layer.scaling[each] for each in active]
        if active:
            yield checkpoint_name(name), torch.cat(down), torch.cat(up, dim=1)


def _adapted(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the layers of a model that PEFT's LoRA extends, by name."""
    named = model.named_modules()
    return [(name, layer) for name, layer in named if hasattr(layer, "base_layer") and hasattr(layer, "lora_A")]


def checkpoint_name(name: str) -> str:
    """Return the checkpoint's name of a parameter or module, without what PEFT and FSDP put around it."""
    name = name.removeprefix("module.").removeprefix("base_model.model.").replace(".base_layer", "")
    return name.replace("_checkpoint_wrapped_module.", "")


def full(weight: torch.Tensor, module: nn.Module) -> torch.Tensor:
    """Return a weight's values in full precision; NF4, INT8 and shards give a new tensor."""
    if type(weight).__name__ not in ("Params4bit", "Int8Params"):  # bitsandbytes'
        return sharded.whole(weight)
    from peft.utils.integrations import dequantize_bnb_weight

    return dequantize_bnb_weight(weight, state=getattr(module, "state", None)).detach()


def adapted(layer: nn.Module) -> torch.Tensor:
    """Return base plus ΔW of one LoRA layer as a new tensor (out_features, in_features), in the base's dtype."""
    base = full(layer.base_layer.weight, layer.base_layer)
    total = base.float()
    total = total.clone() if total.data_ptr() == base.data_ptr() else total
    for name in layer.active_adapters:
        if name in layer.lora_A:
            a, b = layer.lora_A[name].weight.detach().float(), layer.lora_B[name].weight.detach().float()
            total.addmm_(b, a, alpha=layer.scaling[name])
    return total.to(base.dtype)
