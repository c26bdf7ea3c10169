"""Groups of questions that are not independent of each other: the error of a mean over them.

A template, a passage or a topic gives many questions, which succeed and fail together. The groups count then, not the
questions, and a large group counts for more than a small one. So the variance is CR2, which is unbiased if questions
are independent after all, and its t distribution has degrees of freedom that follow from the sizes of the groups and
from how much alike the questions of a group are. With groups of equal size both are the textbook ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

ENOUGH = 15  # effective groups: below this, a few groups decide the result


@dataclass(frozen=True)
class Groups:
    """Which questions belong together.

    Attributes:
        index: (n,) the number of each question's group.
        sizes: (groups,) how many questions each group has.
    """

    index: np.ndarray
    sizes: np.ndarray

    @classmethod
    def of(cls, labels: ArrayLike, n: int) -> Groups:
        """Return the groups of n questions.

        Args:
            labels: (n,) one per question, of any type.

        Raises:
            ValueError: there is not one label per question.
        """
        group_labels = np.asarray(labels)
        if group_labels.shape != (n,):
            raise ValueError(
                f"{group_labels.shape} clusters do not match {(n,)} questions: expected one label per question."
            )
        _, index, sizes = np.unique(group_labels, return_inverse=True, return_counts=True)
        return cls(index, sizes)

    @property
    def effective(self) -> float:
        """Number of groups of equal size that would be as informative: n²/Σg² (Kish, Survey Sampling, 1965)."""
        return float(self.sizes.sum()) ** 2 / float(self.sizes.astype(float) @ self.sizes)

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Return (groups,) the sum of (n,) values over each group."""
        return np.bincount(self.index, weights=values, minlength=len(self.sizes))

    def stderr_of_mean(self, values: np.ndarray) -> float:
        """Return the CR2 standard error of the mean of (n,) values.

        Source: Bell and McCaffrey, Survey Methodology 28 (2002) 169, for a model with a constant alone: a group's
            residual sum is divided by √(1 − its share of the questions).
        """
        n = len(values)
        residuals = self.sums(values - values.mean()) / np.sqrt(1 - self.sizes / n)
        return math.sqrt(float(residuals @ residuals)) / n

    def degrees_of_freedom(self, values: np.ndarray) -> float:
        """Return the degrees of freedom of the t distribution of a mean with the CR2 error.

        Bell and McCaffrey take questions as independent. If a group's questions are alike, large groups weigh more and
        fewer degrees are left; so the intraclass correlation is estimated, and the smaller number holds.

        Source: Bell and McCaffrey (2002); Imbens and Kolesár, Rev. Econ. Stat. 98 (2016) 701, section 4, with a
            correlation of at least 0.
        """
        if len(np.unique(self.sizes)) == 1:
            return len(self.sizes) - 1.0
        independent_degrees = self._degrees(self.sizes.astype(float))
        correlation = self._correlation(values)
        correlated_degrees = self._degrees(self.sizes + correlation * self.sizes * (self.sizes - 1.0))
        return max(1.0, min(independent_degrees, correlated_degrees))

    def _degrees(self, variances: np.ndarray) -> float:
        """Return tr(B)²/tr(B²) for the covariance B of the groups' adjusted residual sums.

        Args:
            variances: (groups,) of the groups' sums in the working model.
        """
        n = float(self.sizes.sum())
        adjustment = 1 / np.sqrt(1 - self.sizes / n)
        size = adjustment * self.sizes
        variance = adjustment * variances
        diagonal = adjustment * variance
        share = float(variances.sum()) / n**2

        # B = diag(diagonal) − (size variance' + variance size')/n + share · size size'. It has a row per group, and
        # there may be thousands, so both traces are written out and B is never made.
        trace = float((diagonal - 2 * size * variance / n + share * size**2).sum())
        size_size = size @ size
        size_variance = size @ variance
        variance_variance = variance @ variance
        diagonal_part = float(diagonal @ (diagonal - 4 * size * variance / n + 2 * share * size**2))
        other_part = 2 * (size_size * variance_variance + size_variance**2) / n**2
        other_part += share**2 * size_size**2 - 4 * share * size_size * size_variance / n
        trace_of_square = diagonal_part + float(other_part)
        return trace**2 / trace_of_square

    def _correlation(self, values: np.ndarray) -> float:
        """Return the intraclass correlation of the values, at least 0.

        Source: the estimator from an analysis of variance with unequal groups, Donner, Int. Stat. Rev. 54 (1986) 67.
        """
        n = len(values)
        groups = len(self.sizes)
        if n == groups:  # groups of one have no correlation within
            return 0.0
        means = self.sums(values) / self.sizes
        between = float(self.sizes @ (means - values.mean()) ** 2) / (groups - 1)
        within = float(((values - means[self.index]) ** 2).sum()) / (n - groups)
        average_size = (n - float(self.sizes.astype(float) @ self.sizes) / n) / (groups - 1)
        total = between + (average_size - 1) * within
        if not total > 0:
            return 0.0
        return max(0.0, (between - within) / total)
