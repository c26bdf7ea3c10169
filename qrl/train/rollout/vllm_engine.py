"""vLLM in the training process: how it is made, given weights, asked, and put to sleep. All that its versions differ in is here.

Tried on 0.25.1; written so that 0.22 to 0.31 (what TRL 1.16 takes) differ only in options that they have or lack.
"""

from __future__ import annotations

import importlib.util
import math
import os
import socket
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from qrl.errors import QrlError

if TYPE_CHECKING:
    import torch
    from vllm import LLM

FP8 = "fp8_per_tensor"  # a weight's scale is its tensor's, made anew at every sync; an activation's is its token's
FP8_CAPABILITY = (8, 9)  # Ada and Hopper on: the first GPUs that multiply in 8-bit floats
BATCHED_TOKENS = 8192  # of prompts, in one engine step
SLOW_FP8 = range(17, 64)  # batches whose FP8 products take longer on Hopper than those of 64 (ROLLOUTS.md)


def installed() -> bool:
    """Whether vLLM can be imported here."""
    return importlib.util.find_spec("vllm") is not None


def create(
    model: str,
    *,
    sequences: int,
    share: float,
    sleeps: bool,
    fp8: bool,
    kv_cache: str,
    max_tokens: int | None,
    rank: int,
    world: int,
) -> LLM:
    """An engine in this very process, beside the model that is trained.

    Args:
        model: the base's checkpoint folder; its weights are overwritten by the first `load`.
        sequences: most completions at once.
        share: of the card's memory that the engine may take, weights and KV cache together.
        sleeps: make it able to give that memory back between rollouts.
        fp8: store and multiply linears in 8-bit floats, quantized from what `load` sends.
        kv_cache: how keys and values are stored: "auto", which is bf16, or "fp8", whose scales are 1.
        max_tokens: longest prompt and completion together; None takes the checkpoint's.
        rank: of this process; `world` of them.
    """
    from vllm import LLM

    # One engine a process, in it: what torchrun sets is what vLLM reads.
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ.setdefault("LOCAL_RANK", str(rank))
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault(
        "MASTER_PORT", str(_free_port())
    )  # TRL takes 29500 while it is free: two that start together met there
    return LLM(
        model=model,
        dtype="bfloat16",
        quantization=FP8 if fp8 else None,
        kv_cache_dtype=kv_cache,
        gpu_memory_utilization=share,
        max_model_len=max_tokens,
        max_num_batched_tokens=max(BATCHED_TOKENS, sequences),
        **_batches(sequences, fp8=fp8),
        enable_sleep_mode=sleeps,
        distributed_executor_backend="external_launcher",
        logprobs_mode="processed_logprobs",  # of the distribution that was sampled from, temperature included
        seed=rank,
        trust_remote_code=False,
    )


def _batches(sequences: int, *, fp8: bool) -> dict:
    """How many completions an engine draws at once, and, in FP8, the batches that it pads a step's to: none whose products are slow."""
    if not fp8 or sequences < SLOW_FP8.start:
        return {"max_num_seqs": sequences}
    most = max(sequences, SLOW_FP8.stop)
    usual = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]  # vLLM's own, up to twice the completions
    return {
        "max_num_seqs": most,
        "compilation_config": {
            "cudagraph_capture_sizes": [size for size in usual if size <= 2 * most and size not in SLOW_FP8]
        },
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def load(engine: LLM, weights: Iterator[tuple[str, torch.Tensor]], *, fp8: bool) -> None:
    """Gives the engine all weights anew, and forgets what it cached of the old ones.

    Args:
        weights: full-precision tensors by their checkpoint's names.
        fp8: requantize: through the engine's reload life cycle, which restores each layer's full-precision form,
            fills it, quantizes it and copies it to where the engine's graphs look. Loading into 8-bit weights fails.

    Raises:
        QrlError: a weight of the engine's was not among them, so it would answer with an old one.
    """
    import torch

    runner = engine.llm_engine.model_executor.driver_worker.model_runner
    with torch.no_grad():
        if fp8:
            names: set[str] = set()
            runner.reload_weights(weights_iterator=_noted(weights, names))
            missing = _checkpoint_names(engine) - names
        else:
            missing = {name for name, _ in runner.model.named_parameters()} - runner.model.load_weights(weights)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    if missing:
        raise QrlError(
            f"The rollout engine has weights that training did not send ({', '.join(sorted(missing)[:3])}): it would "
            "sample from old ones. Train with rollout.engine = transformers, and report the model's architecture."
        )
    engine.reset_prefix_cache()


def _noted(weights: Iterator[tuple[str, torch.Tensor]], names: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, weight in weights:
        names.add(name)
        yield name, weight


def _checkpoint_names(engine: LLM) -> set[str]:
    """Tensors of the checkpoint that the engine was made from; a tied head stored twice is sent once."""
    from pathlib import Path

    from qrl.formats import header

    folder = Path(engine.llm_engine.model_config.model)
    names = {name for file in folder.glob("*.safetensors") for name in header.read(file)} - {"__metadata__"}
    tied = getattr(engine.llm_engine.model_config.hf_config, "tie_word_embeddings", False)
    return names - {"lm_head.weight"} if tied else names


def generate(
    engine: LLM, prompts: Sequence[Sequence[int]], *, temperature: float, max_tokens: int, more: dict
) -> tuple[list[list[int]], list[list[float | None]]]:
    """One completion a prompt, with the log-probability of each of its tokens.

    Args:
        prompts: B lists of token ids.
        temperature: of sampling.
        max_tokens: longest completion.
        more: further sampling parameters, by vLLM's names.

    Returns:
        B lists of token ids, and B lists of log-probabilities, None where vLLM has none.
    """
    from vllm import SamplingParams

    options = {"temperature": temperature, "max_tokens": max_tokens, "logprobs": 0, "detokenize": False} | more
    if hasattr(SamplingParams, "flat_logprobs"):
        options["flat_logprobs"] = True  # else an object and a dictionary for every token
    asked = [{"prompt_token_ids": list(ids)} for ids in prompts]
    answers = engine.generate(asked, sampling_params=SamplingParams(**options), use_tqdm=False)
    written = [answer.outputs[0] for answer in answers]
    return [list(one.token_ids) for one in written], [_sampled(one) for one in written]


def _sampled(written) -> list[float | None]:
    """Log-probabilities of a completion's own tokens."""
    found = written.logprobs
    if hasattr(found, "start_indices"):  # flat: the sampled token comes first at every position
        values = [found.logprobs[start] for start in found.start_indices]
    else:
        values = [position[token].logprob for token, position in zip(written.token_ids, found, strict=True)]
    return [None if math.isnan(value) else value for value in values]


def sleep(engine: LLM) -> None:
    """Gives the engine's memory back; its weights are lost, so the next rollout needs a `load` after `wake`."""
    engine.sleep(level=2)


def wake(engine: LLM, what: str) -> None:
    """Takes memory again for "weights" or for the "kv_cache"."""
    import torch

    torch.cuda.empty_cache()
    engine.wake_up(tags=[what])
