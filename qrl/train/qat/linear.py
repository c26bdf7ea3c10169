"""Quantization-aware training: a model whose linears compute with Q(W), while the optimizer moves W.

A linear's class is swapped, so that parameters, state-dict keys and checkpoints stay as they are. Q(W) is folded once
after each optimizer step, and every forward until the next one, rollouts and training alike, multiplies by that same
matrix; its gradient passes straight through to W (Bengio et al., arXiv 1308.3432). Output head, embeddings and norms are
left alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from qrl.errors import BadInput, QrlError
from qrl.formats.fakequant import fused as fake_fused
from qrl.formats.fakequant import linears
from qrl.formats.fakequant import rounding as fake

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationScheme
    from transformers import PreTrainedModel

# Linears that an engine computes as one, and that therefore share NVFP4's global scale; llm-compressor's FUSED_LAYER_NAMES.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def _standing(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor that hands its gradient to `exact` as it is, and whose values are to be put in its place: `found.data = quantized`.

    A cast is what autograd has for it: its backward is native, and needs no Python.
    """
    return exact.to(dtype, copy=True)


class QATLinear(nn.Linear):
    """A linear that multiplies by Q(W); made by swapping the class of an `nn.Linear`, see `attach`."""

    fold: Fold  # shared by the linears that share a global scale
    input_global_scale: Tensor | None  # (1,) float32; NVFP4 W4A4 alone

    @property
    def multiplied(self) -> Tensor:
        """The matrix that inputs are multiplied by, (O, I): Q(W), or W where quantization is off."""
        return self.fold.weight_of(self) if self.fold.on else self.weight.detach()

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.fold.on:
            return functional.linear(inputs, self.weight, self.bias)
        kind, dtype = inputs.device.type, self.fold.dtype
        weight, fed = self.fold.standing(self), self.fold.scheme.input_activations is not None
        if torch.is_autocast_enabled(kind):
            return functional.linear(
                self.fold.fed(self, inputs, torch.get_autocast_dtype(kind)) if fed else inputs, weight, self.bias
            )
        bias = (
            self.bias if self.bias is None else self.bias.to(dtype)
        )  # TRL's rollouts: multiplied as the loss does, without autocast
        return functional.linear(self.fold.fed(self, inputs, dtype) if fed else inputs.to(dtype), weight, bias).to(
            inputs.dtype
        )


@dataclass(eq=False)
class Fold:
    """Q(W) of the linears that share a scale, kept until their weights change."""

    scheme: QuantizationScheme
    dtype: torch.dtype  # in which Q(W) is kept: the dtype of the forward
    members: dict[str, QATLinear]  # by name in the model
    together: list[Fold]  # all of the model's, itself among them: what changed behind their back is computed in one go
    on: bool = True
    made: int = 0  # how often Q(W) was computed
    state: list | None = None  # of the weights that it was computed from
    kept: dict[int, Tensor] | None = None  # id of a linear → Q(W)
    stand: dict[int, tuple] = field(
        default_factory=dict
    )  # id of a linear → W, what it was like, and Q(W) whose gradient goes to it
    largest: Tensor | None = None  # (members,), each one's largest |w|
    final: QATLinear | None = None  # the last member
    last: tuple | None = (
        None  # of the inputs that a member was fed: key, inputs, what they became; until the last member asked
    )

    def weight_of(self, linear: QATLinear) -> Tensor:
        """Q(W) of a member, (O, I); computed anew only where a member's weight has changed since."""
        self._refresh()
        return self.kept[id(linear)]

    def standing(self, linear: QATLinear) -> Tensor:
        """The same values, whose gradient goes straight through to the member's W."""
        self._refresh()
        return self.stand[id(linear)][-1]

    def _refresh(self) -> None:
        if self.stale:
            _renew([fold for fold in self.together if fold.stale])

    def fed(self, linear: QATLinear, inputs: Tensor, dtype: torch.dtype) -> Tensor:
        """What a member's inputs become in few bits; the same tensor for every member that is fed the same one, as q, k and v are.

        Args:
            inputs: (..., I), as the member was called with them.
            dtype: that is multiplied in.
        """
        version, passed = (
            None if inputs.is_inference() else inputs._version,
            torch.is_grad_enabled() and inputs.requires_grad,
        )
        key = (id(inputs), version, id(linear.input_global_scale), dtype, passed)
        if self.last is None or self.last[0] != key:  # the inputs are held, so that their id is theirs
            done = fake_fused.activations(inputs, self.scheme.input_activations, linear.input_global_scale, dtype)
            if passed:
                values, done = done, _standing(inputs, dtype)
                done.data = values
            self.last = (key, inputs, done)
        done = self.last[2]
        if linear is self.final:
            self.last = None
        return done

    def weights(self) -> list[Tensor]:
        """The members' masters."""
        return [linear.weight for linear in self.members.values()]

    @property
    def stale(self) -> bool:
        """Whether a member's weight has changed since."""
        return self.state != self._state()

    def keep(self, found: list[Tensor], largest: Tensor) -> None:
        """Takes Q(W) of every member, as it was just computed."""
        self.kept = {id(linear): weight for linear, weight in zip(self.members.values(), found, strict=True)}
        for linear in self.members.values():
            exact, old = linear.weight, self.stand.get(id(linear))
            kind = (exact.dtype, exact.device, exact.requires_grad)  # autograd keeps to what it was when it was asked
            if old is None or old[0] is not exact or old[1] != kind:
                with torch.enable_grad():
                    self.stand[id(linear)] = (exact, kind, _standing(exact, self.dtype))
            stands = self.stand[id(linear)][-1]
            stands.data = self.kept[id(linear)]
            torch.autograd.graph.increment_version(
                stands
            )  # a backward of a forward before this fold is an error, and says so
        self.final = linear
        self.largest, self.state = largest, self._state()
        self.made += 1

    def check(self) -> None:
        """Forgets Q(W) of weights that are NaN or infinite.

        Raises:
            QrlError: by name.
        """
        if (finite := self.largest.isfinite()).all():
            return
        self.state = None
        bad = next(name for name, fine in zip(self.members, finite.tolist(), strict=True) if not fine)
        raise QrlError(
            f"The weight of {bad} holds NaN or infinity, so it cannot be quantized: lower train.learning_rate, or look at "
            "the checkpoint that the training began with."
        )

    def _state(self) -> list[tuple[int, int]]:
        weights = [
            linear._parameters["weight"] for linear in self.members.values()
        ]  # asked in every forward: a module's own look-up is slow
        return [(weight._version, weight.data_ptr()) for weight in weights]


def attach(model: PreTrainedModel, name: str, dtype: torch.dtype | None = None) -> list[Fold]:
    """Swaps the class of every linear that the format covers, in place, and folds Q(W).

    Args:
        model: with full-precision masters.
        name: one of `fake.FORMATS`.
        dtype: of the forward, in which Q(W) is kept; default: the masters' own.

    Returns:
        The folds, one for each set of linears that share a scale; `folds(model)` finds them again.

    Raises:
        BadInput: an unknown format, a model that it does not fit, or weights that are NaN or infinite.
    """
    scheme = fake.scheme(name)
    found = linears.covered(model, name)
    for path, linear in found.items():
        fake.check_width(path, linear.in_features, scheme.weights)
        if linear.weight.dtype.itemsize < 2:
            raise BadInput(
                f"Layer {path} is stored in {linear.weight.dtype}: quantization-aware training needs masters of at least 16 bits."
            )
    made: list[Fold] = []
    for paths in _sharing(found):
        members = {path: found[path] for path in paths}
        fold = Fold(scheme, dtype or found[paths[0]].weight.dtype, members, made)
        for linear in members.values():
            linear.__class__ = QATLinear
            linear.fold, linear.input_global_scale = fold, None
        made.append(fold)
    try:
        refold(model)
    except QrlError as error:
        raise BadInput(str(error)) from None
    return made


def folds(model: nn.Module) -> list[Fold]:
    """The folds of a model, in order; none where nothing is attached."""
    return list(dict.fromkeys(module.fold for module in model.modules() if isinstance(module, QATLinear)))


def refold(model: nn.Module) -> None:
    """Computes Q(W) of every linear; to be called once after each optimizer step.

    Raises:
        QrlError: a weight is NaN or infinite; by name.
    """
    _renew(folds(model))


def _renew(found: Sequence[Fold]) -> None:
    """Computes Q(W) of folds of one format, in the memory of the one before.

    Raises:
        QrlError: a weight is NaN or infinite; by name.
    """
    alike: dict[tuple, list[Fold]] = {}
    for fold in found:
        fold.kept = fold.state = None
        for *_, stands in fold.stand.values():
            stands.data = stands.new_empty(0)  # lets its memory go
        weight = fold.weights()[0]
        alike.setdefault((fold.dtype, weight.dtype, weight.device), []).append(fold)
    for (dtype, _, _), some in alike.items():
        with torch.inference_mode(False), torch.no_grad():
            made = fake_fused.folded([fold.weights() for fold in some], some[0].scheme.weights, dtype)
            for fold, each in zip(some, made, strict=True):
                fold.keep(*each)
            finite = torch.cat([fold.largest for fold in some]).isfinite().all()
        if not finite:  # one wait for all of them
            for fold in some:
                fold.check()


@contextmanager
def off(model: nn.Module) -> Iterator[None]:
    """The model in full precision: as a reference policy, and while its activations are calibrated."""
    found = folds(model)
    before = [fold.on for fold in found]
    for fold in found:
        fold.on = False
    try:
        yield
    finally:
        for fold, was in zip(found, before, strict=True):
            fold.on = was


def folded_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Named parameters as an engine is to see them: Q(W) where a linear is quantized, the rest as they are."""
    matrices = {id(each.weight): each for each in model.modules() if isinstance(each, QATLinear)}
    for name, parameter in model.named_parameters():
        linear = matrices.get(id(parameter))
        yield name, parameter if linear is None else linear.multiplied


def _sharing(found: dict[str, nn.Linear]) -> list[list[str]]:
    """Names of the linears, those that share a scale together."""
    groups: dict[tuple, list[str]] = {}
    for path in found:
        parent, _, name = path.rpartition(".")
        fused = next((names for names in FUSED if name in names), (name,))
        groups.setdefault((parent, fused), []).append(path)
    return list(groups.values())
