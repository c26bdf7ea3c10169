"""How long a study will take, from the speed of the base's trial.

The base answers a few questions before anything is trained (`trial`). From the times of these answers follow those of
all rollouts and evaluations; a training step adds forward and backward passes over what was sampled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qrl.recipe import Recipe
from qrl.train.footprint import Shape

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Trial:
    """What a forecast starts from: the base's answers to a few questions, and how fast they came; times in seconds."""

    heldout: int  # questions that a cell answers: `evaluate.n`, or all there are
    frame: pd.DataFrame  # a row per question, as `evaluate.cells.graded_frame` returns them, and `prompt_tokens`
    free: int  # bytes of memory on the device, before the model was loaded
    start_s: float  # of CPU time until the first answer: what a step needs to start
    answers_s: float  # of all answers
    forward_s: float  # per token of a prompt
    step_s: tuple[float, float]  # per token that every answer of a batch gets: fixed part, and part per answer


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
