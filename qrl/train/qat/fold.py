"""Q(W) of the linears that share a scale: computed after each optimizer step, and kept until the weights change.

One step of training, for the linears q, k and v of a layer, which share NVFP4's global scale and so form one fold:

1. The optimizer has moved the masters W. `refold` computes Q(W) of all folds of the model in one batch: the scales
   from the largest |w|, the codes, and the values that the codes encode. The memory of the step before is freed first.
2. In the forward pass each linear multiplies by `straight_through`: a tensor with the values of Q(W), but made from W
   by a cast. Autograd sees the cast alone and passes its gradient to W unchanged: the straight-through estimator.
3. Where the format rounds activations, `rounded_inputs` rounds the layer's input once, for q, and hands the same tensor
   to k and v.
4. The backward pass adds gradients to W, the optimizer moves W, and Q(W) is stale. If nobody calls `refold`, the next
   forward pass notices by the weights' versions and addresses, and renews all stale folds.

Under FSDP 2 no process has a whole W between two passes. Q(W) is then not kept: the first linear of a fold to run
gathers the masters of all members and computes their Q(W), and each member takes its own when it runs. `refold` only
checks each process's share of the weights for NaN and infinity.
"""

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


@dataclass
class _FoldedWeight:
    """Q(W) of one linear between two optimizer steps."""

    master: Tensor  # W, the parameter
    properties: tuple  # dtype, device and requires_grad of W: autograd remembers them of the cast
    quantized: Tensor  # Q(W), (O, I), with a gradient that goes straight through to W


@dataclass
class _RoundedInputs:
    """The latest inputs that a fold has rounded."""

    key: tuple  # identifies the inputs, their version and how they were rounded
    inputs: Tensor  # kept alive, so that no other tensor can get their id
    rounded: Tensor


@dataclass(eq=False)
class Fold:
    """The linears that share a scale, and their Q(W)."""

    scheme: QuantizationScheme
    dtype: torch.dtype  # of Q(W) and of the forward pass
    members: dict[str, QATLinear]  # by name in the model
    model_folds: list[Fold]  # all folds of the model, this one included: stale ones are renewed in one call
    sharded: bool = False  # by FSDP 2: each forward pass gathers the weights anew, and computes its own Q(W)
    enabled: bool = True
    times_folded: int = 0  # how often Q(W) was computed
    largest: Tensor | None = None  # (members,), each one's largest |w|
    last_member: QATLinear | None = None
    folded_state: list[tuple[int, int]] | None = None  # the weights' versions and addresses when Q(W) was computed
    folded_weights: dict[int, _FoldedWeight] = field(default_factory=dict)  # by id of the linear
    pending: dict[int, Tensor] = field(default_factory=dict)  # of shards: id of a linear → Q(W), until it is used
    latest_inputs: _RoundedInputs | None = None  # until the last member has used them

    def weight_of(self, linear: QATLinear) -> Tensor:
        """Return Q(W) of a member, (O, I); computed again only where a member's weight has changed.

        All processes that shard the weights call it together, for one member after the other.
        """
        if self.sharded:
            return self._take_sharded(linear)
        return self.straight_through(linear).detach()

    def straight_through(self, linear: QATLinear) -> Tensor:
        """Return Q(W) of a member, (O, I), with a gradient that goes straight through to its W."""
        if self.sharded:
            return _StraightThrough.apply(linear.weight, self._take_sharded(linear))
        if self.stale:
            _renew([fold for fold in self.model_folds if fold.stale])
        return self.folded_weights[id(linear)].quantized

    def _take_sharded(self, linear: QATLinear) -> Tensor:
        """Return Q(W) of a member and keep it no longer; the first member of a pass computes it for all of them."""
        if id(linear) not in self.pending:
            members = list(self.members.values())
            with torch.inference_mode(False), torch.no_grad():
                masters = [sharded.whole(member.weight) for member in members]
                ((quantized, self.largest),) = fused.folded([masters], self.scheme.weights, self.dtype)
            self.pending = {id(member): values for member, values in zip(members, quantized, strict=True)}
            self.last_member = members[-1]
            self.times_folded += 1
        return self.pending.pop(id(linear))

    def rounded_inputs(self, linear: QATLinear, inputs: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a member's quantized inputs (..., I): one tensor for members with the same inputs, as q, k and v."""
        version = None if inputs.is_inference() else inputs._version
        needs_gradient = torch.is_grad_enabled() and inputs.requires_grad
        key = (id(inputs), version, id(linear.input_global_scale), dtype, needs_gradient)
        latest = self.latest_inputs
        if latest is None or latest.key != key:
            rounded = fused.activations(inputs, self.scheme.input_activations, linear.input_global_scale, dtype)
            if needs_gradient:
                # The same straight-through estimator: a cast passes its gradient unchanged, with other values in it.
                cast = inputs.to(dtype, copy=True)
                cast.data = rounded
                rounded = cast
            latest = _RoundedInputs(key, inputs, rounded)
        self.latest_inputs = None if linear is self.last_member else latest
        return latest.rounded

    @property
    def stale(self) -> bool:
        """Return whether a member's weight has changed since Q(W) was computed."""
        return self.folded_state != self._weights_state()

    def store(self, quantized: list[Tensor], largest: Tensor) -> None:
        """Store Q(W) of every member, just computed."""
        members = list(self.members.values())
        for linear, values in zip(members, quantized, strict=True):
            master = linear.weight
            properties = (master.dtype, master.device, master.requires_grad)
            folded = self.folded_weights.get(id(linear))
            if folded is None or folded.master is not master or folded.properties != properties:
                with torch.enable_grad():
                    # A cast passes its gradient unchanged, natively; its values are replaced below.
                    folded = _FoldedWeight(master, properties, master.to(self.dtype, copy=True))
                self.folded_weights[id(linear)] = folded
            folded.quantized.data = values
            # A backward pass through a forward pass from before this fold raises, instead of using the new Q(W).
            torch.autograd.graph.increment_version(folded.quantized)
        self.last_member = members[-1]
        self.largest = largest
        self.folded_state = self._weights_state()
        self.times_folded += 1

    def release(self) -> None:
        """Free the memory of Q(W), which is stale, before the next one is computed."""
        self.folded_state = None
        for folded in self.folded_weights.values():
            folded.quantized.data = folded.quantized.new_empty(0)

    def _weights_state(self) -> list[tuple[int, int]]:
        # Called in every forward pass: nn.Module's own attribute look-up is slow.
        weights = [linear._parameters["weight"] for linear in self.members.values()]
        return [(weight._version, weight.data_ptr()) for weight in weights]


def folds(model: nn.Module) -> list[Fold]:
    """Return the folds of a model, in order; none where no format is attached."""
    attached = (getattr(module, "fold", None) for module in model.modules())
    return list(dict.fromkeys(fold for fold in attached if isinstance(fold, Fold)))


class _StraightThrough(torch.autograd.Function):
    """Q(W) with the gradient of W: nothing is saved, so FSDP frees W after the layer."""

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
    model_folds = folds(model)
    if any(fold.sharded for fold in model_folds):
        _check_shares(model_folds)
    else:
        _renew(model_folds)


def _check_shares(model_folds: Sequence[Fold]) -> None:
    """Check each process's share of the weights; all of them raise if one has to."""
    from torch import distributed

    names = [name for fold in model_folds for name in fold.members]
    shares = [sharded.share(linear.weight) for fold in model_folds for linear in fold.members.values()]
    for fold in model_folds:
        fold.pending.clear()  # left by a pass that did not use all members
    nonempty = [index for index, share in enumerate(shares) if share.numel()]
    is_bad = torch.zeros(len(shares), dtype=torch.int32, device=shares[0].device)
    if nonempty:
        largest = torch.stack(torch._foreach_norm([shares[index] for index in nonempty], math.inf))
        is_bad[nonempty] = (~largest.isfinite()).int()
    if distributed.is_initialized():
        distributed.all_reduce(is_bad, distributed.ReduceOp.MAX)
    if is_bad.any():  # one synchronization for all of them
        raise _not_finite(names[is_bad.tolist().index(1)])


def _not_finite(name: str) -> QrlError:
    return QrlError(
        f"The weight of {name} holds NaN or infinity, so it cannot be quantized: "
        "lower train.learning_rate, or check the checkpoint that training started from."
    )


def _renew(stale_folds: Sequence[Fold]) -> None:
    """Compute Q(W) of folds, in the memory of the previous one."""
    batches: dict[tuple, list[Fold]] = {}  # folds that one call can compute, by what they must have in common
    for fold in stale_folds:
        fold.release()
        weight = next(iter(fold.members.values())).weight
        batches.setdefault((fold.dtype, weight.dtype, weight.device, id(fold.scheme)), []).append(fold)

    for (dtype, *_), batch in batches.items():
        with torch.inference_mode(False), torch.no_grad():
            masters = [[linear.weight for linear in fold.members.values()] for fold in batch]
            computed = fused.folded(masters, batch[0].scheme.weights, dtype)
            for fold, (quantized, largest) in zip(batch, computed, strict=True):
                fold.store(quantized, largest)
            is_finite = torch.cat([largest for _, largest in computed]).isfinite()
        if not is_finite.all():  # one synchronization for all of them
            for fold in batch:
                fold.folded_state = None  # Q(W) is of no use
            names = [name for fold in batch for name in fold.members]
            raise _not_finite(names[is_finite.tolist().index(False)])
