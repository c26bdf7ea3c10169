"""P-values: McNemar's test of two cells, and Holm's correction for several tests."""

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike

from qrl.stats.estimate import SMALLEST_P

K = TypeVar("K", bound=Hashable)


def mcnemar(a: ArrayLike, b: ArrayLike) -> float:
    """Return the exact two-sided p-value of "both cells are equally accurate", from the questions where they disagree.

    Args:
        a, b: (n,) 0 or 1, the same questions in the same order.

    Returns:
        p in (0, 1]; 1 if the cells agree everywhere.

    Source: McNemar, Psychometrika 12 (1947) 153, with the binomial distribution in place of chi squared.
    """
    from scipy.special import bdtr

    right_a = np.asarray(a, dtype=bool)
    right_b = np.asarray(b, dtype=bool)
    only_a = int((right_a & ~right_b).sum())
    only_b = int((right_b & ~right_a).sum())
    disagreements = only_a + only_b
    if not disagreements:
        return 1.0
    p_value = 2 * float(bdtr(min(only_a, only_b), disagreements, 0.5))
    return min(1.0, max(SMALLEST_P, p_value))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values corrected for multiple tests.

    Source: Holm, Scand. J. Stat. 6 (1979) 65: the k-th smallest of m is multiplied by m − k + 1, and is never smaller
        than the one before.
    """
    order = np.argsort(p_values, kind="stable")
    steps = np.asarray(p_values, dtype=float)[order] * np.arange(len(order), 0, -1)
    corrected = np.empty(len(order))
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(steps))
    return corrected.tolist()


def holm_by_key(p_values: Mapping[K, float | None]) -> dict[K, float]:
    """Return `holm` of named p-values; None marks a test that was not made, and is left out."""
    tests = {key: p_value for key, p_value in p_values.items() if p_value is not None}
    return dict(zip(tests, holm(list(tests.values())), strict=True))
