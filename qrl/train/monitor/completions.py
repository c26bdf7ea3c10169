"""Sampled completions of a training, from the files that TRL keeps beside its checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from qrl.recipe import Train

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ["step", "prompt", "completion"]


def sampled(work: Path, settings: Train, *, rewarded: bool = True) -> pd.DataFrame:
    """The first completions of every logged step: step, prompt, completion, and the reward that its parts add up to.

    Args:
        work: the trainer's folder.
        settings: how many a step, and which rewards with which weights.
        rewarded: whether completions earn rewards; in a distillation they do not.
    """
    import pandas as pd

    columns = [*COLUMNS, "reward"] if rewarded else COLUMNS
    weights = dict(zip(settings.rewards, settings.reward_weights or [1.0] * len(settings.rewards), strict=True))
    parts = []
    for file in sorted((work / "completions").glob("*.parquet")):
        frame = pd.read_parquet(file).head(settings.completions_logged)
        if rewarded:
            frame["reward"] = sum(frame[name] * weight for name, weight in weights.items())
        parts.append(frame[columns])
    frame = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=columns)
    for column in ("prompt", "completion"):
        frame[column] = [_content(value) for value in frame[column]]
    return frame


def _content(value) -> str:
    """The last message's text of a conversation as TRL stores it."""
    if isinstance(value, str):
        value = json.loads(value) if value.startswith("[") else value
    return value if isinstance(value, str) else str(list(value)[-1]["content"])
