"""Linears that compute with Q(W), while the optimizer moves W.

`attach` swaps the class of every linear that the format covers, in place, so that parameters, state-dict keys and
checkpoints stay the same. Such a linear asks its fold for Q(W) in each forward pass; `fold` tells one step of training,
and README.md defines Q(W), its folds and its gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from qrl.errors import BadInput, QrlError
from qrl.formats import groups, layers
from qrl.formats.fakequant import rounding
from qrl.train import sharded
from qrl.train.qat.fold import Fold, folds, refold

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs


class QATLinear(nn.Linear):
    """A linear that multiplies by Q(W); `attach` makes it by swapping the class of an `nn.Linear`."""

    fold: Fold  # shared by the linears that share a global scale
    input_global_scale: Tensor | None  # (1,) float32, calibrated: of all inputs; as `rounding.calibrated_scale`

    @property
    def effective_weight(self) -> Tensor:
        """Return the matrix that multiplies the inputs, (O, I): Q(W), or W where quantization is off."""
        return self.fold.weight_of(self) if self.fold.enabled else sharded.whole(self.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        fold = self.fold
        if not fold.enabled:
            return functional.linear(inputs, self.weight, self.bias)
        device_type = inputs.device.type
        autocast = torch.is_autocast_enabled(device_type)
        # TRL's rollouts run without autocast: multiply in the dtype that the loss multiplies in.
        dtype = torch.get_autocast_dtype(device_type) if autocast else fold.dtype

        weight = fold.straight_through(self)
        values = inputs
        if fold.scheme.input_activations is not None:
            values = fold.rounded_inputs(self, inputs, dtype)
        elif not autocast:
            values = inputs.to(dtype)

        if autocast:  # which converts the bias, and decides the dtype of the result
            return functional.linear(values, weight, self.bias)
        bias = None if self.bias is None else self.bias.to(dtype)
        return functional.linear(values, weight, bias).to(inputs.dtype)


def attach(
    model: nn.Module,
    name: str,
    dtype: torch.dtype | None = None,
    *,
    group_size: int = groups.USUAL,
    terms: Sequence[str] = (),
    shards: bool = False,
) -> list[Fold]:
    """Swap the class of every linear that the format covers, in place, and fold Q(W).

    Args:
        model: with full-precision masters.
        name: one of `names.FORMATS`, or a file.
        dtype: of the forward pass and of Q(W); default: the masters' own.
        group_size: as for `rounding.scheme`.
        terms: of `train.qat_layers`: linears to leave out, or with a format of their own.
        shards: FSDP 2 will shard the weights, or does: each forward pass folds its own Q(W), and `refold` checks them.

    Returns:
        The folds, one for each set of linears that share a scale; `fold.folds(model)` returns them again.

    Raises:
        BadInput: the format is unknown, does not fit the model, or weights are NaN or infinite; or a term matches no
            linear.
    """
    plan = layers.plan_of(model, name, terms, "train.qat_layers")
    model_folds: list[Fold] = []
    for format_name, paths in plan.by_format.items():
        scheme = rounding.scheme(format_name, group_size)
        for shared in layers.fused_sets(paths):  # they share NVFP4's global scale
            members = layers.named(model, shared)
            for path, linear in members.items():
                _check_master(path, linear, scheme.weights)
            first = next(iter(members.values()))
            fold = Fold(scheme, dtype or first.weight.dtype, members, model_folds, shards)
            model_folds.append(fold)
            for linear in members.values():
                linear.__class__ = QATLinear
                linear.fold = fold
                linear.input_global_scale = None
    if not shards:
        begin(model)
    return model_folds


def _check_master(path: str, linear: nn.Linear, args: QuantizationArgs) -> None:
    """Raise BadInput if a format cannot hold a linear, or its weights are no masters."""
    rounding.check_width(path, linear, args)
    if linear.weight.dtype.itemsize < 2:
        raise BadInput(
            f"Layer {path} is in {linear.weight.dtype}, but QAT needs masters of at least 16 bits: convert it first."
        )


def begin(model: nn.Module) -> None:
    """Fold Q(W) of the weights that training starts from; raise BadInput if they are NaN or infinite."""
    try:
        refold(model)
    except QrlError as error:
        raise BadInput(str(error)) from None


@contextmanager
def off(model: nn.Module) -> Iterator[None]:
    """Compute in full precision: as a reference policy, and while activations are calibrated."""
    switched = [fold for fold in folds(model) if fold.enabled]
    for fold in switched:
        fold.enabled = False
    try:
        yield
    finally:
        for fold in switched:
            fold.enabled = True
