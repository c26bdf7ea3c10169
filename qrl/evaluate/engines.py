"""How many vLLM engines start and answer side by side on one GPU.

An engine takes seconds to start, and a small model seconds to answer thousands of questions. So where several engines
fit on the GPU, each cell has one of its own, in a forked process that shares what is imported.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qrl import checkpoint
from qrl.recipe import Evaluate

# What an engine takes beside weights and cache: CUDA's context and graphs, kernels' workspaces, and the activations of
# its longest step.
_OVERHEAD_BYTES = 4 << 30
_ACTIVATION_SHARE = 0.25  # of the weights: activations grow with a model's width, as its weights do
_UNPACKED = 4  # 16 bits a weight, from at least 4
_HOST_BYTES = 4 << 30  # of the machine's memory, for each engine
_BLOCK = 16  # tokens: vLLM's cache is divided into blocks of this size


@dataclass(frozen=True)
class Together:
    """Engines that share a GPU."""

    count: int
    cache_gib: float  # of each engine's key-value cache: every answer fits at its longest


def together(
    paths: Sequence[Path], settings: Evaluate, window: int, *, free_bytes: int, host_bytes: int
) -> Together | None:
    """Return how many engines share a GPU; None if there is memory for no more than one.

    Args:
        paths: the cells' checkpoint folders.
        settings: of the evaluation.
        window: tokens of the longest prompt with its answer.
        free_bytes: of the GPU's memory.
        host_bytes: of the machine's memory that is free.
    """
    cache_bytes = max(_cache_bytes(path, window, settings.batch_size) for path in paths)
    if settings.kv_cache_gib is not None:
        cache_bytes = settings.kv_cache_gib * 2**30
    if not math.isfinite(cache_bytes):
        return None
    weights_bytes = max(checkpoint.check(path).bytes for path in paths) * (_UNPACKED if settings.unpacked else 1)
    engine_bytes = weights_bytes * (1 + _ACTIVATION_SHARE) + cache_bytes + _OVERHEAD_BYTES
    count = min(
        len(paths),
        len(os.sched_getaffinity(0)),
        int(settings.gpu_memory_utilization * free_bytes / engine_bytes),
        int(host_bytes / (weights_bytes + _HOST_BYTES)),
    )
    return Together(count, cache_bytes / 2**30) if count > 1 else None


def _cache_bytes(path: Path, window: int, sequences: int) -> float:
    """Return the bytes of keys and values, in 16 bits, of all answers at their longest; infinite if that is not known.

    A model that keeps less of them, in a window or compressed, needs less than this.
    """
    config = checkpoint.config(path)
    layers = config.get("num_hidden_layers")
    heads = config.get("num_attention_heads")
    hidden = config.get("hidden_size")
    if not (layers and heads and hidden):
        return math.inf
    kv_heads = config.get("num_key_value_heads") or heads
    head_size = config.get("head_dim") or hidden // heads
    tokens = (math.ceil(window / _BLOCK) + 1) * _BLOCK * sequences
    keys_and_values = 2
    bytes_each = 2
    return keys_and_values * bytes_each * layers * kv_heads * head_size * tokens
