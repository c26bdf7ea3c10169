"""How long a study will take, from the speed of the base's trial, and how much memory it needs, by arithmetic.

The base answers a few questions before anything is trained (`trial`). From the times of these answers follow those of
all rollouts and evaluations; a training step adds forward and backward passes over what was sampled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qrl import checkpoint
from qrl.recipe import Recipe

if TYPE_CHECKING:
    import pandas as pd

_STORED = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0, "nf4": 0.53}  # bytes per parameter, scales included
_TRAINED = 16  # bytes per parameter of fp32 weights, gradients and AdamW's two moments
_ACTIVATIONS = 17  # values kept per token, layer and hidden unit for the backward pass (arXiv 2205.05198, without s²)
_LOGITS = 3  # copies of the logits: their values, the softmax, the gradient
_CGROUP = Path("/sys/fs/cgroup")  # a container's limit of memory


@dataclass(frozen=True)
class Trial:
    """What a forecast starts from: the base's answers to a few questions, and how fast they came; times in seconds."""

    heldout: int  # questions that a cell answers: `evaluate.n`, or all there are
    frame: pd.DataFrame  # a row per question, as `evaluate.cells.ask` returns them, and `prompt_tokens`
    free: int  # bytes of memory on the device, before the model was loaded
    start_s: float  # of CPU time until the first answer: what a step needs to start
    answers_s: float  # of all answers
    forward_s: float  # per token of a prompt
    step_s: tuple[float, float]  # per token that every answer of a batch gets: fixed part, and part per answer


@dataclass(frozen=True)
class Shape:
    """A model's sizes, from config.json and the headers of its weights."""

    parameters: int
    layers: int
    hidden: int
    vocabulary: int
    cached: int  # values per token and layer in the key-value cache
    positions: int | None  # longest text in tokens; None if config.json does not say, or scales them

    @classmethod
    def of(cls, path: Path) -> Shape:
        """Return the sizes of a checkpoint; those that config.json does not name count as 0."""
        config = checkpoint.config(path)
        hidden = config.get("hidden_size") or 0
        heads = config.get("num_attention_heads") or 1
        key_value_heads = config.get("num_key_value_heads") or heads
        head_size = config.get("head_dim") or hidden // heads
        return cls(
            parameters=sum(entry.numel for entry in checkpoint.entries(path).values()),
            layers=config.get("num_hidden_layers") or 0,
            hidden=hidden,
            vocabulary=config.get("vocab_size") or 0,
            cached=2 * key_value_heads * head_size,
            positions=checkpoint.positions(path),
        )


def seconds(trial: Trial, recipe: Recipe, shape: Shape, missing: Mapping[str, int]) -> dict[str, float]:
    """Return the seconds of training and of evaluation, as far as they are still to run.

    Args:
        trial: the measured speed.
        recipe: how much is trained and evaluated.
        shape: of the model; its output head, which the trial computed for one token a prompt, costs more in training.
        missing: step → number of its results that are not in the store.
    """
    longest_answer = int(trial.frame["n_tokens"].max())
    parts = {}
    trainings = missing.get("train")
    if trainings:
        parts["train"] = trainings * _training_s(trial, recipe, shape, longest_answer)
    cells = missing.get("evaluate")
    if cells:
        count = trial.heldout * recipe.evaluate.samples
        parts["evaluate"] = cells * _answers_s(trial, count, recipe.evaluate.batch_size, longest_answer)
    return parts


def _answers_s(trial: Trial, count: int, batch: int, answer_tokens: int) -> float:
    """Return the seconds for `count` answers in batches, each as long as the longest."""
    fixed_s, per_answer_s = trial.step_s
    prompt_tokens = float(trial.frame["prompt_tokens"].mean())
    batches = math.ceil(count / batch)
    return batches * fixed_s * answer_tokens + count * (trial.forward_s * prompt_tokens + per_answer_s * answer_tokens)


def _training_s(trial: Trial, recipe: Recipe, shape: Shape, longest_answer: int) -> float:
    """Return the seconds of one training: its rollouts, and its updates on what they sampled."""
    train = recipe.train
    batch = train.prompts_per_step * train.generations
    rollouts = math.ceil(train.steps / train.num_iterations)
    rollouts_s = rollouts * _answers_s(trial, batch, batch, min(longest_answer, train.max_completion_tokens))

    # A backward pass costs two forward ones; each of these settings adds one.
    extra_passes = train.gradient_checkpointing + (train.num_iterations > 1) + (train.beta > 0) + bool(train.teacher)
    head_parameters = shape.hidden * shape.vocabulary
    head_factor = 1 + head_parameters / max(1, shape.parameters - head_parameters)
    text_tokens = float(trial.frame["prompt_tokens"].mean()) + float(trial.frame["n_tokens"].mean())
    updates_s = train.steps * batch * text_tokens * trial.forward_s * (3 + extra_passes) * head_factor
    return rollouts_s + updates_s


def memory(recipe: Recipe, shape: Shape, prompt: float) -> tuple[float, float]:
    """Return the bytes that training needs for weights and optimizer, and for everything at its peak.

    Args:
        recipe: its `train` section.
        shape: of the model.
        prompt: length of a prompt, in tokens.

    Source: activations as in Korthikanti et al., arXiv 2205.05198, table 2, less what fused attention saves.
    """
    train = recipe.train
    value_bytes = _STORED[train.compute]
    weights = shape.parameters * (_STORED[train.storage] if train.adapter else _TRAINED)
    if train.beta and not train.adapter:  # the reference model; an adapter is switched off for it
        weights += shape.parameters * 4.0

    text_tokens = prompt + train.max_completion_tokens
    batch = train.prompts_per_step * train.generations
    micro_batch = min(train.micro_batch, batch)
    kept_layers = shape.layers
    if train.gradient_checkpointing:  # all values of one layer at a time, and two of every layer
        kept_layers = 1 + 2 * shape.layers / _ACTIVATIONS
    activations = micro_batch * text_tokens * shape.hidden * _ACTIVATIONS * kept_layers * value_bytes
    logits = micro_batch * train.max_completion_tokens * shape.vocabulary * _LOGITS * 4
    cache = batch * text_tokens * shape.layers * shape.cached * value_bytes
    # The key-value cache of the rollouts is free again when the update begins.
    return weights, weights + max(activations + logits, cache)


def free_bytes(device: str) -> int:
    """Return the memory that is free on a device, in a container at most what its limit leaves."""
    if device == "cuda":
        import torch

        return torch.cuda.mem_get_info()[0]
    import psutil

    free = psutil.virtual_memory().available
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit == "max":
            return free
        used = int((_CGROUP / "memory.current").read_text())
        statistics = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        file_cache = int(statistics["inactive_file"])  # counts as used, but is given up when memory is short
        return min(free, int(limit) - used + file_cache)
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
