"""Check that a checkpoint fits a scheme, before anything is stored."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from qrl import checkpoint, names
from qrl.engine import pretrained
from qrl.errors import BadInput
from qrl.quantize import settings as choices
from qrl.quantize.settings import Settings

if TYPE_CHECKING:
    import torch

HEAD = "lm_head"  # stays in full precision under every scheme


def check_fit(source: Path, settings: Settings) -> None:
    """Check by its configuration alone that a checkpoint fits the scheme.

    Raises:
        BadInput: the model is a mixture of experts or a state-space model, a matrix is not in a linear and would stay
            in full precision, or groups do not divide a layer; the sentence names it.
    """
    from qrl.formats.fakequant import linears

    config = checkpoint.config(source)
    if settings.scheme == names.AWQ:  # its environment has an older transformers
        from qrl.quantize import staging

        config = staging.rewrite(config)
    model = pretrained.skeleton(config)
    if settings.scheme in names.ROUNDED:
        linears.check_fit(model, settings.scheme.removeprefix(names.ROUNDED_PREFIX))
        return
    linears.check_architecture(model, transposed=settings.scheme in names.BITSANDBYTES)
    if settings.scheme in (*choices.GROUPED, *choices.FIXED_GROUP):
        check_widths(model, settings.group_size, outputs=choices.AWQ_WORD if settings.scheme == names.AWQ else 1)


def check_widths(model: torch.nn.Module, group_size: int, outputs: int = 1) -> None:
    """Check that groups divide every linear's inputs, and `outputs` its outputs; the head is not checked.

    Raises:
        BadInput: a linear does not fit, or there is none; the sentence names the first.
    """
    from torch import nn

    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    linears = {name: linear for name, linear in linears.items() if name.split(".")[-1] != HEAD}
    if not linears:
        raise BadInput("The model has no linear layer to quantize: expected a transformer language model.")
    for name, linear in linears.items():
        if linear.in_features % group_size:
            raise BadInput(
                f"Layer {name} has {linear.in_features} inputs, which groups of {group_size} do not divide: choose "
                "another quantize.group_size, or a scheme with a scale per row, such as fp8 or w8a8."
            )
        if linear.out_features % outputs:
            raise BadInput(
                f"Layer {name} has {linear.out_features} outputs, but AutoAWQ needs a multiple of {outputs}; use nf4."
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
