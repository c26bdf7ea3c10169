"""Groups of questions: CR2 and its degrees of freedom by their matrices, and the cases in which groups misled."""

import math

import numpy as np
import pytest
import scipy.linalg
import scipy.stats
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from qrl import stats
from qrl.stats.clusters import ENOUGH, Groups

CLOSE = {"rel": 1e-9, "abs": 1e-12}
SIZES = st.lists(st.integers(1, 12), min_size=2, max_size=9)


def of_sizes(sizes):
    labels = np.repeat(np.arange(len(sizes)), sizes)
    return Groups.of(labels, len(labels))


def adjusted(sizes):
    """Return (groups, n): each row gives a group's CR2 residual sum, (I − H)_gg^(−½) applied to the residuals."""
    n = sum(sizes)
    residuals = np.eye(n) - np.ones((n, n)) / n
    rows, start = [], 0
    for size in sizes:
        group = slice(start, start + size)
        inverse_root = scipy.linalg.inv(scipy.linalg.sqrtm(residuals[group, group]).real)
        rows.append(np.ones(size) @ inverse_root @ residuals[group])
        start += size
    return np.array(rows)


@settings(deadline=None)
@given(sizes=SIZES, data=st.data())
def test_the_error_is_cr2_by_its_matrices_whatever_the_sizes_of_the_groups(sizes, data):
    values = np.array(data.draw(st.lists(st.integers(-1, 1), min_size=sum(sizes), max_size=sum(sizes))), dtype=float)
    sums = adjusted(sizes) @ values
    assert of_sizes(sizes).stderr_of_mean(values) == pytest.approx(math.sqrt(sums @ sums) / len(values), abs=1e-9)


@settings(deadline=None)
@given(sizes=SIZES)
def test_the_degrees_of_freedom_are_bell_and_mccaffreys_by_their_matrices(sizes):
    assume(len(set(sizes)) > 1)
    rows = adjusted(sizes)
    of_sums = rows @ rows.T  # covariance of the adjusted sums if questions are independent and of variance 1
    expected = np.trace(of_sums) ** 2 / np.sum(of_sums**2)
    independent = np.random.default_rng(0).normal(size=sum(sizes))
    independent -= np.repeat([part.mean() for part in np.split(independent, np.cumsum(sizes)[:-1])], sizes)
    assert of_sizes(sizes).degrees_of_freedom(independent) == pytest.approx(max(1.0, expected), rel=1e-6)


@settings(deadline=None)
@given(sizes=SIZES, alike=st.floats(0.01, 1))
def test_alike_questions_have_the_degrees_of_their_own_covariance(sizes, alike):
    """Imbens and Kolesár: the same trace, with the covariance of alike questions between the matrices."""
    groups = of_sizes(sizes)
    together = groups.index[:, None] == groups.index[None, :]
    covariance = (1 - alike) * np.eye(sum(sizes)) + alike * together
    rows = adjusted(sizes)
    of_sums = rows @ covariance @ rows.T
    variances = groups.sizes + alike * groups.sizes * (groups.sizes - 1.0)
    assert groups._degrees(variances) == pytest.approx(np.trace(of_sums) ** 2 / np.sum(of_sums**2), rel=1e-6)


def test_the_error_is_unbiased_if_questions_are_independent_although_groups_are_unequal():
    rng, groups = np.random.default_rng(1), of_sizes([60, *[4] * 15])
    squares = [groups.stderr_of_mean(values) ** 2 for values in rng.normal(size=(4000, 120))]
    assert np.mean(squares) == pytest.approx(1 / 120, abs=3 * np.std(squares) / math.sqrt(4000))


def test_effective_groups_are_those_of_equal_size_and_few_if_one_is_large():
    assert of_sizes([50] * 20).effective == pytest.approx(20)
    assert of_sizes([500, *[8] * 60]).effective == pytest.approx(980**2 / (500**2 + 60 * 64))
    assert of_sizes([500, *[8] * 60]).effective < ENOUGH < of_sizes([50] * 20).effective


def templates(rng, sizes, loss):
    """(4, n) outcomes of base and trained, full and quantized: one template's questions lose alike."""
    groups = of_sizes(sizes)
    n = len(groups.index)
    lost = rng.beta(32 * loss, 32 * (1 - loss), len(sizes))[groups.index]
    luck = rng.random(n)
    base, trained = luck < 0.6, luck < 0.8
    return np.array([base, trained, base, trained & (rng.random(n) > lost)], dtype=float), groups.index


def test_20_templates_of_50_give_the_t_interval_of_the_templates():
    """The case of the issue: [−0.085, −0.021]; the correction for few changes took templates for questions."""
    rng = np.random.default_rng(7)
    rows = []
    for _ in range(20):
        loss = rng.beta(2, 30)
        for _ in range(50):
            base = rng.random() < 0.55
            trained = base or rng.random() < 0.5
            rows.append((base, trained, base if rng.random() < 0.97 else not base, trained and rng.random() > loss))
    outcomes, clusters = np.array(rows, dtype=float).T, np.repeat(np.arange(20), 50)
    found = stats.contrast(outcomes, (1, -1, -1, 1), clusters)
    means = (np.array([1, -1, -1, 1]) @ outcomes).reshape(20, 50).mean(axis=1)
    plain = scipy.stats.ttest_1samp(means, 0).confidence_interval(0.95)
    assert (plain.low, plain.high) == pytest.approx((-0.085, -0.021), abs=0.001)
    assert plain.low - 0.01 < found.low <= plain.low + 1e-9
    assert plain.high - 1e-9 <= found.high < plain.high + 0.01
    assert found.upper < 0  # a loss is shown
    assert not found.few


@pytest.mark.parametrize("sizes", [(50,) * 20, (500, *(8,) * 60)], ids=["20 of 50", "500 beside 60 of 8"])
def test_clusters_cover_and_bounds_err_at_most_as_they_promise(sizes):
    """A cluster of 500 beside 60 of 8 covered in 81 % of studies; 400 studies, three Monte Carlo errors."""
    rng, studies, loss = np.random.default_rng(3), 400, 0.1
    missed = {"interval": 0, "lower": 0, "upper": 0}
    for _ in range(studies):
        outcomes, clusters = templates(rng, sizes, loss)
        found = stats.contrast(outcomes, (1, -1, -1, 1), clusters)
        missed["interval"] += not found.low <= -0.8 * loss <= found.high
        missed["lower"] += found.lower > -0.8 * loss
        missed["upper"] += found.upper < -0.8 * loss
    for count in missed.values():
        assert count / studies <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / studies)


def test_few_changes_in_clusters_are_counted_by_question():
    """One change in 1,000 questions of 20 clusters: as wide as 1 in 1,000, not as 1 in 20."""
    full, quantized = np.ones(1000), np.ones(1000)
    quantized[0] = 0
    clustered = stats.contrast([quantized, full], (1, -1), np.repeat(np.arange(20), 50))
    plain = stats.contrast([quantized, full], (1, -1))
    assert clustered.few
    assert clustered.low <= plain.low and clustered.high >= plain.high - 1e-12
    assert clustered.high - clustered.low < 2 * (plain.high - plain.low)


def test_the_correlation_within_groups_is_that_of_an_analysis_of_variance():
    sizes = [3, 5, 7, 9]
    draw = np.random.default_rng(0)
    parts = [draw.normal(loc, 1, size) for loc, size in zip([0, 2, 1, 3], sizes, strict=True)]
    ratio = scipy.stats.f_oneway(*parts).statistic
    n = sum(sizes)
    average_size = (n - sum(size**2 for size in sizes) / n) / (len(sizes) - 1)
    expected = (ratio - 1) / (ratio - 1 + average_size)
    assert of_sizes(sizes)._correlation(np.concatenate(parts)) == pytest.approx(expected)
