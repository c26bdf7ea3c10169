"""Q(W) of the linears that share a scale: computed after each optimizer step, and kept until the weights change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from qrl.errors import QrlError
from qrl.formats.fakequant import fused
from qrl.train import sharded

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationScheme

    from qrl.train.qat.linear import QATLinear


@dataclass(eq=False)
class Fold:
    """Q(W) of the linears that share a scale."""

    scheme: QuantizationScheme
    dtype: torch.dtype  # of Q(W) and of the forward pass
    members: dict[str, QATLinear]  # by name in the model
    together: list[Fold]  # all folds of the model, this one too: stale ones are renewed in one call
    sharded: bool = False  # by FSDP 2: each forward pass gathers the weights anew, and computes its own Q(W)
    on: bool = True
    made: int = 0  # how often Q(W) was computed
    state: list | None = None  # of the weights that Q(W) was computed from
    stand: dict[int, tuple] = field(default_factory=dict)  # id of a linear → W, its kind, Q(W) with a gradient to W
    passing: dict[int, Tensor] = field(default_factory=dict)  # of shards: id of a linear → Q(W), until it is used
    largest: Tensor | None = None  # (members,), each one's largest |w|
    final: QATLinear | None = None  # the last member
    last: tuple | None = None  # key, inputs and their quantized values, until the last member has used them

    def weight_of(self, linear: QATLinear) -> Tensor:
        """Return Q(W) of a member, (O, I); computed again only where a member's weight has changed.

        All processes that shard the weights call it together, for one member after the other.
        """
        return self._taken(linear) if self.sharded else self.straight_through(linear).detach()

    def straight_through(self, linear: QATLinear) -> Tensor:
        """Return Q(W) of a member, (O, I), with a gradient that goes straight through to its W."""
        if self.sharded:
            return _StraightThrough.apply(linear.weight, self._taken(linear))
        if self.stale:
            _renew([fold for fold in self.together if fold.stale])
        return self.stand[id(linear)][-1]

    def _taken(self, linear: QATLinear) -> Tensor:
        """Return Q(W) of a member and keep it no longer; the first member of a pass computes it for all of them."""
        if id(linear) not in self.passing:
            members = list(self.members.values())
            with torch.inference_mode(False), torch.no_grad():
                masters = [sharded.whole(member.weight) for member in members]
                ((quantized, self.largest),) = fused.folded([masters], self.scheme.weights, self.dtype)
            self.passing = dict(zip(map(id, members), quantized, strict=True))
            self.final = members[-1]
            self.made += 1
        return self.passing.pop(id(linear))

    def fed(self, linear: QATLinear, inputs: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a member's quantized inputs (..., I): one tensor for members with the same inputs, as q, k and v."""
        version = None if inputs.is_inference() else inputs._version
        trains = torch.is_grad_enabled() and inputs.requires_grad
        key = (id(inputs), version, id(linear.input_global_scale), dtype, trains)
        if self.last is None or self.last[0] != key:  # `last` holds the inputs, so that no other tensor has their id
            quantized = fused.activations(inputs, self.scheme.input_activations, linear.input_global_scale, dtype)
            if trains:
                values, quantized = quantized, inputs.to(dtype, copy=True)  # a cast's gradient passes unchanged
                quantized.data = values
            self.last = (key, inputs, quantized)
        quantized = self.last[2]
        if linear is self.final:
            self.last = None
        return quantized

    @property
    def stale(self) -> bool:
        """Return whether a member's weight has changed since Q(W) was computed."""
        return self.state != self._state()

    def keep(self, quantized: list[Tensor], largest: Tensor) -> None:
        """Store Q(W) of every member, just computed."""
        for linear, values in zip(self.members.values(), quantized, strict=True):
            exact, old = linear.weight, self.stand.get(id(linear))
            kind = (exact.dtype, exact.device, exact.requires_grad)  # autograd remembers these
            if old is None or old[0] is not exact or old[1] != kind:
                with torch.enable_grad():
                    # A cast passes its gradient unchanged, natively; its values are replaced below.
                    self.stand[id(linear)] = (exact, kind, exact.to(self.dtype, copy=True))
            stands = self.stand[id(linear)][-1]
            stands.data = values
            # A backward pass through a forward pass from before this fold raises, instead of using the new Q(W).
            torch.autograd.graph.increment_version(stands)
        self.final, self.largest, self.state = linear, largest, self._state()
        self.made += 1

    def _state(self) -> list[tuple[int, int]]:
        # Called in every forward pass: nn.Module's own attribute look-up is slow.
        weights = [linear._parameters["weight"] for linear in self.members.values()]
        return [(weight._version, weight.data_ptr()) for weight in weights]


def folds(model: nn.Module) -> list[Fold]:
    """Return the folds of a model, in order; none where no format is attached."""
    attached = (getattr(module, "fold", None) for module in model.modules())
    return list(dict.fromkeys(fold for fold in attached if isinstance(fold, Fold)))


class _StraightThrough(torch.autograd.Function):
    """Q(W) whose gradient is W's: nothing is saved, so FSDP frees W after the layer."""

    @staticmethod
    def forward(ctx, weight: Tensor, quantized: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return quantized.detach()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None


def refold(model: nn.Module) -> None:
    """Compute Q(W) of every linear, once after each optimizer step; raise QrlError if a weight is NaN or infinite.

    Sharded weights are only checked, since each forward pass computes its own Q(W).
    """
    every = folds(model)
    if any(fold.sharded for fold in every):
        _check_shares(every)
    else:
        _renew(every)


def _check_shares(every: Sequence[Fold]) -> None:
    """Check each process's share of the weights; all of them raise if one has to."""
    from torch import distributed

    names = [name for fold in every for name in fold.members]
    shares = [sharded.share(linear.weight) for fold in every for linear in fold.members.values()]
    for fold in every:
        fold.passing.clear()  # what a pass has left that did not use all members
    held = [place for place, share in enumerate(shares) if share.numel()]
    bad = torch.zeros(len(shares), dtype=torch.int32, device=shares[0].device)
    if held:
        largest = torch.stack(torch._foreach_norm([shares[place] for place in held], math.inf))
        bad[held] = (~largest.isfinite()).int()
    if distributed.is_initialized():
        distributed.all_reduce(bad, distributed.ReduceOp.MAX)
    if bad.any():  # one synchronization for all of them
        raise _unfit(names[bad.tolist().index(1)])


def _unfit(name: str) -> QrlError:
    return QrlError(
        f"The weight of {name} holds NaN or infinity, so it cannot be quantized: "
        "lower train.learning_rate, or check the checkpoint that training started from."
    )


def _renew(stale: Sequence[Fold]) -> None:
    """Compute Q(W) of folds of one format, in the memory of the previous one."""
    groups: dict[tuple, list[Fold]] = {}
    for fold in stale:
        fold.state = None
        for *_, stands in fold.stand.values():
            stands.data = stands.new_empty(0)  # frees its memory
        weight = next(iter(fold.members.values())).weight
        groups.setdefault((fold.dtype, weight.dtype, weight.device), []).append(fold)
    for (dtype, _, _), group in groups.items():
        with torch.inference_mode(False), torch.no_grad():
            masters = [[linear.weight for linear in fold.members.values()] for fold in group]
            computed = fused.folded(masters, group[0].scheme.weights, dtype)
            for fold, (quantized, largest) in zip(group, computed, strict=True):
                fold.keep(quantized, largest)
            finite = torch.cat([fold.largest for fold in group]).isfinite()
        if not finite.all():  # one synchronization for all of them
            for fold in group:
                fold.state = None  # Q(W) is of no use
            bad = [name for fold in group for name in fold.members][finite.tolist().index(False)]
            raise _unfit(bad)
