"""Agreement to 1e-9 with statsmodels and scipy, where they have the same test.

Tests import statsmodels themselves: at the top, every worker that collects them would wait a second for it.
"""

import dataclasses
import gc
import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from qrl import stats
from qrl.stats import verdict

pytestmark = pytest.mark.process

CLOSE = {"rel": 1e-9, "abs": 1e-9}
outcome = st.integers(0, 1)
slow_at_first = settings(deadline=None)  # statsmodels loads what it needs when it is asked for the first time


@slow_at_first
@given(n=st.integers(2, 5000), share=st.floats(0, 1))
def test_wilson(n, share):
    from statsmodels.stats.proportion import proportion_confint

    correct = round(share * n)
    found = stats.accuracy(correct, n)
    assert (found.low, found.high) == pytest.approx(proportion_confint(correct, n, 0.05, method="wilson"), **CLOSE)


@slow_at_first
@given(st.lists(st.tuples(outcome, outcome), min_size=2, max_size=80))
def test_exact_mcnemar(pairs):
    from statsmodels.stats.contingency_tables import mcnemar

    a, b = np.array(pairs).T
    table = [[np.sum(a & b), np.sum(a & (1 - b))], [np.sum((1 - a) & b), np.sum((1 - a) & (1 - b))]]
    expected = mcnemar(table, exact=True).pvalue if table[0][1] + table[1][0] else 1.0
    assert stats.mcnemar(a, b) == pytest.approx(expected, **CLOSE)


@slow_at_first
@given(st.lists(st.tuples(outcome, outcome), min_size=3, max_size=80))
def test_paired_t(pairs):
    a, b = np.array(pairs, dtype=float).T
    assume(np.ptp(a - b) > 0)  # no t otherwise: `test_stats.py` holds what is said then
    whole, expected = stats.contrast([a, b], (1, -1)), scipy.stats.ttest_rel(a, b)
    unlimited = {"minimum": -math.inf, "maximum": math.inf}
    found = dataclasses.replace(whole, tails=None, **unlimited).bounded()  # t alone
    interval = expected.confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), **CLOSE)
    assert found.p_two_sided == pytest.approx(expected.pvalue, **CLOSE)
    assert found.p_above(0) == pytest.approx(scipy.stats.ttest_rel(a, b, alternative="greater").pvalue, **CLOSE)
    # Few changes only widen it.
    assert whole.low <= max(-1, interval.low + 1e-12) and whole.high >= min(1, interval.high - 1e-12)


@slow_at_first
@given(st.integers(13, 60), st.integers(0, 500))
def test_paired_t_where_as_many_answers_change_either_way(changed, same):
    values = np.repeat([1.0, -1.0, 0.0], [changed, changed, same])
    found = stats.contrast([values == 1, values == -1], (1, -1))
    interval = scipy.stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assume(same >= changed)  # or the usual thing is a change
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), **CLOSE)


@pytest.fixture
def frozen_heap():
    """Hide all that exists from the collector: `multipletests` runs it at every call, 0.1 s over a heap of modules."""
    gc.freeze()
    yield
    gc.unfreeze()


@slow_at_first
@pytest.mark.usefixtures("frozen_heap")
@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm(p_values):
    from statsmodels.stats.multitest import multipletests

    assert stats.holm(p_values) == pytest.approx(multipletests(p_values, method="holm")[1].tolist(), **CLOSE)


@slow_at_first
@given(groups=st.integers(2, 8), size=st.integers(2, 10), data=st.data())
def test_clustered_stderr_in_groups_of_equal_size_is_that_of_least_squares_on_a_constant(groups, size, data):
    import statsmodels.api as sm

    rows = data.draw(st.lists(st.tuples(outcome, outcome), min_size=groups * size, max_size=groups * size))
    a, b = np.array(rows).T
    clusters = np.repeat(np.arange(groups), size)
    assume(np.ptp(a - b) > 0)
    fit = sm.OLS((a - b).astype(float), np.ones(len(a))).fit(
        cov_type="cluster", cov_kwds={"groups": clusters, "df_correction": True}
    )
    assume(fit.bse[0] > 1e-9)  # clusters that all have the same mean: `test_stats.py` holds what is said then
    # statsmodels' CR1 has G/(G − 1) · (n − 1)/(n − k) for k = 1 parameter, which is CR2 if groups are of equal size.
    found = stats.contrast([a, b], (1, -1), clusters)
    assert found.stderr == pytest.approx(fit.bse[0], **CLOSE)
    assert found.df == groups - 1


@slow_at_first
@given(groups=st.integers(2, 8), size=st.integers(2, 10), data=st.data())
def test_clustered_accuracy_too(groups, size, data):
    import statsmodels.api as sm

    correct = np.array(data.draw(st.lists(outcome, min_size=groups * size, max_size=groups * size)), dtype=float)
    clusters = np.repeat(np.arange(groups), size)
    assume(np.ptp(correct) > 0)
    fit = sm.OLS(correct, np.ones(len(correct))).fit(cov_type="cluster", cov_kwds={"groups": clusters})
    assert stats.rate(correct, clusters).stderr == pytest.approx(fit.bse[0], **CLOSE)


@slow_at_first
@given(stderr=st.floats(0.005, 0.1))
def test_the_smallest_effect_is_a_z_tests(stderr):
    from statsmodels.stats.power import NormalIndPower

    estimate = stats.Estimate(0, stderr, 0, 0, 1000)
    found = verdict.smallest_detectable(estimate)
    reached = NormalIndPower(ddof=0).power(found / stderr, 1, 0.025, ratio=0, alternative="larger")
    assert reached == pytest.approx(0.8, **CLOSE)
