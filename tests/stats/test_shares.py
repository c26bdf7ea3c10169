"""The share that is kept: its interval ends where the claims of the verdict end."""

import numpy as np
import pytest

from qrl.stats.simulate import Patterns
from qrl.stats.verdict import Gains


def one_way(n, base, trained, base_q, trained_q):
    """Return the gains of a study in which the first questions are right in each cell."""
    outcomes = np.array([np.arange(n) < right for right in (base, trained, base_q, trained_q)], dtype=float)
    patterns = Patterns.of(outcomes)
    return Gains(patterns.share(np.rint(patterns.probabilities * n)))


@pytest.mark.parametrize("counts", [(300, 180, 240, 180, 234), (300, 180, 240, 180, 204), (100, 60, 80, 60, 70)])
def test_an_end_of_the_interval_is_where_the_bound_of_what_is_beyond_it_is_0(counts):
    """Losses lean one way, so the bounds above and below reach differently far: to mix them up shows."""
    share = one_way(*counts).share
    kept = share.kept
    assert share.beyond(kept.low).low == pytest.approx(0, abs=1e-5)
    assert share.beyond(kept.high).high == pytest.approx(0, abs=1e-5)
    assert share.beyond(kept.lower).lower == pytest.approx(0, abs=1e-5)
    assert share.beyond(kept.upper).upper == pytest.approx(0, abs=1e-5)
    lean = share.beyond(kept.estimate)
    assert lean.high - lean.estimate != pytest.approx(lean.estimate - lean.low, rel=1e-3)


@pytest.mark.parametrize("right", range(180, 241, 4))
def test_the_bounds_of_the_share_and_the_claims_agree(right):
    gains = one_way(300, 180, 240, 180, right)
    kept = gains.share.kept
    assert gains.is_more_than_half_kept == (kept.lower > 0.5)
    assert gains.is_more_than_half_lost == (kept.upper < 0.5)
    assert gains.is_reduced == (kept.upper < 1)


def test_no_share_is_named_where_no_gain_is_shown():
    assert one_way(300, 180, 181, 180, 180).share.kept is None
