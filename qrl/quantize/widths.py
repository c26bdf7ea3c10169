"""Whether a model's linears fit a scheme, by its configuration alone: what does not is refused before weights are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qrl.errors import BadInput

if TYPE_CHECKING:
    import torch

HEAD = "lm_head"  # stays in full precision under every scheme


def check(model: torch.nn.Module, group_size: int, outputs: int = 1) -> None:
    """Refuses a model with a linear, apart from the head, that a scheme cannot hold.

    Args:
        model: with or without weights.
        group_size: input channels that share a scale.
        outputs: what every linear's output channels must be a multiple of.

    Raises:
        BadInput: it names the first one; or there is no linear at all.
    """
    from torch import nn

    linears = {
        name: each
        for name, each in model.named_modules()
        if isinstance(each, nn.Linear) and name.split(".")[-1] != HEAD
    }
    if not linears:
        raise BadInput("The model has no linear layer to quantize: expected a transformer language model.")
    for name, linear in linears.items():
        if linear.in_features % group_size:
            raise BadInput(
                f"Layer {name} has {linear.in_features} inputs, which groups of {group_size} do not divide: choose another "
                "quantize.group_size, or a scheme with a scale a row, such as fp8 or w8a8."
            )
        if linear.out_features % outputs:
            raise BadInput(
                f"Layer {name} has {linear.out_features} outputs, but AutoAWQ needs a multiple of {outputs}; use nf4."
            )
