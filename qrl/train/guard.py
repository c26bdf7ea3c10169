"""Whether what is not trained stayed as it was, however many processes hold parts of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from qrl import process
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
        if not adapter or (process.sharded() and process.rank()):  # under FSDP the first process alone has loaded the weights
            return
        if process.sharded():
            self.names = policy.frozen_names(model)
            self.before = policy.value_digest(dict(model.named_parameters()), self.names)
        else:
            self.before = policy.frozen_digest(model)

    def check(self, state: Mapping[str, torch.Tensor] | None) -> None:
        """Hashes it again.

        Args:
            state: the weights by name, where several processes hold parts of the model; None otherwise.

        Raises:
            QrlError: it has changed.
        """
        if self.before:
            now = policy.frozen_digest(self.model) if state is None else policy.value_digest(state, self.names)
            policy.check_unmoved(self.before, now)
