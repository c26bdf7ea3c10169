"""Intervals against other routes: scipy's tests, definitions written out, coverage over simulated studies."""

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from qrl import stats
from qrl.stats.contrasts import MOST_KINDS, _few_kinds
from qrl.stats.tails import Tails
from qrl.stats.text import percent_interval

CLOSE = {"rel": 1e-9, "abs": 1e-12}


def study(rng, rates, n, correlation=0.5):
    """(cells, n) 0/1 outcomes whose errors share a question's difficulty: a Gaussian copula."""
    shared, own = rng.normal(size=n), rng.normal(size=(len(rates), n))
    latent = math.sqrt(correlation) * shared + math.sqrt(1 - correlation) * own
    return (latent < scipy.stats.norm.ppf(rates)[:, None]).astype(int)


@given(n=st.integers(2, 3000), share=st.floats(0, 1))
def test_accuracy_has_the_binomial_stderr_and_scipys_wilson_interval(n, share):
    correct = round(share * n)
    found = stats.accuracy(correct, n)
    expected = scipy.stats.binomtest(correct, n).proportion_ci(method="wilson")
    assert found.estimate == correct / n
    assert found.stderr == pytest.approx(math.sqrt(correct / n * (1 - correct / n) / n), **CLOSE)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), **CLOSE)


@pytest.mark.parametrize(("correct", "n"), [(0, 0), (1, 1), (-1, 10), (11, 10)])
def test_accuracy_refuses_what_supports_no_error_bar(correct, n):
    with pytest.raises(ValueError, match="expected n >= 2"):
        stats.accuracy(correct, n)


def t_test(values, **options):
    return scipy.stats.ttest_1samp(values, 0, **options)


def leaning(values, tail=0.025):
    """How far skewness moves the bound on the side of the longer tail, below and above: by scipy's moments."""
    lean = scipy.stats.moment(values, 3) / scipy.stats.moment(values, 2) / len(values)
    shift = lean * (scipy.stats.norm.ppf(tail) ** 2 + 2) / 3
    return min(0, shift), max(0, shift)


def test_paired_difference_is_scipys_paired_t_test_and_reaches_further_on_the_longer_tail(rng):
    a, b = study(rng, [0.72, 0.65], 500)
    found, test = stats.contrast([a, b], (1, -1)), scipy.stats.ttest_rel(a, b)
    interval, (down, up) = test.confidence_interval(0.95), leaning(a - b)
    assert found.estimate == pytest.approx(a.mean() - b.mean(), **CLOSE)
    assert found.estimate / found.stderr == pytest.approx(test.statistic, **CLOSE)
    assert (found.low, found.high) == pytest.approx((interval.low + down, interval.high + up), **CLOSE)
    assert up < 1e-4  # a tenth of the last digit that is printed
    one_sided = scipy.stats.ttest_rel(a, b, alternative="greater")
    assert found.lower == pytest.approx(one_sided.confidence_interval(0.95).low + leaning(a - b, 0.05)[0], **CLOSE)
    assert found.p_above(0) == pytest.approx(one_sided.pvalue, **CLOSE)
    assert found.p_above(found.lower) == pytest.approx(0.05) and 1 - found.p_above(found.upper) == pytest.approx(0.05)


def test_gain_survival_is_a_one_sample_t_test_of_the_difference_of_differences(rng):
    g_q, b_q, g_fp, b_fp = outcomes = study(rng, [0.68, 0.62, 0.72, 0.65], 800)
    found, values = stats.contrast(outcomes, (1, -1, -1, 1)), (g_q - b_q) - (g_fp - b_fp)
    interval, (down, up) = t_test(values).confidence_interval(0.95), leaning(values)
    assert (found.low, found.high) == pytest.approx((interval.low + down, interval.high + up), **CLOSE)
    assert found.n == 800


def changed(better, worse, n):
    """Return the contrast of two cells: the first alone is right on `better` questions, the second on `worse`."""
    a, b = np.zeros(n), np.zeros(n)
    a[:better], b[better : better + worse] = 1, 1
    return stats.contrast([a, b], (1, -1))


@pytest.mark.parametrize("n", [100, 1000])
def test_few_changes_have_no_narrower_interval_than_the_exact_one_and_one_no_narrower_than_none(n):
    none = changed(0, 0, n)
    for worse in range(1, 40):
        found, exact = changed(0, worse, n), scipy.stats.binomtest(worse, n).proportion_ci(0.95, method="exact")
        slack = 0.15 / n if worse >= 25 else 1e-12  # from 25 on it is the exact interval's expansion
        assert found.low <= -exact.high + slack and found.high >= -exact.low - 1e-12
        assert found.high - found.low >= none.high - none.low - 1e-12
        mirrored = changed(worse, 0, n)
        assert (mirrored.low, mirrored.high) == pytest.approx((-found.high, -found.low))
    both = changed(30, 30, n)
    test = t_test(np.repeat([1, -1, 0], [30, 30, n - 60])).confidence_interval(0.95)
    assert (both.low, both.high) == pytest.approx((test.low, test.high), **CLOSE)


@pytest.mark.parametrize("n", [50, 300, 1000])
@pytest.mark.parametrize("tail", [0.05, 0.025])
def test_one_directional_losses_are_bounded_at_the_promised_error_at_every_rate(n, tail):
    """No simulation: the chance of every count of losses, times whether its bound misses the truth."""
    counts = np.arange(min(n, 170))
    bounds = np.array(
        [
            stats.contrast([np.arange(n) < count, np.zeros(n)], (1, -1)).reach(tail, upwards=True) + count / n
            for count in counts
        ]
    )
    for losses in (2, 4, 6, 10, 15, 20, 25, 30, 40, 60, 90):
        if losses < n / 2:
            assert scipy.stats.binom.pmf(counts, n, losses / n)[bounds < losses / n].sum() <= tail + 0.001


def test_a_closed_form_agrees_with_the_bootstrap(rng):
    outcomes = study(rng, [0.68, 0.62, 0.72, 0.65], 1000)
    closed, resampled = (
        make(outcomes, (1, -1, -1, 1)) for make in (stats.contrast, lambda *a: stats.bootstrap(*a, seed=3))
    )
    assert resampled.estimate == pytest.approx(closed.estimate, **CLOSE)
    assert resampled.stderr == pytest.approx(closed.stderr, rel=0.04)
    assert (resampled.low, resampled.high) == pytest.approx((closed.low, closed.high), abs=0.25 * closed.stderr)
    assert resampled == stats.bootstrap(outcomes, (1, -1, -1, 1), seed=3)


def test_identical_cells_leave_room_for_questions_not_asked():
    right = np.array([0, 1] * 50)
    found = stats.contrast([right, right], (1, -1))
    assert found.estimate == 0
    assert found.high == pytest.approx(scipy.stats.binomtest(0, 100).proportion_ci(0.95, method="exact").high, **CLOSE)
    assert found.low == -found.high
    wide = stats.contrast([right] * 4, (1, -1, -1, 1))
    assert wide.high == pytest.approx(2 * found.high, **CLOSE)  # each deviating question may move it by two


@given(data=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=60))
def test_a_difference_always_has_a_finite_interval_around_it(data):
    a, b = np.array(data, dtype=int).T
    found, mirrored = stats.contrast([a, b], (1, -1)), stats.contrast([b, a], (1, -1))
    assert -1 <= found.low <= found.lower <= found.estimate <= found.upper <= found.high <= 1
    assert found.low < found.high
    assert (mirrored.low, mirrored.high) == pytest.approx((-found.high, -found.low))


def test_clustered_error_by_its_definition(rng):
    values, clusters = study(rng, [0.6], 60)[0].astype(float), np.repeat(np.arange(20), 3)
    pairs = sum(
        (values[i] - values.mean()) * (values[j] - values.mean())
        for i in range(60)
        for j in range(60)
        if clusters[i] == clusters[j]
    )
    expected = math.sqrt(20 / 19 * pairs) / 60
    assert stats.rate(values, clusters).stderr == pytest.approx(expected, **CLOSE)
    assert stats.contrast([values], (1,), clusters).stderr == pytest.approx(expected, **CLOSE)


def test_clusters_of_one_question_change_nothing_and_repeated_questions_add_nothing(rng):
    outcomes = study(rng, [0.7, 0.6], 200)
    plain = stats.contrast(outcomes, (1, -1))
    assert stats.contrast(outcomes, (1, -1), np.arange(200)) == plain
    repeated = stats.contrast(np.repeat(outcomes, 4, axis=1), (1, -1), np.repeat(np.arange(200), 4))
    assert (repeated.low, repeated.high) == pytest.approx((plain.low, plain.high), **CLOSE)


def test_few_clusters_are_not_taken_for_more_than_they_are(rng):
    """Groups of equal questions: the interval is that of the groups, widened by t, never that of more questions."""
    values = np.repeat([0, 1, 1, 0, 1], 40)
    found, groups = stats.rate(values, np.repeat(np.arange(5), 40)), stats.accuracy(3, 5)
    assert found.stderr == pytest.approx(groups.stderr * math.sqrt(5 / 4), **CLOSE)
    assert found.low < groups.low and found.high > groups.high
    opposed = np.tile([0, 1], 100)  # pairs that always make up for each other
    assert stats.rate(opposed, np.repeat(np.arange(100), 2)).low == pytest.approx(stats.accuracy(50, 100).low)
    near = np.where(np.arange(200) == 0, 1, opposed)
    assert stats.rate(near, np.repeat(np.arange(100), 2)).high >= stats.accuracy(int(near.sum()), 200).high - 1e-12
    with pytest.raises(ValueError, match="expected 0 to 1"):
        stats.rate([0, 2])


@given(samples=st.integers(1, 12), data=st.data())
def test_pass_at_k_by_drawing_every_set_of_k(samples, data):
    from itertools import combinations

    right, k = data.draw(st.integers(0, samples)), data.draw(st.integers(1, samples))
    answers = [1] * right + [0] * (samples - right)
    sets = [max(chosen) for chosen in combinations(answers, k)]
    assert stats.pass_at(k, [right], samples)[0] == pytest.approx(sum(sets) / len(sets), **CLOSE)
    assert stats.pass_at(1, [right], samples)[0] == pytest.approx(right / samples, **CLOSE)


def test_pass_at_k_is_unbiased(rng):
    chance = rng.random(300)
    found = [stats.rate(stats.pass_at(4, rng.binomial(10, chance), 10)) for _ in range(400)]
    truth = (1 - (1 - chance) ** 4).mean()
    estimates = np.array([each.estimate for each in found])
    assert estimates.mean() == pytest.approx(truth, abs=3 * estimates.std() / 20)


def test_pass_at_more_than_was_sampled_is_refused():
    with pytest.raises(ValueError, match=r"pass@3 .* 2 samples"):
        stats.pass_at(3, [1], 2)
    with pytest.raises(ValueError, match="expected 0 to 2"):
        stats.pass_at(1, [3], 2)


def test_a_bootstrap_resamples_groups_whole(rng):
    outcomes, groups = np.repeat(study(rng, [0.7, 0.6], 300), 3, axis=1), np.repeat(np.arange(300), 3)
    closed, resampled = stats.contrast(outcomes, (1, -1), groups), stats.bootstrap(outcomes, (1, -1), groups, seed=1)
    assert resampled.stderr == pytest.approx(closed.stderr, rel=0.05)
    assert stats.bootstrap(outcomes, (1, -1), seed=1).stderr < 0.7 * closed.stderr


def test_clusters_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="one label per question"):
        stats.contrast([[0, 1, 1]], (1,), [0, 1])
    with pytest.raises(ValueError, match="at least 2 groups"):
        stats.contrast([[0, 1, 1]], (1,), [0, 0, 0])


def test_independent_cells_give_the_seeds_errors():
    survival = stats.independent_contrast([67, 58, 72, 68], [100] * 4, (1, -1, -1, 1))
    variance = sum(p * (1 - p) / 100 for p in (0.67, 0.58, 0.72, 0.68))
    assert survival.estimate == pytest.approx(0.05, **CLOSE)
    assert survival.stderr == pytest.approx(math.sqrt(variance), **CLOSE)
    assert survival.high == pytest.approx(0.05 + scipy.stats.norm.ppf(0.975) * math.sqrt(variance), **CLOSE)
    assert stats.independent_contrast([0, 0], [50, 50], (1, -1)).high > 0  # no variance seen is not no variance


def test_a_relative_change_has_the_error_of_a_ratio_and_room_where_nothing_changed(rng):
    before = rng.integers(20, 60, 500)
    after = before + rng.integers(-3, 8, 500)
    found, ratio = stats.relative_change(after, before), after.mean() / before.mean()
    reach = scipy.stats.t.ppf(0.975, 499) * (after - ratio * before).std(ddof=1) / before.mean() / math.sqrt(500)
    assert found.estimate == pytest.approx(ratio - 1)
    assert found.low == pytest.approx(ratio - 1 - reach, abs=1e-3)
    assert found.high == pytest.approx(ratio - 1 + reach, abs=1e-3)
    same = stats.relative_change(before, before)
    assert same.estimate == 0 and -0.05 < same.low < 0 < same.high < 0.05


@given(only_a=st.integers(0, 40), only_b=st.integers(0, 40), both=st.integers(0, 5))
def test_mcnemar_is_a_binomial_test_of_the_disagreements(only_a, only_b, both):
    a = [1] * only_a + [0] * only_b + [1] * both
    b = [0] * only_a + [1] * only_b + [1] * both
    expected = scipy.stats.binomtest(only_a, only_a + only_b).pvalue if only_a + only_b else 1.0
    assert stats.mcnemar(a, b) == pytest.approx(expected, **CLOSE)


def test_holm_by_a_worked_example():
    """Hand-worked: sorted 0.005, 0.01, 0.03, 0.04 times 4, 3, 2, 1, then never falling."""
    assert stats.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert stats.holm([]) == []
    assert stats.holm([0.9, 0.8]) == [1.0, 1.0]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_lies_between_no_correction_and_bonferroni(p_values):
    for raw, corrected in zip(p_values, stats.holm(p_values), strict=True):
        assert raw <= corrected <= min(1, raw * len(p_values))


@pytest.mark.process
def test_intervals_cover_at_their_level():
    """1,500 small studies of four correlated cells; within three Monte Carlo errors of 95 %."""
    rng, rates, studies = np.random.default_rng(11), [0.68, 0.62, 0.72, 0.65], 1500
    survival, gain, rate = 0, 0, 0
    for _ in range(studies):
        outcomes = study(rng, rates, 500)
        found = stats.contrast(outcomes, (1, -1, -1, 1))
        survival += found.low <= -0.01 <= found.high
        found = stats.contrast(outcomes[2:], (1, -1))
        gain += found.low <= 0.07 <= found.high
        found = stats.accuracy(int(outcomes[0].sum()), 500)
        rate += found.low <= 0.68 <= found.high
    for covered in (survival, gain, rate):
        assert abs(covered / studies - 0.95) < 3 * math.sqrt(0.95 * 0.05 / studies)


def test_differences_are_printed_with_sign_and_never_as_minus_nothing():
    assert str(stats.contrast([[1, 0, 1, 1], [0, 0, 1, 1]], (1, -1))).startswith("+0.250 [−")
    assert [stats.signed(value) for value in (0.04, -0.0511, -0.0001, 0)] == ["+0.040", "−0.051", "0.000", "0.000"]


@pytest.fixture
def rng():
    return np.random.default_rng(5)


@pytest.mark.parametrize("right", [0, 1])
def test_an_interval_holds_its_estimate_at_the_ends_for_every_n(right):
    for n in range(2, 3000):
        found = stats.accuracy(right * n, n)
        assert found.low <= found.estimate <= found.high


def test_graded_scores_are_resampled_at_even_steps_with_the_same_mean_and_error():
    """20,000 scores that all differ: a draw for each of them took half a minute."""
    rng = np.random.default_rng(0)
    outcomes = rng.random((2, 20_000))
    found, closed = stats.bootstrap(outcomes, (1, -1), seed=0), stats.contrast(outcomes, (1, -1))
    assert found.estimate == pytest.approx(closed.estimate, abs=1e-12)
    assert (found.low, found.high) == (pytest.approx(closed.low, abs=3e-4), pytest.approx(closed.high, abs=3e-4))
    stepped = _few_kinds(outcomes[0] - outcomes[1])
    assert len(np.unique(stepped.round(12))) <= MOST_KINDS
    assert stepped.mean() == pytest.approx(closed.estimate, abs=1e-12)
    few = rng.integers(0, 2, 20_000).astype(float)
    assert _few_kinds(few) is few


def test_a_share_that_rounds_to_0_has_no_sign():
    assert percent_interval(stats.Estimate(-1e-5, 1e-5, -3e-5, 2e-5, 10)) == "0 % [0, 0]"
    assert percent_interval(stats.Estimate(-0.95, 0.1, -1.03, -0.88, 10)) == "−95 % [−103, −88]"


@pytest.mark.parametrize(("changes", "is_few"), [(24, True), (25, False)])
def test_bounds_are_exact_below_25_changes(changes, is_few):
    found = Tails.of(np.array([0.0, 1.0]), np.array([1000 - changes, changes]), -1.0, 1.0)
    assert found.few is is_few
