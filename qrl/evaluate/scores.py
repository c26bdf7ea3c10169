"""A cell's scores: accuracy with its error, and what its answers are like."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from qrl import names, stats
from qrl.errors import BadInput
from qrl.evaluate import health
from qrl.evaluate.cells import Answers
from qrl.recipe import Evaluate

if TYPE_CHECKING:
    import pandas as pd


def metrics(answers: Answers) -> dict[str, float]:
    """Return accuracy with stderr and n, pass@k, health rates, speed and grader failures of one cell, by metric name.

    n counts questions. With several samples, accuracy is pass@1: the mean over questions of the mean over a question's
    samples.
    """
    frame = answers.frame
    right_counts, samples = _right_by_question(frame)
    accuracy = _accuracy(right_counts, samples)
    by_k = {k: stats.rate(stats.pass_at(k, right_counts, samples)) for k in stats.every_k(samples)}
    return {
        names.ACCURACY: accuracy.estimate,
        names.ACCURACY_STDERR: accuracy.stderr,
        names.ACCURACY_FLEXIBLE: float(frame["correct_flexible"].mean()),
        names.N: float(len(right_counts)),
        **{names.pass_at(k): rate.estimate for k, rate in by_k.items()},
        **{f"{names.pass_at(k)}_stderr": rate.stderr for k, rate in by_k.items()},
        names.TOKENS_PER_S: answers.tokens_per_s,
        names.GRADER_TIMEOUTS: float((frame["fault"] == "timeout").sum()),
        names.GRADER_ERRORS: float((frame["fault"] == "error").sum()),
        names.TOKENS_PER_ANSWER: float(frame["n_tokens"].mean()),
        **_reached(frame),
        **_references(frame),
        **health.rates(frame),
    }


def _right_by_question(frame: pd.DataFrame) -> tuple[pd.Series, int]:
    """Return the number of right answers of each question, and how many samples a question has."""
    by_question = frame.groupby("question", sort=False)["correct"].agg(["sum", "size"])
    return by_question["sum"], int(by_question["size"].iloc[0])


def _accuracy(right_counts: pd.Series, samples: int) -> stats.Estimate:
    """Return the accuracy over questions, from what `_right_by_question` returns."""
    if samples == 1:
        return stats.accuracy(int(right_counts.sum()), len(right_counts))
    return stats.rate(right_counts / samples)


def recomputed(frame: pd.DataFrame, limits: Mapping[str, object]) -> tuple[stats.Estimate, list[str]]:
    """Return a cell's accuracy and broken limits, computed again from its rows.

    Args:
        frame: as `evaluate` logged it.
        limits: by name; one that is not among them has its default, other settings are left out.

    Raises:
        BadInput: the rows lack what health is read from.
    """
    required = ["question", "correct", "parsed", "finish_reason", "leaked"]
    missing = [column for column in required if column not in frame]
    if frame.empty:
        missing.append("a row")
    if missing:
        raise BadInput(f"The rows of the cell have no {', '.join(missing)}: evaluate it again.")

    settings = {limit.setting: limits[limit.setting] for limit in health.LIMITS.values() if limit.setting in limits}
    rates = health.rates(frame if "fault" in frame else frame.assign(fault=None))
    problems = health.problems(rates, Evaluate.model_validate(settings), len(frame))
    return _accuracy(*_right_by_question(frame)), problems


def _reached(frame: pd.DataFrame) -> dict[str, float]:
    if not frame["reached"].notna().all():  # a task that cannot tell
        return {}
    return {names.REACHED_RATE: float(frame["reached"].mean())}


def _references(frame: pd.DataFrame) -> dict[str, float]:
    """Return the mean log-likelihood of the worked solutions and the perplexity, where they were read."""
    if names.REFERENCE_LOGPROB not in frame:
        return {}
    mean = float(frame[names.REFERENCE_LOGPROB].mean())
    return {names.REFERENCE_LIKELIHOOD: mean, names.REFERENCE_PERPLEXITY: math.exp(min(700.0, -mean))}
