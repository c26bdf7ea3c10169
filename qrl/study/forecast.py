"""How long a study will take, from the speed of the base's trial, and how much memory is free for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from qrl.recipe import Recipe
from qrl.train.footprint import Shape

if TYPE_CHECKING:
    from qrl.study.trial import Trial

_CGROUP = Path("/sys/fs/cgroup")  # a container's limit of memory


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
