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
        self.model, self.before = model, ""
        self.names = [name for name, weight in model.named_parameters() if not weight.requires_grad]
        if adapter and not process.sharded():
            self.before = frozen_digest(model)
        elif adapter and not process.rank():  # under FSDP only the first process loads the weights
            self.before = self._value_digest(dict(model.named_parameters()))

    def check(self, state: Mapping[str, torch.Tensor] | None) -> None:
        """Raise QrlError if the frozen weights have changed; `state` has those that several processes hold in parts."""
        if not self.before:
            return
        if self.before != (frozen_digest(self.model) if state is None else self._value_digest(state)):
            raise QrlError(
                "The base changed in memory while its adapter was trained, so the adapter fits no base that can be "
                "loaded. This is a bug in qrl or a library: report it; nothing is kept."
            )

    def _value_digest(self, state: Mapping[str, torch.Tensor]) -> str:
        """Return the sha256 of the frozen weights' values in fp32: FSDP may store them in another dtype."""
        return _digest((name, state[name].float()) for name in self.names)


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
