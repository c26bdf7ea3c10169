"""What a cell's rows score, by metric name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qrl import names, stats
from qrl.evaluate import health
from qrl.evaluate.cells import Asked

if TYPE_CHECKING:
    import pandas as pd


def metrics(asked: Asked) -> dict[str, float]:
    """Accuracy with its stderr and n, health rates, speed and the grader's own failures of one cell."""
    frame: pd.DataFrame = asked.frame
    accuracy = stats.accuracy(int(frame["correct"].sum()), len(frame))
    return {
        names.ACCURACY: accuracy.estimate,
        names.ACCURACY_STDERR: accuracy.stderr,
        names.ACCURACY_FLEXIBLE: float(frame["correct_flexible"].mean()),
        names.N: float(len(frame)),
        names.TOKENS_PER_S: asked.tokens_per_s,
        names.GRADER_TIMEOUTS: float((frame["fault"] == "timeout").sum()),
        names.GRADER_ERRORS: float((frame["fault"] == "error").sum()),
        **health.rates(frame),
    }
