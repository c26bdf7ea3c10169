"""Sampled completions of a training, from the files that TRL writes beside its checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from qrl.recipe import Train

COLUMNS = ["step", "prompt", "completion"]


def sampled(work: Path, settings: Train, *, rewarded: bool = True) -> pd.DataFrame:
    """Return the first completions of every logged step: step, prompt, completion, and its weighted rewards, if any."""
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
        frame[column] = [_last_message(value) for value in frame[column]]
    return frame


def _last_message(value) -> str:
    """Return a text as it is, or the last message's text of a conversation in TRL's form."""
    if isinstance(value, str):
        value = json.loads(value) if value.startswith("[") else value
    return value if isinstance(value, str) else str(list(value)[-1]["content"])
