"""Whether what is not trained stayed as it was, however many processes hold parts of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from qrl import process
from qrl.errors import QrlError
from qrl.train import policy

if TYPE_CHECKING:
    import torch


class Guard:
    """The base under an adapter, hashed before training; FSDP's parts are gathered to be hashed after it."""

    def __init__(self, model, adapter: bool) -> None:
        """Hashes what is frozen, where an adapter is trained.

        Args:
            model: as it is before training lays it out over processes.
            adapter: whether a base stays as it is; without one all weights are trained.
        """
        self.model, self.before = model, ""
        self.names: list[str] = []
        if not adapter or (
            process.sharded() and process.rank()
        ):  # under FSDP the first process alone has loaded the weights
            return
        if process.sharded():
            self.names = frozen_names(model)
            self.before = value_digest(dict(model.named_parameters()), self.names)
        else:
            self.before = frozen_digest(model)

    def check(self, state: Mapping[str, torch.Tensor] | None) -> None:
        """Hashes it again.

        Args:
            state: the weights by name, where several processes hold parts of the model; None otherwise.

        Raises:
            QrlError: it has changed.
        """
        if self.before:
            now = frozen_digest(self.model) if state is None else value_digest(state, self.names)
            check_unmoved(self.before, now)


def frozen_digest(model) -> str:
    """sha256 over everything that is not trained, as it lies in memory: codes, scales and whatever is not packed."""
    return _digest(_frozen(model))


def value_digest(state: Mapping[str, torch.Tensor], names: Iterable[str]) -> str:
    """sha256 over the values of the tensors named, whatever float they are stored in: FSDP may store them in another."""
    return _digest((name, state[name].float()) for name in names)


def frozen_names(model) -> list[str]:
    """Names of the parameters that are not trained."""
    return [name for name, weight in model.named_parameters() if not weight.requires_grad]


def check_unmoved(before: str, now: str) -> None:
    """Compares two digests of what was to stay as it is.

    Raises:
        QrlError: it has changed.
    """
    if now != before:
        raise QrlError(
            "The base changed in memory while its adapter was trained, so the adapter belongs to no base that could be "
            "loaded again: this is a fault of qrl or of a library; nothing is kept."
        )


def _digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        found.update(name.encode() + b"\0")
        found.update(_bytes(tensor))
    return found.hexdigest()


def _frozen(model):
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            yield name, weight.data
    for name, module in policy.packed(model):
        state = getattr(module.weight, "quant_state", None)
        if state is not None:
            yield from ((f"{name}.{key}", value) for key, value in state.as_dict(packed=True).items())
        else:
            scales = module.weight.SCB if getattr(module.weight, "SCB", None) is not None else module.state.SCB
            yield f"{name}.SCB", scales


def _bytes(tensor):
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
