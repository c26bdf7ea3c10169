"""Which cells each vLLM engine answers, and how many engines answer side by side on one GPU.

An engine takes tens of seconds to start, and needs another start for each set of packed weights, while a small model
answers thousands of questions in seconds. So where several engines fit on the GPU, they start and answer at the same
time, each in a process of its own: a lane.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qrl import checkpoint, names
from qrl.evaluate.cells import Cell, engine_sort_key
from qrl.recipe import Recipe

# What an engine takes beside weights and cache: the context of CUDA, its graphs, kernels' workspaces, and the
# activations of its first, longest step. Between 2 and 3 GiB was measured for models up to 1.5 B.
_OVERHEAD_BYTES = 4 << 30
_ACTIVATION_SHARE = 0.25  # of the weights: activations grow with a model's width, as its weights do
_HOST_BYTES = 4 << 30  # of the machine's memory, for each engine
_BLOCK = 16  # tokens: vLLM's cache is divided into blocks of this size


@dataclass(frozen=True)
class Plan:
    """Engines side by side."""

    lanes: tuple[tuple[int, ...], ...]  # the numbers of the cells that one process answers, in order
    cache_gib: float  # each engine's key-value cache: every answer fits at its longest


def together(cells: Sequence[Cell], recipe: Recipe, window: int, free_bytes: int, host_bytes: int) -> Plan | None:
    """Plan engines side by side; None if there is one engine's work only, or memory for no more than one.

    Args:
        cells: to be answered by vLLM on a GPU.
        recipe: its `evaluate` section.
        window: tokens of the longest prompt with its answer.
        free_bytes: of the GPU's memory.
        host_bytes: of the machine's memory that is free.
    """
    settings = recipe.evaluate
    starts = _one_engine_each(cells, recipe)
    cache_bytes = max((_cache_bytes(cell.path, window, settings.batch_size) for cell in cells), default=0)
    if settings.kv_cache_gib is not None:
        cache_bytes = settings.kv_cache_gib * 2**30
    weights_bytes = max((checkpoint.check(cell.path).bytes for cell in cells), default=0)
    if settings.unpacked:  # at most 16 bits a weight, from at least 4
        weights_bytes *= 4
    engine_bytes = weights_bytes * (1 + _ACTIVATION_SHARE) + cache_bytes + _OVERHEAD_BYTES

    engines = min(
        len(starts),
        os.cpu_count() or 1,
        int(settings.gpu_memory_utilization * free_bytes / engine_bytes),
        int(host_bytes / (_HOST_BYTES + weights_bytes)),
    )
    if engines < 2 or not math.isfinite(cache_bytes):
        return None
    lanes: list[list[int]] = [[] for _ in range(engines)]
    for number, cells_of_start in enumerate(starts):
        lanes[number % engines] += cells_of_start
    return Plan(tuple(map(tuple, lanes)), cache_bytes / 2**30)


def _one_engine_each(cells: Sequence[Cell], recipe: Recipe) -> list[list[int]]:
    """Return the numbers of the cells that each start of an engine can answer."""
    starts: dict[object, list[int]] = {}
    for number, cell in enumerate(cells):
        _, is_packed = engine_sort_key(cell.path, cell.scheme, recipe)
        has_fp8_cache = cell.scheme.endswith(names.KV_FP8)
        # Only weights in full precision are replaced within an engine.
        key = number if is_packed else has_fp8_cache
        starts.setdefault((is_packed, key), []).append(number)
    return list(starts.values())


def _cache_bytes(path: Path, window: int, sequences: int) -> float:
    """Return the bytes of keys and values in 16 bits of all answers at their longest; infinite if config.json lacks it.

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
    return 2 * 2 * layers * kv_heads * head_size * tokens
