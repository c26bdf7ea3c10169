"""Intervals that can carry a verdict: accuracies, paired differences, gain survival, over one training run or several.

Everything a study claims is a *contrast*: a weighted sum of cells' accuracies. One cell has the weight 1; a gain is
grpo − base; gain survival is a difference of two gains. All cells answer the same questions, so a contrast is
computed per question and then averaged, and what the questions share cancels. Where only counts exist, cells are taken
as independent, which costs width but invents nothing. Where there are several training runs, each has a contrast of its
own, and the spread between them enters the error as a random effect (`runs`): they are never pooled as more questions.
"""

from qrl.stats.contrasts import bootstrap, contrast, independent_contrast
from qrl.stats.estimate import LEVEL, Estimate, Runs, quantile, signed
from qrl.stats.rates import accuracy, every_k, pass_at, rate
from qrl.stats.runs import contrast_over_runs, rate_over_runs
from qrl.stats.significance import holm, mcnemar

__all__ = [
    "LEVEL",
    "Estimate",
    "Runs",
    "accuracy",
    "bootstrap",
    "contrast",
    "contrast_over_runs",
    "every_k",
    "holm",
    "independent_contrast",
    "mcnemar",
    "pass_at",
    "quantile",
    "rate",
    "rate_over_runs",
    "signed",
]
