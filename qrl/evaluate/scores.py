"""What a cell's rows score, by metric name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qrl import names, stats
from qrl.evaluate import health
from qrl.evaluate.cells import Asked

if TYPE_CHECKING:
    import pandas as pd


def metrics(asked: Asked) -> dict[str, float]:
    """Accuracy with its stderr and n, pass@k, health rates, speed and the grader's own failures of one cell.

    n counts questions. Of several samples accuracy is pass@1, the mean over questions of the mean over a question's samples.
    """
    frame: pd.DataFrame = asked.frame
    right = frame.groupby("question", sort=False)["correct"].agg(["sum", "size"])
    samples = int(right["size"].iloc[0])
    accuracy = (
        stats.accuracy(int(frame["correct"].sum()), len(frame)) if samples == 1 else stats.rate(right["sum"] / samples)
    )
    return {
        names.ACCURACY: accuracy.estimate,
        names.ACCURACY_STDERR: accuracy.stderr,
        names.ACCURACY_FLEXIBLE: float(frame["correct_flexible"].mean()),
        names.N: float(len(right)),
        **_pass_at(right["sum"], samples),
        names.TOKENS_PER_S: asked.tokens_per_s,
        names.GRADER_TIMEOUTS: float((frame["fault"] == "timeout").sum()),
        names.GRADER_ERRORS: float((frame["fault"] == "error").sum()),
        **health.rates(frame),
    }


def _pass_at(right: pd.Series, samples: int) -> dict[str, float]:
    """pass@k for k = 2, 4, 8 … and all samples; none of a greedy cell."""
    found = {}
    for k in stats.every_k(samples):
        value = stats.rate(stats.pass_at(k, right, samples))
        found |= {names.pass_at(k): value.estimate, f"{names.pass_at(k)}_stderr": value.stderr}
    return found
