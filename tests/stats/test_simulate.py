"""Studies that are drawn: the n that decides is the n at which drawn studies are decided."""

import numpy as np
import pytest

from qrl.stats.simulate import Patterns, first_of, questions_to_decide, share_of_gain, two_digits
from qrl.stats.verdict import Gains


def counted(n, *right):
    """The first `right` of n questions are right in each cell."""
    return Patterns.of([np.arange(n) < count for count in right])


def word_of(margin):
    return lambda share: Gains(share, margin).word()


@pytest.mark.process
@pytest.mark.parametrize(
    ("patterns", "margin"),
    [
        (counted(300, 180, 240, 180, 238), 0.02),  # two answers change
        (counted(300, 180, 240, 180, 240), 0.02),  # none does
        (counted(500, 300, 310, 300, 309), None),
    ],
)
def test_the_n_that_decides_is_where_drawn_studies_are_decided(patterns, margin):
    n = questions_to_decide(patterns, word_of(margin), 301, 300_000)

    def decided(n):
        rng = np.random.default_rng(5)
        words = [word_of(margin)(share_of_gain(patterns.study(rng, n))) for _ in range(200)]
        return np.mean([word != "inconclusive" for word in words])

    assert 300 < n < 1000
    assert decided(n) > 0.72 > decided(round(0.7 * n))


def test_no_n_decides_if_there_is_no_gain():
    flat = Patterns(np.array([[0, 1, 0, 1], [1, 0, 0, 1], [0, 1, 0, 1], [1, 0, 0, 1]], dtype=float), np.full(4, 0.25))
    assert questions_to_decide(flat, word_of(None), 100, 10_000) is None


def test_candidates_have_two_digits_and_the_first_that_holds_is_found():
    assert two_digits(95, 130) == [96, 97, 98, 99, 100, 110, 120, 130]
    assert two_digits(0.00098, 0.0012) == [0.00099, 0.001, 0.0011, 0.0012]
    assert first_of(two_digits(10, 1000), lambda n: n >= 333) == 340
    assert first_of(two_digits(10, 100), lambda n: n > 100) is None
