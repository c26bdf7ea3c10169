"""A cell's scores, by metric name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qrl import names, stats
from qrl.evaluate import health
from qrl.evaluate.cells import Asked

if TYPE_CHECKING:
    import pandas as pd


def metrics(asked: Asked) -> dict[str, float]:
    """Return accuracy with stderr and n, pass@k, health rates, speed and grader failures of one cell.

    n counts questions. With several samples, accuracy is pass@1: the mean over questions of the mean over a question's
    samples.
    """
    frame: pd.DataFrame = asked.frame
    right = frame.groupby("question", sort=False)["correct"].agg(["sum", "size"])
    samples = int(right["size"].iloc[0])
    per_sample = right["sum"] / samples
    accuracy = stats.accuracy(int(right["sum"].sum()), len(right)) if samples == 1 else stats.rate(per_sample)
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
        **health.rates(frame),
    }
