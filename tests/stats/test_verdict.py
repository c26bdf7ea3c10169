"""The verdict is the first claim that is shown, says what is kept, and errs no more often than it promises."""

import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats

from qrl import stats
from qrl.stats.estimate import SMALLEST_P
from qrl.stats.simulate import Patterns, share_of_gain
from qrl.stats.verdict import Gains, default_margin, judge

MIDDLE = {"base · full": 0.65, "grpo · full": 0.72, "base · nf4": 0.62, "grpo · nf4": 0.68}
STUDIES = 1000
LIMIT = 0.05 + 3 * math.sqrt(0.05 * 0.95 / STUDIES)  # alpha and three Monte Carlo errors


def estimate(value, stderr, n=1000):
    return stats.Estimate(value, stderr, value - 1.96 * stderr, value + 1.96 * stderr, n)


def verdict(survival, stderr=0.01, gain=0.30, gain_stderr=0.01, margin=None, accuracies=MIDDLE):
    """Judge a gain and a gain survival with independent normal errors."""

    def beyond(share):
        return estimate(survival + (1 - share) * gain, math.hypot(stderr, (1 - share) * gain_stderr))

    share = stats.Share(
        part=beyond(0.0), whole=estimate(gain, gain_stderr), difference=estimate(survival, stderr), excess_over=beyond
    )
    return judge(Gains(share, margin), accuracies)


@pytest.mark.parametrize(
    ("survival", "expected"),
    [
        (0.02, "survives"),
        (-0.013, "survives"),  # −0.03 + 1.645 · hypot(0.01, 0.1 · 0.01) = −0.0135
        (-0.014, "inconclusive"),
        (-0.016, "inconclusive"),  # −1.645 · 0.01
        (-0.017, "reduced"),
        (-0.15, "reduced"),
        (-0.168, "reduced"),  # −0.15 − 1.645 · hypot(0.01, 0.5 · 0.01) = −0.1684
        (-0.169, "lost"),
        (-0.3, "lost"),
    ],
)
def test_the_first_claim_that_is_shown_is_the_verdict(survival, expected):
    found = verdict(survival)
    assert (found.verdict, found.margin) == (expected, pytest.approx(0.03))
    assert (found.n_to_decide is not None) == (expected == "inconclusive")
    assert (found.p_value is None) == (expected == "inconclusive")
    assert found.p_value is None or found.p_value < 0.05


def test_a_reader_learns_what_is_kept_and_what_is_shown_of_it():
    assert verdict(-0.06).headline == "reduced: 80 % [73, 87] of the gain is kept"
    assert verdict(-0.06).more_than_half_kept and not verdict(-0.15).more_than_half_kept
    assert "not shown" in verdict(-0.15).reason
    assert verdict(-0.29).headline == "lost, all of it: 3 % [−6, 12] of the gain is kept"
    partly = verdict(-0.2)
    assert partly.headline == "lost: 33 % [25, 41] of the gain is kept" and not partly.all_lost
    open_question = verdict(-0.015)
    assert "at least 89 % of the gain" in open_question.reason


def test_a_margin_of_ones_own_and_the_least_one():
    assert verdict(-0.02, margin=0.03).verdict == "reduced"
    assert verdict(-0.02, margin=0.04).verdict == "survives"
    assert default_margin(0.05) == default_margin(-1) == 0.01
    assert default_margin(0.2) == pytest.approx(0.02)


@pytest.mark.parametrize("survival", [-0.2, 0.0, 0.2])
def test_where_nothing_was_gained_nothing_survives_or_is_lost(survival):
    found = verdict(survival, gain=0.015)
    assert found.verdict == "inconclusive" and found.kept is None
    assert "nothing to survive" in found.reason and "[" in found.reason
    assert verdict(survival, gain=-0.01).n_to_decide is None


def test_a_small_gain_that_is_lost_whole_does_not_survive_within_the_margin():
    """A gain of 0.008 that is lost whole leaves gain survival at −0.008, above −0.01."""
    found = verdict(-0.008, stderr=0.001, gain=0.008, gain_stderr=0.002)
    assert found.verdict == "lost" and found.all_lost
    unclear = verdict(-0.004, stderr=0.003, gain=0.008, gain_stderr=0.002)
    assert unclear.verdict == "inconclusive" and "the gain under the scheme" in unclear.reason


@pytest.mark.parametrize(("rate", "place"), [(0.0, "floor"), (0.04, "floor"), (0.97, "ceiling"), (1.0, "ceiling")])
def test_a_cell_at_the_edge_is_a_remark_and_no_veto(rate, place):
    found = verdict(0.0, accuracies=MIDDLE | {"grpo · nf4": rate})
    assert found.verdict == "survives"
    assert [place in remark and "grpo · nf4" in remark for remark in found.remarks] == [True]


def test_where_either_margin_may_hold_both_tests_must_be_passed():
    """The interval of a gain of 0.11 ± 0.02 contains 0.1, so a loss of 0.01 must be excluded, as well as a tenth."""
    wide = {"gain": 0.11, "gain_stderr": 0.02}
    assert verdict(0.0, stderr=0.006, **wide).verdict == "survives"
    assert verdict(0.0, stderr=0.0065, **wide).verdict == "inconclusive"  # 0.0065 · 1.645 = 0.0107
    assert verdict(0.0, stderr=0.0065, gain=0.11, gain_stderr=0.001).verdict == "survives"


@pytest.mark.parametrize(
    ("gain", "gain_stderr", "stderr"),
    [
        (0.14, 0.025, 0.007),  # a loss of a tenth is excluded, 0.0122 < 0.014, and one of 0.01 is not, 0.0115
        (0.085, 0.020, 0.0055),  # a loss of 0.01 is excluded, 0.0091, and one of a tenth is not, 0.0096 > 0.0085
    ],
)
def test_one_of_the_two_tests_is_not_enough(gain, gain_stderr, stderr):
    assert verdict(0.0, stderr=stderr, gain=gain, gain_stderr=gain_stderr).verdict == "inconclusive"


def test_the_n_that_would_decide_does_so_four_times_in_five():
    found = verdict(-0.004, stderr=0.03)
    stderr = 0.03 * math.sqrt(1000 / found.n_to_decide)
    test_stderr = math.hypot(stderr, 0.1 * 0.01 * math.sqrt(1000 / found.n_to_decide))
    power = scipy.stats.norm.sf(scipy.stats.norm.ppf(0.95), loc=(0.03 - 0.004) / test_stderr)
    assert power == pytest.approx(0.8, abs=0.002)
    assert found.smallest_effect == pytest.approx(0.03 * (scipy.stats.norm.ppf(0.975) + scipy.stats.norm.ppf(0.8)))


@pytest.mark.process
def test_with_few_changes_the_n_that_would_decide_comes_from_studies_that_are_drawn():
    """Two of 300 answers change. The normal formula asked for 8,560 questions."""
    outcomes = np.zeros((4, 300))
    outcomes[[0, 2], :180] = 1
    outcomes[1, :240] = outcomes[3, :238] = 1
    patterns = Patterns.of(outcomes)
    share = share_of_gain(lambda weights: stats.contrast(outcomes, weights))
    found = judge(Gains(share, 0.02), MIDDLE, patterns)
    assert found.verdict == "inconclusive" and 400 < found.n_to_decide < 700

    def decided(n):
        rng = np.random.default_rng(1)
        words = [Gains(share_of_gain(patterns.study(rng, n)), 0.02).word() for _ in range(400)]
        return np.mean([word != "inconclusive" for word in words])

    assert decided(found.n_to_decide) >= 0.75 > decided(found.n_to_decide // 2)


def independent(rng, n, rates):
    """Four cells whose errors share only the questions' difficulty."""
    thresholds = scipy.stats.norm.ppf(rates)[:, None]
    return ((rng.normal(size=n) + rng.normal(size=(4, n))) / math.sqrt(2) < thresholds).astype(int)


def one_way(rng, n, rates):
    """Training only adds right answers, quantization only breaks some of the trained variant's."""
    base, trained, _, quantized = rates
    luck = rng.random(n)
    before, after = luck < base, luck < trained
    return np.array([before, after, before, after & (rng.random(n) < quantized / trained)], dtype=int)


def words(simulate, rates, n=500, margin=None):
    """Return how often each verdict comes in simulated studies of base, grpo, then both under a scheme."""
    rng, found = np.random.default_rng(2), dict.fromkeys(("survives", "lost", "reduced", "inconclusive"), 0.0)
    for _ in range(STUDIES):
        outcomes = simulate(rng, n, rates)
        gains = Gains(share_of_gain(lambda weights, cells=outcomes: stats.contrast(cells, weights)), margin)
        found[gains.word()] += 1 / STUDIES
    return found


@pytest.mark.process
@pytest.mark.parametrize("simulate", [independent, one_way])
@pytest.mark.parametrize(
    ("claim", "rates"),
    [
        ("lost", (0.5, 0.7, 0.5, 0.6)),  # exactly half
        ("survives", (0.5, 0.7, 0.5, 0.68)),  # exactly a tenth
        ("survives", (0.6, 0.64, 0.6, 0.63)),  # exactly 0.01 of a small gain
        ("survives", (0.6, 0.70, 0.6, 0.69)),  # where the margins meet
        ("survives", (0.6, 0.63, 0.6, 0.6)),  # all of a small gain
        ("reduced", (0.5, 0.7, 0.5, 0.7)),  # nothing
    ],
)
def test_a_claim_that_is_just_wrong_is_made_in_at_most_5_percent_of_studies(simulate, claim, rates):
    assert words(simulate, rates)[claim] <= LIMIT


@pytest.mark.process
def test_an_estimated_margin_must_not_be_taken_as_known():
    """Why a tenth of the gain is tested by a contrast: with the estimate as a fixed margin, the verdict errs more."""
    rng, wrong = np.random.default_rng(2), {"contrast": 0.0, "fixed": 0.0}
    for _ in range(2 * STUDIES):
        gain, survival = rng.normal(0.3, 0.1), rng.normal(-0.03, 0.01)
        wrong["fixed"] += survival - 1.645 * 0.01 > -default_margin(gain)
        wrong["contrast"] += verdict(survival, gain=gain, gain_stderr=0.1).verdict == "survives"
    assert wrong["fixed"] / (2 * STUDIES) > 0.09
    assert wrong["contrast"] / (2 * STUDIES) <= LIMIT


def test_a_shown_gain_whose_share_nothing_bounds_is_not_called_a_gain_that_is_not_shown():
    share = stats.Share(
        part=estimate(0.25, 0.1),
        whole=estimate(0.3, 0.1),
        difference=estimate(-0.05, 0.1),
        excess_over=lambda share: estimate(0.25 - 0.3 * share, 10 + 10 * abs(share)),
    )
    found = judge(Gains(share), MIDDLE)
    assert found.kept is None and found.gain_is_shown and found.verdict == "inconclusive"
    assert found.headline == "inconclusive: what share of the gain is kept cannot be bounded"


def test_no_p_value_is_0_and_small_ones_keep_their_digits():
    far = verdict(-0.30, stderr=0.005, gain_stderr=0.001)
    assert far.verdict == "lost" and 0 < far.p_value <= SMALLEST_P
    near = estimate(-0.1, 0.01)
    assert near.p_below(0) == pytest.approx(scipy.stats.norm.sf(10), rel=1e-6, abs=0)
    assert near.p_below(0) == pytest.approx(replace(near, estimate=0.1).p_above(0), rel=1e-6, abs=0)
    assert stats.mcnemar(np.ones(5000), np.zeros(5000)) > 0


def test_a_loss_within_the_margin_is_said_beside_survives():
    found = verdict(-0.10, stderr=0.01, margin=0.2)
    assert found.verdict == "survives"
    assert found.remarks == ("a loss is shown too, −0.100, and is smaller than the margin",)
    assert verdict(0.0, stderr=0.005).remarks == ()
