"""Check that the frozen weights did not change, however many processes hold parts of them."""

import hashlib
from collections.abc import Iterable, Mapping

import torch

from qrl import process
from qrl.errors import QrlError
from qrl.train import policy


class Guard:
    """The base under an adapter, hashed before training and again after it."""

    def __init__(self, model, adapter: bool) -> None:
        """Hash the frozen weights, before training shards the model; without an adapter nothing is frozen."""
        self.model = model
        self.names = [name for name, weight in model.named_parameters() if not weight.requires_grad]
        hashed = adapter and not (process.sharded() and process.rank())  # FSDP's first process alone loads the weights
        self.before = self._digest(dict(model.named_parameters()) if process.sharded() else None) if hashed else ""

    def check(self, state: Mapping[str, torch.Tensor] | None) -> None:
        """Raise QrlError if the frozen weights have changed; `state` has those that several processes hold in parts."""
        if self.before and self.before != self._digest(state):
            raise QrlError(
                "The base changed in memory while its adapter was trained, so the adapter fits no base that can be "
                "loaded. This is a bug in qrl or a library: report it; nothing is kept."
            )

    def _digest(self, state: Mapping[str, torch.Tensor] | None) -> str:
        if state is None:
            return frozen_digest(self.model)
        return _digest((name, state[name].float()) for name in self.names)  # FSDP may store them in another dtype


def frozen_digest(model) -> str:
    """Return the sha256 of everything that is not trained, as stored in memory: codes, scales and unpacked weights."""
    tensors = [(name, weight.data) for name, weight in model.named_parameters() if not weight.requires_grad]
    for name, module in policy.packed(model):
        if (state := getattr(module.weight, "quant_state", None)) is not None:
            tensors += [(f"{name}.{key}", value) for key, value in state.as_dict(packed=True).items()]
        else:
            scales = getattr(module.weight, "SCB", None)
            tensors.append((f"{name}.SCB", module.state.SCB if scales is None else scales))
    return _digest(tensors)


def _digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        digest.update(name.encode() + b"\0")
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
