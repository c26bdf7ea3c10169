"""Engines of this process under a clock: when each prompt's first and last token was written, and how large the cache grew."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qrl.benchmark import Answered, Request
from qrl.engine import device as devices
from qrl.engine import hf, vllm

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig


class Transformers:
    """A checkpoint loaded as evaluation loads it: codes are unpacked, so a scheme saves disk here and no memory."""

    def __init__(self, path: Path, device: str, dtype: str) -> None:
        import transformers

        self.name = f"{hf.NAME} {transformers.__version__}"
        self._device = device
        self._model, self._tokens = hf.load(path, device, devices.compute_dtype(dtype, device))
        self.weights_bytes = weights_bytes(self._model)

    def close(self) -> None:
        """Frees the model."""
        del self._model

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
        settings = GenerationConfig(
            eos_token_id=ends,
            pad_token_id=usual.pad_token_id,
            do_sample=False,
            max_new_tokens=new_tokens,
            return_dict_in_generate=True,
        )
        batch = self._tokens.pad({"input_ids": [list(ids) for ids in prompts]}, return_tensors="pt").to(
            self._model.device
        )
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


class Vllm:
    """A checkpoint in vLLM: its own kernels, its own batches, its own times of each request."""

    def __init__(
        self,
        path: Path,
        device: str,
        dtype: str,
        *,
        max_tokens: int,
        sequences: int,
        memory: float,
        cache_bytes: int | None = None,
    ) -> None:
        from transformers import AutoConfig

        self._loaded = vllm.Vllm(
            path,
            device,
            dtype,
            max_tokens=max_tokens,
            sequences=sequences,
            deterministic=False,
            seed=0,
            memory=memory,
            cache_bytes=cache_bytes,
            timed=True,
        )
        self.name = self._loaded.name
        self.weights_bytes = self._loaded.weights_bytes
        self._token_bytes = token_bytes(AutoConfig.from_pretrained(path), self._loaded.dtype)

    def ask(self, prompts: Sequence[Sequence[int]], *, new_tokens: int, fixed: bool) -> Answered:
        """Greedy answers to a batch; as `Transformers.ask`. The cache is what these requests need, not what vLLM reserves."""
        began = time.perf_counter()
        answers = self._loaded.ask(prompts, new_tokens=new_tokens, fixed=fixed)
        seconds = time.perf_counter() - began
        requests = []
        for answer, prompt in zip(answers, prompts, strict=True):
            times, written = answer.metrics, len(answer.outputs[0].token_ids)
            first = times.first_token_latency
            requests.append(Request(len(prompt), written, first, first + times.last_token_ts - times.first_token_ts))
        cached = sum(request.prompt_tokens + request.new_tokens - 1 for request in requests)
        return Answered(tuple(requests), seconds, cached * self._token_bytes)

    def close(self) -> None:
        """Stops its worker."""
        self._loaded.close()


def token_bytes(config: PretrainedConfig, dtype: str) -> int:
    """Bytes of one token's keys and values in all layers, by a model's configuration.

    Args:
        config: of a model with grouped-query attention.
        dtype: of the cache, "bfloat16" say.
    """
    import torch

    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_key_value_heads * width * getattr(torch, dtype).itemsize


def weights_bytes(model: torch.nn.Module) -> int:
    """Bytes of a model's parameters and buffers in memory; a tied tensor counts once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in (*model.parameters(), *model.buffers())
    }
    return sum(storages.values())


def cache_bytes(cache: object) -> int:
    """Bytes of a cache's keys and values, of all layers."""
    return sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values) if tensor is not None)


def _set(ids: int | list[int] | None) -> set[int]:
    return set() if ids is None else set(ids) if isinstance(ids, list) else {ids}
