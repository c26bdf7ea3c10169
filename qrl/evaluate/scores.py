"""A cell's scores: accuracy with its error, and what its answers are like."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from qrl import names, stats
from qrl.errors import BadInput
from qrl.evaluate import health
from qrl.evaluate.cells import Asked
from qrl.recipe import Evaluate

if TYPE_CHECKING:
    import pandas as pd


def metrics(asked: Asked) -> dict[str, float]:
    """Return accuracy with stderr and n, pass@k, health rates, speed and grader failures of one cell, by metric name.

    n counts questions. With several samples, accuracy is pass@1: the mean over questions of the mean over a question's
    samples.
    """
    frame = asked.frame
    accuracy, right, samples = _accuracy(frame)
    by_k = {k: stats.rate(stats.pass_at(k, right["sum"], samples)) for k in stats.every_k(samples)}
    return {
        names.ACCURACY: accuracy.estimate,
        names.ACCURACY_STDERR: accuracy.stderr,
        names.ACCURACY_FLEXIBLE: float(frame["correct_flexible"].mean()),
        names.N: float(len(right)),
        **{names.pass_at(k): value.estimate for k, value in by_k.items()},
        **{f"{names.pass_at(k)}_stderr": value.stderr for k, value in by_k.items()},
        names.TOKENS_PER_S: asked.tokens_per_s,
        names.GRADER_TIMEOUTS: float((frame["fault"] == "timeout").sum()),
        names.GRADER_ERRORS: float((frame["fault"] == "error").sum()),
        names.TOKENS_PER_ANSWER: float(frame["n_tokens"].mean()),
        **_reached(frame),
        **_references(frame),
        **health.rates(frame),
    }


def _accuracy(frame: pd.DataFrame) -> tuple[stats.Estimate, pd.DataFrame, int]:
    """Return accuracy, right answers by question (sum), and samples a question."""
    right = frame.groupby("question", sort=False)["correct"].agg(["sum", "size"])
    samples = int(right["size"].iloc[0])
    per_sample = right["sum"] / samples
    return (
        stats.accuracy(int(right["sum"].sum()), len(right)) if samples == 1 else stats.rate(per_sample),
        right,
        samples,
    )


def again(frame: pd.DataFrame, limits: Mapping[str, object]) -> tuple[stats.Estimate, list[str]]:
    """Return a cell's accuracy and broken limits, computed again from its rows.

    Args:
        frame: as `evaluate` logged it.
        limits: by name; one that is not among them has its default, other settings are left out.

    Raises:
        BadInput: the rows lack what health is read from.
    """
    needed = ["question", "correct", "parsed", "finish_reason", "leaked"]
    if lacking := [column for column in needed if column not in frame] + ["a row"] * frame.empty:
        raise BadInput(f"The rows of the cell have no {', '.join(lacking)}: evaluate it again.")
    known = {limit.setting: limits[limit.setting] for limit in health.LIMITS.values() if limit.setting in limits}
    shown = health.rates(frame if "fault" in frame else frame.assign(fault=None))
    return _accuracy(frame)[0], health.problems(shown, Evaluate.model_validate(known), len(frame))


def _reached(frame: pd.DataFrame) -> dict[str, float]:
    return {names.REACHED_RATE: float(frame["reached"].mean())} if frame["reached"].notna().all() else {}


def _references(frame: pd.DataFrame) -> dict[str, float]:
    """Return the mean log-likelihood of the worked solutions and the perplexity, where they were read."""
    if names.REFERENCE_LOGPROB not in frame:
        return {}
    mean = float(frame[names.REFERENCE_LOGPROB].mean())
    return {names.REFERENCE_LIKELIHOOD: mean, names.REFERENCE_PERPLEXITY: math.exp(min(700.0, -mean))}
