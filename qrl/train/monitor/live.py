"""Metrics while training: what TRL logs under our names, with speed and peak memory, handed on step by step."""

from __future__ import annotations

import resource
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from qrl import process
from qrl.recipe import Train
from qrl.train import reward
from qrl.train.rollout import trainer

if TYPE_CHECKING:
    import pandas as pd

Log = Callable[[dict[str, float], int], None]

# TRL's name → ours; the rest of its numbers stay in the trainer's own state.
METRICS = {
    "reward": "train/reward",
    "reward_std": "train/reward_std",
    "rewards/correct/mean": "train/reward_correct",
    "rewards/format/mean": "train/reward_format",
    "frac_reward_zero_std": "train/frac_reward_zero_std",
    "entropy": "train/entropy",
    "kl": "train/kl",
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "learning_rate": "train/learning_rate",
    "completions/mean_length": "train/completion_tokens",
    "completions/min_length": "train/completion_tokens_min",
    "completions/max_length": "train/completion_tokens_max",
    "completions/clipped_ratio": "train/truncation_rate",
    "clip_ratio/region_mean": "train/clip_ratio",
    "clip_ratio/low_mean": "train/clip_ratio_low",
    "clip_ratio/high_mean": "train/clip_ratio_high",
    reward.TIMEOUTS: "train/grader_timeout_rate",
    reward.ERRORS: "train/grader_error_rate",
    "completions_per_s": "train/completions_per_s",
    "peak_memory_gib": "train/peak_memory_gib",
} | {trainer.PREFIX + name: trainer.PREFIX + name for name in trainer.METRICS}


def callback(
    settings: Train, log: Log, *, title: str = "GRPO", shown: str = "reward", metrics: dict[str, str] = METRICS
):
    """A callback that hands metrics on as they come, and draws the progress bar; one process of several does both.

    Args:
        settings: the recipe's section.
        log: takes metrics by name and the optimizer step.
        title: of the bar.
        shown: TRL's name of what is optimized: it stands beside the bar, and rows without it are no steps.
        metrics: TRL's name → ours.
    """
    from tqdm import tqdm
    from transformers import TrainerCallback

    class Live(TrainerCallback):
        def on_train_begin(self, args, state, control, **_):
            self.seconds = deque(maxlen=settings.num_iterations)  # completions are sampled once in so many steps
            self.bar = tqdm(
                total=state.max_steps,
                initial=state.global_step,
                desc=title,
                unit="step",
                smoothing=0,
                disable=process.rank() > 0,
            )

        def on_step_begin(self, args, state, control, **_):
            self.began = time.perf_counter()

        def on_log(self, args, state, control, logs=None, **_):
            if shown not in (logs or {}):
                return
            self.seconds.append(time.perf_counter() - self.began)
            row = state.log_history[-1]  # `logs` is a copy of what is kept
            row["completions_per_s"] = (
                settings.prompts_per_step
                * settings.generations
                / settings.num_iterations
                * len(self.seconds)
                / sum(self.seconds)
            )
            row["peak_memory_gib"] = peak_memory_gib()
            log(
                {ours: float(row[name]) for name, ours in metrics.items() if row.get(name) is not None},
                state.global_step,
            )
            self.bar.set_postfix({shown: f"{logs[shown]:.3g}"}, refresh=False)
            self.bar.update(state.global_step - self.bar.n)

        def on_train_end(self, args, state, control, **_):
            self.bar.close()

    return Live()


def peak_memory_gib() -> float:
    """The most memory that this process has held: on its GPU if it uses one, else of the machine."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts KiB


def history(log_history: list[dict], *, shown: str = "reward", metrics: dict[str, str] = METRICS) -> pd.DataFrame:
    """A row per logged step: step, and the metrics without their prefix; `shown` and `metrics` as `callback` takes them."""
    import pandas as pd

    kept = {"step": "step"} | {name: ours.removeprefix("train/").replace("/", "_") for name, ours in metrics.items()}
    rows = [row for row in log_history if shown in row]
    frame = pd.DataFrame([{ours: row.get(name) for name, ours in kept.items()} for row in rows])
    return frame.dropna(axis="columns", how="all")
