"""transformers' engine under a clock: when each prompt's first and last token was written, and how large the cache grew."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qrl.benchmark import Answered, Request
from qrl.engine import device as devices
from qrl.engine import hf

if TYPE_CHECKING:
    import torch


class Transformers:
    """A checkpoint loaded as evaluation loads it: codes are unpacked, so a scheme saves disk here and no memory."""

    def __init__(self, path: Path, device: str, dtype: str) -> None:
        import transformers

        self.name = f"{hf.NAME} {transformers.__version__}"
        self._device = device
        self._model, self._tokens = hf.load(path, device, devices.compute_dtype(dtype, device))
        self.weights_bytes = weights_bytes(self._model)

    def ask(self, prompts: Sequence[Sequence[int]], *, new_tokens: int, fixed: bool) -> Answered:
        """Greedy answers to a batch.

        Args:
            prompts: B lists of token ids.
            new_tokens: longest answer; of every answer, if fixed.
            fixed: end tokens do not end an answer.
        """
        import torch
        from transformers import GenerationConfig

        usual = self._model.generation_config
        ends = None if fixed else usual.eos_token_id
        settings = GenerationConfig(eos_token_id=ends, pad_token_id=usual.pad_token_id, do_sample=False, max_new_tokens=new_tokens, return_dict_in_generate=True)
        batch = self._tokens.pad({"input_ids": [list(ids) for ids in prompts]}, return_tensors="pt").to(self._model.device)
        times: list[float] = []

        def tick(input_ids: torch.Tensor, _scores: object, **_rest: object) -> torch.Tensor:
            if self._device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

        if self._device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        with torch.inference_mode():
            found = self._model.generate(**batch, generation_config=settings, stopping_criteria=[tick])
        written = found.sequences[:, batch["input_ids"].shape[1] :].tolist()
        stops = _set(ends)
        requests = []
        for ids, prompt in zip(written, prompts, strict=True):
            last = next((place for place, token in enumerate(ids) if token in stops), len(ids) - 1)
            requests.append(Request(len(prompt), last + 1, times[0] - began, times[last] - began))
        return Answered(tuple(requests), times[-1] - began, cache_bytes(found.past_key_values))


def weights_bytes(model: torch.nn.Module) -> int:
    """Bytes of a model's parameters and buffers in memory; a tied tensor counts once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in (*model.parameters(), *model.buffers())}
    return sum(storages.values())


def cache_bytes(cache: object) -> int:
    """Bytes of a cache's keys and values, of all layers."""
    return sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values) if tensor is not None)


def _set(ids: int | list[int] | None) -> set[int]:
    return set() if ids is None else set(ids) if isinstance(ids, list) else {ids}
