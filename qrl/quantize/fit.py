"""Check that a checkpoint fits a scheme, before anything is stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from qrl import checkpoint, names
from qrl.engine import pretrained
from qrl.errors import BadInput
from qrl.formats import groups, layers
from qrl.formats.fakequant import linears
from qrl.quantize import settings as choices
from qrl.quantize import staging
from qrl.quantize.settings import Settings

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

HEAD = "lm_head"  # stays in full precision under every scheme
# Decoders with the modules that SpinQuant rotates and no others: elsewhere it would miss some and spoil the model.
ROTATABLE = ("llama", "mistral", "qwen2", "qwen3")


def check_fit(source: Path, settings: Settings) -> None:
    """Check by its configuration alone that a checkpoint fits the scheme.

    Raises:
        BadInput: the model is a mixture of experts or a state-space model, a matrix is not in a linear and would stay
            in full precision, groups do not divide a layer, or SpinQuant cannot rotate it; the sentence names it.
    """
    config = checkpoint.config(source)
    if settings.scheme == names.AWQ:  # in an environment with an older transformers
        config = staging.rewrite(config)
    model = pretrained.skeleton(config)
    settings = settings.with_groups(_fitting(_quantized(model).values()))
    if settings.scheme not in names.ROUNDED:
        linears.check_architecture(model, transposed=settings.scheme in names.BITSANDBYTES)
    if settings.scheme == names.SPINQUANT:
        _check_rotatable(model.config)

    own_linears = _quantized(model)
    if settings.layers or settings.scheme in names.ROUNDED:
        linears_of = layers.plan_of(model, settings.own_format, settings.layers).by_format
        own_linears = layers.named(model, linears_of.pop(settings.own_format, []))
        for name, paths in linears_of.items():
            linears.check_widths(layers.named(model, paths), name, settings.layers_group_size or groups.USUAL)
    if settings.scheme in names.ROUNDED:
        linears.check_widths(own_linears, settings.rounding, settings.group_size or groups.USUAL)
    elif settings.group_size:
        outputs = choices.OUTPUTS.get(settings.scheme, 1)
        fixed = settings.scheme if settings.scheme in choices.FIXED_GROUP else ""
        check_widths(model, settings.group_size, outputs, fixed, linear_of=own_linears)


def _fitting(linears: Iterable[torch.nn.Linear]) -> int:
    """Return the group size for linears, as `groups.of` returns it for a checkpoint's matrices."""
    return groups.fitting(linear.in_features for linear in linears) or groups.USUAL


def _quantized(model: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """Return the linears of a model by name, without the head."""
    from torch import nn

    linear_of = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return {name: linear for name, linear in linear_of.items() if name.split(".")[-1] != HEAD}


def _check_rotatable(config: PretrainedConfig) -> None:
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if config.model_type not in ROTATABLE:
        raise BadInput(
            f"SpinQuant rotates {', '.join(ROTATABLE)} here, not {config.model_type}: choose autoround or gptq."
        )
    if head_size & (head_size - 1):  # no power of two
        raise BadInput(
            f"SpinQuant rotates heads of 2^n dimensions, but these have {head_size}: choose autoround or gptq."
        )


def check_widths(
    model: torch.nn.Module,
    group_size: int,
    outputs: int = 1,
    fixed: str = "",
    linear_of: Mapping[str, torch.nn.Linear] | None = None,
) -> None:
    """Raise BadInput where groups do not divide a linear's inputs, or `outputs` its outputs.

    Args:
        model: its output head is left out.
        group_size: inputs that share a scale.
        outputs: that a layer's outputs are a multiple of.
        fixed: a scheme whose format defines the group size, so that the recipe cannot choose another.
        linear_of: the linears to check, by name; default: all of the model.
    """
    if linear_of is None:
        linear_of = _quantized(model)
    if not linear_of:
        raise BadInput("The model has no linear layer to quantize: expected a transformer language model.")
    for name, linear in linear_of.items():
        if fixed and linear.in_features % group_size:
            raise BadInput(
                f"Layer {name} has {linear.in_features} inputs, which groups of {group_size} do not divide. Scheme "
                f"{fixed} has such groups by its format, whatever quantize.group_size is for other schemes: leave "
                f"{fixed} out, or choose a scheme with a scale per row, such as fp8 or w8a8."
            )
        if linear.in_features % group_size:
            advice = "choose a scheme with a scale per row, such as fp8 or w8a8"
            fitting_size = groups.fitting(linear.in_features for linear in linear_of.values())
            if fitting_size:
                advice = f"set quantize.group_size to {fitting_size}, which divides all, or to auto, or {advice}"
            raise BadInput(
                f"Layer {name} has {linear.in_features} inputs, which groups of {group_size} do not divide: {advice}."
            )
        if linear.out_features % outputs:
            raise BadInput(
                f"Layer {name} has {linear.out_features} outputs, but this scheme needs a multiple of {outputs}: use "
                "nf4 or fp8."
            )


def check_finite(source: Path) -> None:
    """Check that all weights are finite: some schemes would store NaN, others would fail or hide it in a scale.

    Raises:
        BadInput: a tensor holds NaN or infinity; the sentence names the first.
    """
    for name, tensor in checkpoint.tensors(source):
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise BadInput(
                f"{source} holds NaN or infinity in {name}, which every scheme would pass on: use weights that are "
                "finite."
            )
