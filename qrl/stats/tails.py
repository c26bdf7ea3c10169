"""Wider bounds for contrasts in which few answers change, or nearly all changes go one way.

Quantization changes few answers, and mostly for the worse. The t interval is then too short on the side of the changes:
at a true loss of 20 questions in 1,000, all in one direction, its 5 % bound errs in 6.4 % of studies, and a single
change gives a *narrower* interval than none. Both corrections here only widen. Where many answers change, as many for
the better as for the worse, neither moves the t interval.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

FEW = 25  # changes: below this, bounds are exact, as is usual for McNemar's test


@dataclass(frozen=True)
class Side:
    """The changes in one direction, as means over all n independent groups of questions.

    Attributes:
        total: mean change.
        squares: mean squared change.
        largest: the largest change that the contrast's weights allow.
        n: groups.
    """

    total: float
    squares: float
    largest: float
    n: int

    def bounds(self, tail: float) -> tuple[float, float]:
        """Return the exact bounds of the mean change, at the equal changes that have the same mean and mean square.

        The upper one is at least the observed mean plus the bound of unseen changes.
        """
        from scipy.special import betaincinv

        unseen = self.largest * (1 - tail ** (1 / self.n))
        if not self.total:
            return 0.0, unseen
        # As if all changes were equal: of `size`, and `count` in number.
        size = self.squares / self.total
        count = self.n * self.total / size
        lower = size * float(betaincinv(count, self.n - count + 1, tail))
        upper = size * float(betaincinv(count + 1, self.n - count, 1 - tail))
        return lower, max(self.total + unseen, upper)


@dataclass(frozen=True)
class Tails:
    """The corrections to the t interval of a mean.

    Attributes:
        lean: third central moment over the second, over n: how far one change of the longer tail moves the mean;
            positive if that tail is above.
        changes: changes upwards and downwards, if there are fewer than `FEW`; else None.
    """

    lean: float
    changes: tuple[Side, Side] | None = None

    @classmethod
    def of(cls, values: np.ndarray, repeats: np.ndarray, minimum: float, maximum: float) -> Tails:
        """Return the corrections for a mean of independent values.

        Args:
            values: (k,) of questions; some may be equal.
            repeats: (k,) how many questions have each value.
            minimum, maximum: what a value can be.
        """
        n = round(float(repeats.sum()))
        mean = float(values @ repeats) / n
        lean = _lean(values - mean, repeats, n)

        # A question is a change if it differs from the most frequent value, which is nearly always 0.
        rounded = values.round(12)
        kinds, counts = rounded, repeats
        is_counted = (rounded[1:] > rounded[:-1]).all()  # by the caller: a plan asks for thousands of estimates
        if not is_counted:
            kinds, kind = np.unique(rounded, return_inverse=True)
            counts = np.bincount(kind, weights=repeats)
        if n - counts.max() >= FEW:
            return cls(lean)
        modes = kinds[counts == counts.max()]
        mode = float(modes[0]) if len(modes) == 1 else 0.0  # a tie has none

        def side(sizes: np.ndarray, allowed: float) -> Side:
            total = float(sizes @ repeats) / n
            squares = float(sizes**2 @ repeats) / n
            return Side(total, squares, max(allowed, float(sizes.max())), n)

        changes = rounded - mode
        upwards = side(np.maximum(changes, 0), maximum - mode)
        downwards = side(np.maximum(-changes, 0), mode - minimum)
        return cls(lean, (upwards, downwards))

    def of_groups(self, sums: np.ndarray, n: int) -> Tails:
        """Return the corrections with the skewness of groups instead of that of questions.

        Args:
            sums: (groups,) of the residuals of each group's questions.
            n: questions.
        """
        return replace(self, lean=_lean(sums, np.ones(len(sums)), n))

    @property
    def few(self) -> bool:
        """Whether few questions deviate, so that the bounds are exact ones."""
        return self.changes is not None

    def reach(self, tail: float, t_reach: float, *, upwards: bool) -> float:
        """Return the distance from the mean to its one-sided bound with error `tail`.

        Args:
            tail: error of the bound, at most 0.5.
            t_reach: the t interval's distance.
            upwards: True for the upper bound.

        Source: skewness moves a mean's bound by lean (2z² + 1)/6 (Johnson, JASA 73 (1978) 536), and by lean (z² + 2)/3
            with the half change that an exact bound of a count adds: its Cornish-Fisher expansion. Few changes: Clopper
            and Pearson, Biometrika 26 (1934) 404, at the number of equal changes with the same mean and variance (Korn
            and Graubard, Survey Methodology 24 (1998) 193); both directions combined as in Zou and Donner, Stat. Med.
            27 (2008) 1693.
        """
        from scipy.special import ndtri

        lean = max(0.0, self.lean if upwards else -self.lean)
        skewed = t_reach + lean * (float(ndtri(tail)) ** 2 + 2) / 3
        if self.changes is None:
            return skewed
        above, below = self.changes
        # A bound moves away from the mean with more changes in its direction, and with fewer in the other one.
        towards, opposite = (above, below) if upwards else (below, above)
        _, most_towards = towards.bounds(tail)
        fewest_opposite, _ = opposite.bounds(tail)
        exact = math.hypot(most_towards - towards.total, opposite.total - fewest_opposite)
        return max(skewed, exact)


def _lean(residuals: np.ndarray, repeats: np.ndarray, n: int) -> float:
    """Return the third cumulant of a mean over its second, from the residuals of what is independent."""
    second = float(residuals**2 @ repeats)
    if not second > 1e-24 * n:
        return 0.0
    return float(residuals**3 @ repeats) / second / n
