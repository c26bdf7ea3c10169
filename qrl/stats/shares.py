"""What share of a whole is kept, of a gain or of an accuracy: a ratio of two contrasts, with an interval.

The share is part / whole. "At least 58 % is kept" says that part − 0.58 · whole is not below 0, which is a contrast
like any other. So the ends of the interval are the shares at which a bound of that contrast is 0, and the interval
agrees with every verdict that is made from the same contrasts. It holds where the whole is small, and is not defined
where the whole is not shown to be above 0: any share is possible then.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

from qrl.stats.estimate import LEVEL, TAIL, Estimate

_PRECISION = 1e-6  # of a share's ends


@dataclass(frozen=True)
class Share:
    """A part of a whole, as contrasts of the same cells.

    Attributes:
        part, whole: the two numbers.
        difference: part − whole.
        excess_over: share → part − share · whole.
    """

    part: Estimate
    whole: Estimate
    difference: Estimate
    excess_over: Callable[[float], Estimate]

    def beyond(self, share: float) -> Estimate:
        """Return part − share · whole: above 0 if more than that share is kept.

        If few answers change between part and whole, or in the part, the bounds of that difference, or of the part, are
        exact. Then the number is at most as tightly bounded as the better of two sums: the part and a share of the
        whole, or the difference and the rest of the whole. At the shares 0 and 1 these are the part's and the
        difference's own bounds, so that the share kept agrees with what is shown of both.

        Source: bounds of a sum from those of its summands, Zou and Donner, Stat. Med. 27 (2008) 1693.
        """
        contrast = self.excess_over(share)
        if not (self.difference.few or self.part.few):
            return contrast
        from_part = ((self.part, 1.0), (self.whole, -share))
        from_difference = ((self.difference, 1.0), (self.whole, 1.0 - share))
        return replace(contrast, sums=(from_part, from_difference)).bounded()

    @cached_property
    def kept(self) -> Estimate | None:
        """The share with its interval; None if the whole is not shown to be above 0, or if nothing bounds the share.

        Source: Fieller, J. R. Stat. Soc. B 16 (1954) 175, with the bounds of `contrasts` in place of those of a normal
            distribution.
        """
        if not self.whole.low > 0:
            return None
        estimate = self.part.estimate / self.whole.estimate
        low = self._end(TAIL, upwards=False)
        high = self._end(TAIL, upwards=True)
        lower = self._end(1 - LEVEL, upwards=False)
        upper = self._end(1 - LEVEL, upwards=True)
        if not all(map(math.isfinite, (low, high, lower, upper))):
            return None
        stderr = self.excess_over(estimate).stderr / self.whole.estimate
        return Estimate(estimate, stderr, low, high, self.whole.n, one_sided=(lower, upper))

    def _end(self, tail: float, *, upwards: bool) -> float:
        """Return the share at which the one-sided bound of `beyond` with error `tail` is 0."""
        from scipy.optimize import brentq

        def bound(share: float) -> float:
            contrast = self.beyond(share)
            reach = contrast.reach(tail, upwards=upwards)
            return contrast.estimate + (reach if upwards else -reach)

        # The bound crosses 0 between the estimate and a share that is far enough from it.
        estimate = self.part.estimate / self.whole.estimate
        step = 1 / self.whole.low if upwards else -1 / self.whole.low
        distant_share = estimate + step
        for _ in range(20):
            distant_bound = bound(distant_share)
            if (distant_bound < 0) == upwards and distant_bound != 0:
                return cast(float, brentq(bound, estimate, distant_share, xtol=_PRECISION))
            distant_share += step * 2
        return math.inf if upwards else -math.inf
