"""How long a study will take, from the speed of the base's trial, and how much memory it needs, by arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qrl import checkpoint
from qrl.recipe import Recipe

if TYPE_CHECKING:
    from qrl.study.trial import Trial

_STORED = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0, "nf4": 0.53}  # bytes per parameter, scales included
_TRAINED = 16  # bytes per parameter of fp32 weights, gradients and AdamW's two moments
_ACTIVATIONS = 17  # values kept per token, layer and hidden unit for the backward pass (arXiv 2205.05198, without s²)
_LOGITS = 3  # copies of the logits: their values, the softmax, the gradient
_CGROUP = Path("/sys/fs/cgroup")  # a container's limit of memory


@dataclass(frozen=True)
class Shape:
    """A model's sizes, from config.json and the headers of its weights."""

    parameters: int
    layers: int
    hidden: int
    vocabulary: int
    cached: int  # values per token and layer in the key-value cache
    positions: int | None  # longest text in tokens; None where config.json does not say, or scales them

    @classmethod
    def of(cls, path: Path) -> Shape:
        """Return the sizes of a checkpoint; those that config.json does not name count as 0."""
        config = checkpoint.config(path)
        hidden, heads = config.get("hidden_size") or 0, config.get("num_attention_heads") or 1
        size = (config.get("num_key_value_heads") or heads) * (config.get("head_dim") or hidden // heads)
        return cls(
            sum(entry.numel for entry in checkpoint.entries(path).values()),
            config.get("num_hidden_layers") or 0,
            hidden,
            config.get("vocab_size") or 0,
            2 * size,
            checkpoint.positions(path),
        )


def seconds(trial: Trial, recipe: Recipe, shape: Shape, missing: Mapping[str, int]) -> dict[str, float]:
    """Return the seconds of training and of evaluation, as far as they are still to run.

    Args:
        trial: the measured speed.
        recipe: how much is trained and evaluated.
        shape: of the model; its output head, which the trial computed for one token a prompt, costs more in training.
        missing: step → number of its results that are not in the store.
    """
    frame, train, asked = trial.frame, recipe.train, recipe.evaluate
    prompt, answer = float(frame["prompt_tokens"].mean()), float(frame["n_tokens"].mean())
    longest = int(frame["n_tokens"].max())

    def answers(count: int, batch: int, tokens: int) -> float:
        fixed, each = trial.step_s
        return math.ceil(count / batch) * (fixed * tokens) + count * (trial.forward_s * prompt + each * tokens)

    parts = {}
    if trainings := missing.get("train"):
        batch = train.prompts_per_step * train.generations
        sampled = math.ceil(train.steps / train.num_iterations)
        rollouts = sampled * answers(batch, batch, min(longest, train.max_completion_tokens))
        extra = train.gradient_checkpointing + (train.num_iterations > 1) + (train.beta > 0) + bool(train.teacher)
        head = shape.hidden * shape.vocabulary
        head_share = 1 + head / max(1, shape.parameters - head)
        updates = train.steps * batch * (prompt + answer) * trial.forward_s * (3 + extra) * head_share
        parts["train"] = trainings * (rollouts + updates)
    if cells := missing.get("evaluate"):
        parts["evaluate"] = cells * answers(trial.heldout * asked.samples, asked.batch_size, longest)
    return parts


def memory(recipe: Recipe, shape: Shape, prompt: float) -> tuple[float, float]:
    """Return the bytes that training needs for weights and optimizer, and for everything at its peak.

    Args:
        recipe: its `train` section.
        shape: of the model.
        prompt: length of a prompt, in tokens.

    Source: activations as in Korthikanti et al., arXiv 2205.05198, table 2, less what fused attention saves.
    """
    train = recipe.train
    width = _STORED[train.compute]
    weights = shape.parameters * (_STORED[train.storage] if train.adapter else _TRAINED)
    weights += shape.parameters * (4.0 if train.beta and not train.adapter else 0.0)
    text, batch = prompt + train.max_completion_tokens, train.prompts_per_step * train.generations
    micro = min(train.micro_batch, batch)
    layers = 1 + 2 * shape.layers / _ACTIVATIONS if train.gradient_checkpointing else shape.layers
    activations = micro * text * shape.hidden * _ACTIVATIONS * layers * width
    logits = micro * train.max_completion_tokens * shape.vocabulary * _LOGITS * 4
    cache = batch * text * shape.layers * shape.cached * width
    return weights, weights + max(activations + logits, cache)


def free_bytes(device: str) -> int:
    """Return the memory that is free on a device, in a container at most what its limit leaves."""
    if device == "cuda":
        import torch

        return torch.cuda.mem_get_info()[0]
    import psutil

    free = psutil.virtual_memory().available
    try:
        limit, used = ((_CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        cached = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())["inactive_file"]
        return free if limit == "max" else min(free, int(limit) - int(used) + int(cached))
    except (OSError, KeyError, ValueError):  # no container, or an older kernel's files
        return free


def duration(seconds: float) -> str:
    """Return a time as people say it: 40 s, 4 min, 2.5 h, 3 days."""
    for unit, length, limit in (("s", 1, 100), ("min", 60, 100), ("h", 3600, 48)):
        if seconds < limit * length:
            return f"{_short(seconds / length)} {unit}"
    return f"{seconds / 86400:.0f} days"


def size(memory: float) -> str:
    """Return bytes as 0.04 GiB, 5.1 GiB or 48 GiB."""
    return f"{_short(memory / 2**30)} GiB"


def _short(number: float) -> str:
    return f"{number:.2g}" if number < 10 else f"{number:.0f}"
