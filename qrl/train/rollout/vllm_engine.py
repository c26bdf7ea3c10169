"""vLLM in the training process: create an engine, load weights, sample, sleep and wake, with a seed of its own.

One step of training, as `trl/vllm_link` calls it: `wake` gives the engine its memory back, `load` replaces its weights
by training's present ones, `generate` samples the step's completions, `sleep` frees the memory for the update. An
engine that fits next to training never sleeps (`sleeps`). Everything here exists because vLLM assumes that it is
alone: on the GPU, in its process, and with weights that never change.

This file depends on vLLM's version, as does `engine/vllm_fakequant`. On H100s and H200s studies ran with 0.31.0, which
`projects/vllm` pins, and older measurements with 0.25.1. Others that TRL 1.16 supports, from 0.22 on, are expected to
differ only in options that they have or lack.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch.distributed.elastic.utils.distributed import get_free_port

from qrl import checkpoint, process
from qrl.engine import pretrained, vllm, vllm_support
from qrl.errors import QrlError
from qrl.formats import groups, layers
from qrl.formats.fakequant import operation
from qrl.recipe import Rollout
from qrl.train.rollout import codes, memory

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.lora.request import LoRARequest

FP8 = "fp8_per_tensor"  # one scale per weight tensor, computed at every sync, and one per token's activations
FP8_CAPABILITY = (8, 9)  # Ada and Hopper: the first GPUs that multiply in 8-bit floats
BATCHED_TOKENS = 8192  # of prompts, in one engine step
# Largest share of the GPU for weights, gradients, optimizer and an awake engine; activations take the rest.
_MAX_RESIDENT_SHARE = 0.5
SLOW_FP8 = range(17, 64)  # batch sizes with slower FP8 products on Hopper than a batch of 64 (README.md)


def create(
    model: str,
    settings: Rollout,
    *,
    sequences: int,
    sleeps: bool,
    rank: int,
    world: int,
    qat: str = "none",
    group_size: int = groups.USUAL,
    terms: Sequence[str] = (),
    slot: Mapping[str, Any] | None = None,
    raw_logprobs: bool = False,
    compiled: bool = True,
) -> LLM:
    """Return an engine in the process of the trained model.

    Args:
        model: the base's checkpoint folder; the first `load` overwrites its weights.
        settings: its share of the GPU's memory, its storage of weights, keys and values, its longest sequence.
        sequences: largest number of completions at once.
        sleeps: let it give its memory back between rollouts.
        qat: the format of training; the engine rounds activations as its forward pass does, or holds its codes.
        group_size: inputs that share a scale, of its codes in integers.
        terms: of `train.qat_layers`: which linears have the format.
        slot: vLLM's options for an adapter that is not merged, from `slot.options`.
        raw_logprobs: report log-probabilities before tokens are penalized or left out, at temperature 1.
        compiled: let torch.compile fuse the layers; else CUDA graphs alone.

    Raises:
        BadInput: vLLM has no kernel for the format here.
        QrlError: vLLM cannot start, for want of memory say; or no linear of the engine rounds its inputs, though the
            format does.
    """
    from vllm import LLM

    holds_codes = settings.quantization == codes.NAME
    rounding = _rounding(model, qat, terms)
    format_options: dict[str, Any] = {}
    if holds_codes:
        config = codes.engine_config(model, qat, group_size, terms)
        vllm_support.check_format(config, "cuda" if torch.cuda.is_available() else "cpu")
        # The base's own weights are no codes, so the engine starts with random ones.
        format_options = {"hf_overrides": {"quantization_config": config}, "load_format": _codes_loader()}
    elif rounding:
        from qrl.engine import vllm_fakequant  # which makes its method known to vLLM

        format_options = {"hf_overrides": {"quantization_config": rounding}}
    fp8 = settings.quantization == "fp8"
    batch_options = _batches(sequences, fp8=fp8 or (holds_codes and qat == "fp8"), compiled=compiled)

    # One engine per process, in the process itself: vLLM reads the variables that torchrun sets.
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ.setdefault("LOCAL_RANK", str(rank))
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", str(get_free_port()))  # TRL's 29500 collides when two trainings start together

    free_memory = memory.free()
    try:
        with process.swallowing(), vllm.without_bars():
            engine = LLM(
                model=model,
                dtype="bfloat16",
                quantization=FP8 if fp8 else None,
                kv_cache_dtype=settings.kv_cache,
                **vllm.memory_options(settings.gpu_memory_utilization, settings.kv_cache_gib),
                max_model_len=settings.max_model_tokens,
                max_num_batched_tokens=max(BATCHED_TOKENS, sequences),
                **batch_options,
                enable_sleep_mode=sleeps,
                distributed_executor_backend="external_launcher",
                logprobs_mode="raw_logprobs"
                if raw_logprobs
                else "processed_logprobs",  # the latter: at the temperature
                seed=rank,
                trust_remote_code=False,
                **format_options,
                **(slot or {}),
            )
    except Exception as error:  # whatever vLLM raised
        raise memory.unstarted(error, settings, free_memory) from error

    rounds_inputs = bool(rounding) and not holds_codes
    if rounds_inputs and not vllm_fakequant.rounding_layers(runner(engine).model):
        raise QrlError(
            f"The rollout engine does not round activations as train.qat = {qat} does: set rollout.engine = "
            "transformers, and report the model's architecture."
        )
    return engine


def _rounding(model: str, qat: str, terms: Sequence[str]) -> dict[str, Any] | None:
    """Return how the engine rounds inputs, as `operation.engine_config` does, linear by linear where they differ."""
    if not terms:
        return operation.engine_config(qat)
    skeleton = pretrained.skeleton(checkpoint.config(model))
    return operation.engine_config(qat, layers.plan_of(skeleton, qat, terms, "train.qat_layers").formats)


@functools.cache
def _codes_loader() -> str:
    """Register a loader of random codes with scales of 1, for an engine that waits for its first sync; return its name.

    vLLM's own loader draws random scales, too. For NVFP4, Marlin's preparation turns these into infinities: 1/0.001 ·
    2¹¹⁹ exceeds float32. Logits are then NaN, and the engine, which samples while it starts, reads the embedding of a
    token that does not exist.
    """
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    class Loader(DummyModelLoader):
        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            super().load_weights(model, model_config)
            for layer in model.modules():
                if hasattr(layer, "weight_global_scale"):
                    layer.weight_global_scale.data.fill_(1)
                    layer.weight_scale.data.fill_(1)

    name = "qrl-codes"
    register_model_loader(name)(Loader)
    return name


def runner(engine: LLM):
    """Return vLLM's runner of the model, in this process."""
    return engine.llm_engine.model_executor.driver_worker.model_runner


def _batches(sequences: int, *, fp8: bool, compiled: bool) -> dict:
    """Return how many completions run at once, what is compiled and, in FP8, the batch sizes to pad to."""
    options: dict[str, Any] = {"max_num_seqs": sequences, "compilation_config": {}}
    if not compiled:
        options |= vllm.graphs_alone(sequences)
    if not fp8 or sequences < SLOW_FP8.start:
        return options

    # Without a graph for the slow sizes, vLLM pads such a batch to the next size that has one.
    max_sequences = max(sequences, SLOW_FP8.stop)
    default_sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]  # vLLM's, up to twice the completions
    sizes = [size for size in default_sizes if size <= 2 * max_sequences and size not in SLOW_FP8]
    compilation = options["compilation_config"] | {"cudagraph_capture_sizes": sizes}
    return options | {"max_num_seqs": max_sequences, "compilation_config": compilation}


def load(engine: LLM, weights: Iterator[tuple[str, torch.Tensor]], *, reloads: bool) -> None:
    """Replace all weights of the engine, and drop its prefix cache.

    Args:
        weights: tensors by their checkpoint's names, in full precision or as `codes.named_codes` yields them.
        reloads: go through the engine's reload life cycle, as `rollout.quantization` needs: it restores each layer's
            form in the checkpoint, fills it, quantizes or repacks it and copies it to where the engine's graphs read.
            Loading into a kernel's own layout fails.

    Raises:
        QrlError: a weight of the engine was not among them, so it would sample with an old one.
    """
    model_runner = runner(engine)
    model = model_runner.model
    with torch.no_grad():
        if reloads:
            sent_names: set[str] = set()
            _give_loaders(model)
            with _in_place(model):
                model_runner.reload_weights(weights_iterator=_noted(weights, sent_names))
            missing = _checkpoint_names(engine) - sent_names
        else:
            # vLLM's linears with a slot for an adapter hold their own weight one level deeper.
            engine_names = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}
            missing = engine_names - model.load_weights(weights)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    if missing:
        raise QrlError(
            f"The rollout engine has weights that training did not send ({', '.join(sorted(missing)[:3])}), and would "
            "sample with old ones: set rollout.engine = transformers, and report the model's architecture."
        )
    engine.reset_prefix_cache()


def _noted(weights: Iterator[tuple[str, torch.Tensor]], names: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights, and add the names of those that were taken to a set: the reload itself reports none."""
    for name, weight in weights:
        names.add(codes.plain_name(name))
        yield name, weight


def _give_loaders(model: torch.nn.Module) -> None:
    """Give a linear's bias its loader back: Marlin's FP4 kernel puts a new bias without one in its place."""
    from vllm.model_executor.layers.linear import LinearBase

    for layer in model.modules():
        bias = getattr(layer, "bias", None)
        if isinstance(layer, LinearBase) and bias is not None and not hasattr(bias, "weight_loader"):
            bias.output_dim = 0
            bias.weight_loader = layer.weight_loader


@contextlib.contextmanager
def _in_place(model: torch.nn.Module) -> Iterator[None]:
    """Put tensors that a reload has moved back to where the engine's graphs read: Marlin's kernel moves biases."""
    originals = {name: parameter.data for name, parameter in model.named_parameters()}
    yield
    for name, parameter in model.named_parameters():
        original = originals.get(name)
        if original is None or original.shape != parameter.shape:
            continue
        if original.data_ptr() != parameter.data_ptr():
            parameter.data = original.copy_(parameter.data)


def _checkpoint_names(engine: LLM) -> set[str]:
    """Return the tensors of the engine's checkpoint; training sends a tied head only once, so it is left out."""
    config = engine.llm_engine.model_config
    names = set(checkpoint.entries(config.model))
    if getattr(config.hf_config, "tie_word_embeddings", False):
        names.discard("lm_head.weight")
    return names


def generate(
    engine: LLM,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float,
    max_tokens: int,
    more: dict,
    adapter: LoRARequest | None = None,
) -> tuple[list[list[int]], list[list[float | None]]]:
    """Return one completion per prompt, with the log-probability of each of its tokens.

    Args:
        prompts: B lists of token ids.
        more: further sampling parameters, by vLLM's names; `logprobs` None leaves log-probabilities out.
        adapter: `slot.request()` where the engine holds the adapter in a slot.

    Returns:
        B lists of token ids, and B lists of log-probabilities, None where vLLM has none; empty if they were left out.
    """
    from vllm import SamplingParams

    options = {"temperature": temperature, "max_tokens": max_tokens, "logprobs": 0, "detokenize": False} | more
    options["flat_logprobs"] = True  # otherwise vLLM makes an object and a dictionary for every token
    requests = [{"prompt_token_ids": list(ids)} for ids in prompts]
    answers = engine.generate(requests, SamplingParams(**options), use_tqdm=False, lora_request=adapter)
    completions = [answer.outputs[0] for answer in answers]
    ids = [list(completion.token_ids) for completion in completions]
    logprobs = [_sampled(completion) for completion in completions]
    return ids, logprobs


def _sampled(completion) -> list[float | None]:
    """Return the log-probabilities of a completion's own tokens."""
    logprobs = completion.logprobs
    if logprobs is None:
        return []
    # In the flat form the sampled token comes first at every position.
    values = [logprobs.logprobs[start] for start in logprobs.start_indices]
    return [None if math.isnan(value) else value for value in values]


def sleep(engine: LLM, *, keeps: bool = False) -> None:
    """Free the engine's memory; its weights move to the host's memory, or the next rollout needs a `load`.

    Args:
        keeps: move the weights. An engine with a slot needs it, since its base is sent only once.
    """
    engine.sleep(level=1 if keeps else 2)


def wake(engine: LLM, part: str) -> None:
    """Allocate memory again for "weights" or for the "kv_cache"."""
    torch.cuda.empty_cache()
    engine.wake_up(tags=[part])


def sleeps(settings: Rollout, model) -> bool:
    """Return whether a colocated engine gives its memory back during updates.

    `auto` depends on the model, the GPU, and what else training holds there: a teacher, or a reference.
    """
    if settings.sleep != "auto":
        return settings.sleep == "on"
    weights = list(model.parameters())
    stored = sum(weight.nbytes for weight in weights)
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    gpu_bytes = torch.cuda.get_device_properties(process.local_rank()).total_memory
    # A teacher or a reference. The model itself may not be there yet: FSDP moves it later.
    model_bytes_there = sum(weight.nbytes for weight in weights if weight.is_cuda)
    other_bytes = torch.cuda.memory_allocated(process.local_rank()) - model_bytes_there
    if settings.kv_cache_gib is None:
        engine_share = settings.gpu_memory_utilization
    else:
        engine_share = (settings.kv_cache_gib * 2**30 + stored) / gpu_bytes
    shards = process.world_size() if process.sharded() else 1
    return memory_is_short(stored // shards + other_bytes, trained // shards, engine_share, gpu_bytes)


def memory_is_short(stored: int, trained: int, engine_share: float, gpu_bytes: int) -> bool:
    """Return whether training and an awake engine leave too little of a GPU for activations.

    Args:
        stored: bytes of weights.
        trained: number of weights that the optimizer moves.
        engine_share: of the GPU's memory, between 0 and 1.
        gpu_bytes: all of the GPU's memory.
    """
    # A trained weight has a gradient and AdamW's two moments: 12 bytes in fp32.
    return stored + 12 * trained + engine_share * gpu_bytes > _MAX_RESIDENT_SHARE * gpu_bytes


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Let an engine draw from its own seed, without changing what training draws afterwards.

    On a CPU vLLM samples tokens with torch's generator; on a GPU it may seed each completion from numpy's.
    """
    state = numpy.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # by default a context on each GPU
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        numpy.random.seed(seed % 2**32)
        try:
            yield
        finally:
            numpy.random.set_state(state)
