"""Live metrics: what TRL logs under our names, with throughput and peak memory, and sampled completions.

`_OURS` is the table of names: a metric of TRL's that is not in it stays in the trainer's own state. Each `Kind` of
training logs a part of the table.
"""

import json
import math
import resource
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch

from qrl import process
from qrl.errors import QrlError
from qrl.recipe import Train, reward_name
from qrl.recipe.training import REWARDS
from qrl.train import reward, rollout
from qrl.train.job import Log


@dataclass(frozen=True)
class Kind:
    """What a kind of training logs."""

    title: str  # of the progress bar
    measure: str  # TRL's name of what the progress bar shows; rows without it are no steps
    names: dict[str, str]  # TRL's name → ours; its other numbers stay in the trainer's own state


KEPT = ("kept_completions", "kept_questions")  # of a step of rejection sampling: how many, as it logs them
_OURS = {  # TRL's name → ours, below train/
    **{name: name for name in ("reward", "reward_std")},
    **{f"rewards/{name}/mean": f"reward_{name}" for name in REWARDS},
    **{name: name for name in ("frac_reward_zero_std", "entropy", "kl", "loss", "grad_norm", "learning_rate")},
    "completions/mean_length": "completion_tokens",
    "completions/min_length": "completion_tokens_min",
    "completions/max_length": "completion_tokens_max",
    "completions/clipped_ratio": "truncation_rate",
    "clip_ratio/region_mean": "clip_ratio",
    "clip_ratio/low_mean": "clip_ratio_low",
    "clip_ratio/high_mean": "clip_ratio_high",
    **{name: name for name in ("resampled_groups", "flat_groups")},
    **{name: name for name in KEPT},
    **{name: name for name in (reward.TIMEOUTS, reward.ERRORS, "completions_per_s", "peak_memory_gib")},
}
_TRAIN = {name: f"train/{ours}" for name, ours in _OURS.items()}
_ROLLOUT = {rollout.PREFIX + name: rollout.PREFIX + name for name in rollout.METRICS}
_DISTILLED = (
    *("loss", "entropy", "grad_norm", "learning_rate"),
    *("completions/mean_length", "completions/clipped_ratio", "completions_per_s", "peak_memory_gib"),
)
_SUPERVISED = ("loss", "entropy", "grad_norm", "learning_rate", "peak_memory_gib")
GRPO = Kind("GRPO", "reward", _TRAIN | _ROLLOUT)
RAFT = Kind("RAFT", "reward", _TRAIN | _ROLLOUT)
SFT = Kind("SFT", "loss", {name: _TRAIN[name] for name in _SUPERVISED})
DISTILLATION = Kind("distillation", "loss", {name: _TRAIN[name] for name in _DISTILLED} | _ROLLOUT)


def callback(settings: Train, log: Log, kind: Kind = GRPO):
    """Return a callback that logs each step's metrics by our names, and draws the progress bar in the first process."""
    from tqdm import tqdm
    from transformers import TrainerCallback

    completions = settings.prompts_per_step * settings.generations / settings.num_iterations  # per optimizer step

    class Live(TrainerCallback):
        def on_train_begin(self, args, state, control, **_):
            self.step_seconds = deque(maxlen=settings.num_iterations)  # completions are sampled once in so many steps
            self.bar = tqdm(
                total=state.max_steps,
                initial=state.global_step,
                desc=kind.title,
                unit="step",
                smoothing=0,
                disable=process.rank() > 0,
            )

        def on_step_begin(self, args, state, control, **_):
            self.step_start = time.perf_counter()

        def on_log(self, args, state, control, logs=None, **_):
            if kind.measure not in (logs or {}):
                return
            self.step_seconds.append(time.perf_counter() - self.step_start)
            row = state.log_history[-1]  # `logs` is a copy of it
            _check_finite(row, state.global_step)  # before transformers saves a checkpoint of this step
            row["completions_per_s"] = completions * len(self.step_seconds) / sum(self.step_seconds)
            row["peak_memory_gib"] = _peak_memory_gib()
            metrics = {ours: float(row[name]) for name, ours in _names(kind, row).items() if row.get(name) is not None}
            log(metrics, state.global_step)
            self.bar.set_postfix({kind.measure: f"{logs[kind.measure]:.3g}"}, refresh=False)
            self.bar.update(state.global_step - self.bar.n)

        def on_train_end(self, args, state, control, **_):
            self.bar.close()

    return Live()


def _check_finite(row: Mapping[str, float], step: int) -> None:
    """Raise QrlError where a row of the log shows that its step has made the weights NaN."""
    for name in ("loss", "grad_norm"):
        if not math.isfinite(float(row.get(name) or 0)):
            raise QrlError(
                f"At step {step} train/{name} is {float(row[name])}, so the weights are NaN after it: lower "
                "train.learning_rate, or check the data and the rewards. No checkpoint of this step is kept."
            )


def _peak_memory_gib() -> float:
    """Return this process's peak memory: on its GPU if it uses one, else in RAM."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts KiB


def history(log_history: list[dict], kind: Kind = GRPO) -> pd.DataFrame:
    """Return a row per logged step: step, and the metrics without their prefix."""
    logged = [row for row in log_history if kind.measure in row]
    columns = {"step": "step"} | _names(kind, *logged)
    rows = [{key: row.get(name) for name, key in columns.items()} for row in logged]
    frame = pd.DataFrame(rows).rename(columns=lambda key: key.removeprefix("train/").replace("/", "_"))
    return frame.dropna(axis="columns", how="all")


def _names(kind: Kind, *rows: dict) -> dict[str, str]:
    """Return TRL's names with ours: those of a kind, and the means of the user's own rewards in rows of the log."""
    users_rewards = {}
    for row in rows:
        for name in row:
            if name.startswith("rewards/") and name.endswith("/mean"):
                users_rewards[name] = f"train/reward_{name.split('/')[1]}"
    return kind.names | users_rewards


def completions(work: Path, settings: Train, kind: Kind) -> pd.DataFrame:
    """Return the first completions of every step, from TRL's files: step, prompt, completion, and the reward."""
    columns = ["step", "prompt", "completion"]
    if kind.measure == "reward":
        columns.append("reward")
    weights = dict(zip(map(reward_name, settings.rewards), settings.weights_of_rewards, strict=True))
    steps = []
    for file in sorted((work / "completions").glob("*.parquet")):
        frame = pd.read_parquet(file).head(settings.completions_logged)
        if kind.measure == "reward":
            frame["reward"] = sum(frame[name] * weight for name, weight in weights.items())
        steps.append(frame[columns])
    frame = pd.concat(steps, ignore_index=True) if steps else pd.DataFrame(columns=columns)
    for column in ("prompt", "completion"):
        frame[column] = [_last_message(value) for value in frame[column]]
    return frame


def _last_message(value) -> str:
    """Return a text as it is, or the last message's text of a conversation in TRL's form."""
    if isinstance(value, str) and value.startswith("["):
        value = json.loads(value)
    return value if isinstance(value, str) else str(list(value)[-1]["content"])
