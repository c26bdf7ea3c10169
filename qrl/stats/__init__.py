"""Intervals for accuracies, paired differences and gain survival, over one training run or several.

Every claim of a study is a *contrast*: a weighted sum of cells' accuracies. A single cell has the weight 1, a gain is
trained − base, and gain survival is a difference of two gains. All cells answer the same questions, so a contrast is
computed per question and then averaged: the difficulty that cells share cancels. Where only counts are known, cells
count as independent, which makes the intervals wider. Several training runs are a random effect (`runs`): each run has
its own contrast, and the spread between runs enters the error. Runs are never pooled as if they were more questions.
"""

from qrl.stats.clusters import Groups
from qrl.stats.contrasts import bootstrap, contrast, independent_contrast, relative_change
from qrl.stats.estimate import LEVEL, Estimate, Runs, quantile, signed
from qrl.stats.rates import accuracy, every_k, pass_at, rate
from qrl.stats.runs import contrast_over_runs, rate_over_runs
from qrl.stats.scales import difference_in_log_odds, ratio_of_shares
from qrl.stats.shares import Share
from qrl.stats.significance import holm, holm_by_key, mcnemar

__all__ = [
    "LEVEL",
    "Estimate",
    "Groups",
    "Runs",
    "Share",
    "accuracy",
    "bootstrap",
    "contrast",
    "contrast_over_runs",
    "difference_in_log_odds",
    "every_k",
    "holm",
    "holm_by_key",
    "independent_contrast",
    "mcnemar",
    "pass_at",
    "quantile",
    "rate",
    "rate_over_runs",
    "ratio_of_shares",
    "relative_change",
    "signed",
]
