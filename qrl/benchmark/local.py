"""In-process engines with a clock: the times of each prompt's first and last token, and the size of the KV cache."""

import time
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, GenerationConfig, PretrainedConfig

from qrl.benchmark import BatchResult, Prompts, Request
from qrl.engine import device as devices
from qrl.engine import hf, vllm


class Transformers:
    """A checkpoint loaded as in evaluation: its codes are unpacked, so a scheme saves disk space but no memory."""

    def __init__(self, path: Path, device: str, dtype: str) -> None:
        self.name = f"{hf.NAME} {transformers.__version__}"
        self._device = device
        self._model, self._tokenizer = hf.load(path, device, devices.compute_dtype(dtype, device))
        tensors = (*self._model.parameters(), *self._model.buffers())
        storages = (tensor.untyped_storage() for tensor in tensors)  # a tied tensor counts once
        self.weights_bytes = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def close(self) -> None:
        """Free the model."""
        del self._model

    def ask(self, prompts: Prompts, *, new_tokens: int, fixed: bool) -> BatchResult:
        """Generate greedy answers of at most `new_tokens`; if fixed, of exactly so many, past end tokens."""
        defaults = self._model.generation_config
        eos_token_id = None if fixed else defaults.eos_token_id
        settings = GenerationConfig(
            eos_token_id=eos_token_id,
            pad_token_id=defaults.pad_token_id,
            do_sample=False,
            max_new_tokens=new_tokens,
            return_dict_in_generate=True,
        )
        batch = self._tokenizer.pad({"input_ids": [list(ids) for ids in prompts]}, return_tensors="pt")
        batch = batch.to(self._model.device)
        token_times: list[float] = []  # of the batch's first token, its second, …

        def tick(input_ids: torch.Tensor, _scores: object, **_rest: object) -> torch.Tensor:
            token_times.append(self._now())
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

        began = self._now()
        with torch.inference_mode():
            output = self._model.generate(**batch, generation_config=settings, stopping_criteria=[tick])
        answers = output.sequences[:, batch["input_ids"].shape[1] :].tolist()

        end_tokens = set()
        if isinstance(eos_token_id, int):
            end_tokens = {eos_token_id}
        elif eos_token_id:
            end_tokens = set(eos_token_id)
        requests = []
        for token_ids, prompt in zip(answers, prompts, strict=True):
            # Shorter answers are padded to the longest, so the end token says how long each one is.
            last = next((index for index, token in enumerate(token_ids) if token in end_tokens), len(token_ids) - 1)
            requests.append(Request(len(prompt), last + 1, token_times[0] - began, token_times[last] - began))

        cache_bytes = 0
        for layer in output.past_key_values.layers:
            for tensor in (layer.keys, layer.values):
                if tensor is not None:
                    cache_bytes += tensor.nbytes
        return BatchResult(tuple(requests), token_times[-1] - began, cache_bytes)

    def _now(self) -> float:
        if self._device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


class Vllm:
    """A checkpoint in vLLM, with its own kernels, batches and times of each request."""

    def __init__(
        self,
        path: Path,
        device: str,
        dtype: str,
        *,
        max_tokens: int,
        sequences: int,
        memory: float,
        cache_gib: float | None = None,
        kv_fp8: bool = False,
    ) -> None:
        """Load it; arguments as for `engine.vllm.Vllm`."""
        self._loaded = vllm.Vllm(
            path,
            device,
            dtype,
            deterministic=False,
            seed=0,
            timed=True,
            max_tokens=max_tokens,
            sequences=sequences,
            memory=memory,
            cache_gib=cache_gib,
            kv_fp8=kv_fp8,
        )
        self.name = self._loaded.name
        self.weights_bytes = self._loaded.weights_bytes
        cache_dtype = "float8_e4m3fn" if kv_fp8 else self._loaded.dtype
        self._token_bytes = token_bytes(AutoConfig.from_pretrained(path), cache_dtype)

    def ask(self, prompts: Prompts, *, new_tokens: int, fixed: bool) -> BatchResult:
        """Generate as `Transformers.ask`; the cache's size is that of these requests, not of vLLM's reservation."""
        began = time.perf_counter()
        answers = self._loaded.ask(prompts, new_tokens=new_tokens, fixed=fixed)
        seconds = time.perf_counter() - began
        requests = []
        for answer, prompt in zip(answers, prompts, strict=True):
            times = answer.metrics
            first_token_s = times.first_token_latency
            latency_s = first_token_s + times.last_token_ts - times.first_token_ts
            requests.append(Request(len(prompt), len(answer.outputs[0].token_ids), first_token_s, latency_s))
        # The last token is never read again, so it has no keys and values.
        cached_tokens = sum(request.prompt_tokens + request.new_tokens - 1 for request in requests)
        return BatchResult(tuple(requests), seconds, cached_tokens * self._token_bytes)

    def close(self) -> None:
        """Stop its worker."""
        self._loaded.close()


def token_bytes(config: PretrainedConfig, dtype: str) -> int:
    """Return the bytes of one token's keys and values in all layers, for a cache in a dtype such as "bfloat16"."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    bytes_per_value = getattr(torch, dtype).itemsize
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * bytes_per_value
