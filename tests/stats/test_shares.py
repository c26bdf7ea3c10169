"""Shares that are kept: Fieller's interval, what it agrees with, and where it is not defined."""

import math

import numpy as np
import pytest
import scipy.stats

from qrl import stats
from qrl.stats.simulate import share_of_gain
from qrl.stats.verdict import Gains


def gains_of(outcomes):
    """Return the gain under a scheme as a part of the gain, from (4, n) outcomes of base, grpo, then both quantized."""
    return share_of_gain(lambda weights: stats.contrast(outcomes, weights))


def drawn(rates, n, seed=0):
    rng = np.random.default_rng(seed)
    thresholds = scipy.stats.norm.ppf(rates)[:, None]
    return ((rng.normal(size=n) + rng.normal(size=(4, n))) / math.sqrt(2) < thresholds).astype(float)


def test_the_interval_is_fiellers_where_many_answers_change():
    outcomes = drawn([0.5, 0.7, 0.45, 0.57], 4000)
    share = gains_of(outcomes)
    part, whole = outcomes[3] - outcomes[2], outcomes[1] - outcomes[0]
    t = scipy.stats.t.ppf(0.975, 3999)
    variance = np.cov(part, whole) / 4000
    a = whole.mean() ** 2 - t**2 * variance[1, 1]
    b = part.mean() * whole.mean() - t**2 * variance[0, 1]
    c = part.mean() ** 2 - t**2 * variance[0, 0]
    low, high = sorted((b + sign * math.sqrt(b**2 - a * c)) / a for sign in (-1, 1))
    assert share.kept.estimate == pytest.approx(part.mean() / whole.mean())
    assert (share.kept.low, share.kept.high) == (pytest.approx(low, abs=0.002), pytest.approx(high, abs=0.002))


@pytest.mark.parametrize("kept", [0.48, 0.53, 0.58])
def test_its_bounds_agree_with_the_claims_of_the_verdict(kept):
    outcomes = drawn([0.5, 0.7, 0.5, 0.5 + 0.2 * kept], 3000, seed=3)
    gains = Gains(gains_of(outcomes))
    share = gains.share.kept
    assert (share.lower > 0.5) == gains.is_more_than_half_kept
    assert (share.upper < 0.5) == gains.is_more_than_half_lost
    assert (share.upper < 1) == gains.is_reduced
    assert share.low < share.lower < share.estimate < share.upper < share.high


def test_a_share_of_what_is_not_shown_is_not_defined():
    assert gains_of(drawn([0.5, 0.5, 0.5, 0.5], 400)).kept is None


def test_a_small_gain_gives_a_wide_interval_that_covers_the_truth():
    """The gain is 2.5 standard errors: a symmetric interval around the ratio would miss the truth on one side."""
    rng, covered, defined = np.random.default_rng(5), 0, 0
    rates, n = np.array([0.5, 0.58, 0.5, 0.56]), 600
    truth = (rates[3] - rates[2]) / (rates[1] - rates[0])
    for _ in range(800):
        share = gains_of((rng.random((4, n)) < rates[:, None]).astype(float))
        if not share.whole.low > 0:
            continue
        defined += 1
        beyond = share.beyond(truth)
        covered += beyond.low <= 0 <= beyond.high  # the interval of the share includes the truth
    assert defined > 500
    assert covered / defined > 0.95 - 3 * math.sqrt(0.05 * 0.95 / defined) - 0.01


def test_where_few_answers_change_the_share_is_bounded_no_more_tightly_than_the_difference():
    """Two of 300 answers are lost. The share's bounds follow from those of the two answers, which are exact."""
    outcomes = np.zeros((4, 300))
    outcomes[[0, 2], :180] = 1
    outcomes[1, :240] = outcomes[3, :238] = 1
    share = gains_of(outcomes)
    assert share.kept.lower <= 1 + share.difference.lower / share.whole.estimate + 1e-6
    assert share.kept.upper >= 1


def test_of_nothing_that_is_kept_the_share_has_an_interval_too():
    outcomes = np.zeros((4, 1000))
    outcomes[0, :600] = outcomes[1, :800] = 1
    share = gains_of(outcomes).kept
    assert share.estimate == 0 and -0.05 < share.low < 0 < share.high < 0.05


def test_a_ratio_of_shares_and_a_difference_in_log_odds_are_those_of_a_bootstrap():
    outcomes = drawn([0.3, 0.7, 0.2, 0.6], 2000, seed=8)
    cells = outcomes[[3, 1, 2, 0]]

    def contrast(weights):
        return stats.contrast(cells, weights)

    rng = np.random.default_rng(1)
    means = np.stack([cells[:, rng.integers(0, 2000, 2000)].mean(axis=1) for _ in range(4000)])
    ratios = means[:, 0] / means[:, 1] / (means[:, 2] / means[:, 3])
    odds = np.log(means / (1 - means)) @ [1, -1, -1, 1]
    rates = cells.mean(axis=1)
    ratio = stats.ratio_of_shares(rates, contrast, 2000)
    log_odds = stats.difference_in_log_odds(rates, contrast, 2000)
    for found, resampled in ((ratio, ratios), (log_odds, odds)):
        low, high = np.quantile(resampled, [0.025, 0.975])
        assert found.low == pytest.approx(low, abs=0.12 * (high - low))
        assert found.high == pytest.approx(high, abs=0.12 * (high - low))


def test_scales_are_defined_where_a_cell_has_no_right_answer():
    outcomes = np.zeros((4, 50))
    outcomes[[1, 3], :20] = 1
    cells = outcomes[[3, 1, 2, 0]]
    ratio = stats.ratio_of_shares(cells.mean(axis=1), lambda weights: stats.contrast(cells, weights), 50)
    assert 0 <= ratio.low < ratio.estimate < ratio.high < math.inf


def one_way(n, base, trained, base_q, trained_q):
    """Return the gains of a study in which the first questions are right in each cell."""
    outcomes = np.array([np.arange(n) < right for right in (base, trained, base_q, trained_q)], dtype=float)
    return Gains(gains_of(outcomes))


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


@pytest.mark.parametrize("n", [60, 100, 300])
@pytest.mark.parametrize("kept", [0.15, 0.5, 0.85])
def test_few_changes_give_a_share_that_does_not_deny_what_is_shown(n, kept):
    """A gain under the scheme that is shown leaves no share below 0, and a loss that is shown none above 1."""
    gained = round(0.3 * n)
    gains = one_way(n, n // 2, n // 2 + gained, n // 2, n // 2 + round(kept * gained))
    share = gains.share.kept
    assert gains.quantized.low > 0 or kept < 0.5
    assert share.low >= -1e-6 or gains.quantized.low <= 0
    assert share.upper <= 1 + 1e-6 or not gains.is_reduced


def test_half_of_a_gain_in_a_hundred_questions_is_neither_none_nor_all():
    share = one_way(100, 60, 80, 60, 70).share.kept
    assert (share.estimate, share.low >= 0, share.high <= 1) == (0.5, True, True)
