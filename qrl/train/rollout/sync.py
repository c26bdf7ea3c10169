"""The weights that a rollout engine is sent: full precision, under their checkpoint's names, computed out of place.

TRL merges the adapter into the base in place before a sync and subtracts it afterwards; each time the base is rounded,
and drifts (README.md). Here the trained model is never written to. What is sent for a weight depends on what trains it:

- a plain weight: itself, dequantized from NF4 or INT8 where it is stored so;
- a linear with an adapter: the dequantized base plus ΔW, as a new tensor that is freed after it was sent;
- a linear under quantization-aware training: Q(W), since the loss multiplies by that, and not the master W.
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

    adapter_of = {}  # id of a base linear → the LoRA layer around it
    if adapters:
        adapter_of = {id(layer.base_layer): layer for _, layer in _adapted(model)}
    sent = set()
    with torch.no_grad():
        for prefix, module in model.named_modules():
            for name, weight in module.named_parameters(prefix, recurse=False):
                if id(weight) in sent or ".lora_" in name:
                    continue
                sent.add(id(weight))
                if isinstance(module, linear.QATLinear) and weight is module.weight:
                    value = module.effective_weight  # the loss's matrix, not the master
                elif id(module) in adapter_of and name.endswith(".weight"):
                    value = adapted(adapter_of[id(module)])
                else:
                    value = full(weight, module)
                if dtype is not None:
                    value = value.to(dtype)
                yield checkpoint_name(name), value


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
        active = [adapter for adapter in layer.active_adapters if adapter in layer.lora_A]
        if not active:
            continue
        a = [layer.lora_A[adapter].weight.detach().float() for adapter in active]
        scaled_b = [layer.lora_B[adapter].weight.detach().float() * layer.scaling[adapter] for adapter in active]
        yield checkpoint_name(name), torch.cat(a), torch.cat(scaled_b, dim=1)


def _adapted(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the layers of a model that PEFT's LoRA extends, by name."""
    modules = model.named_modules()
    return [(name, layer) for name, layer in modules if hasattr(layer, "base_layer") and hasattr(layer, "lora_A")]


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
    if total.data_ptr() == base.data_ptr():  # a base in float32: `float` returns the model's own tensor
        total = total.clone()
    for adapter in layer.active_adapters:
        if adapter not in layer.lora_A:
            continue
        a = layer.lora_A[adapter].weight.detach().float()
        b = layer.lora_B[adapter].weight.detach().float()
        total.addmm_(b, a, alpha=layer.scaling[adapter])
    return total.to(base.dtype)
