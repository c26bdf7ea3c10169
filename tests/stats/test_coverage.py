"""The benchmark of the intervals' promises knows a broken one, and its simulated studies are what they say."""

import math
from dataclasses import replace

import numpy as np
import pytest

from qrl.stats.simulate import share_of_gain
from qrl.stats.verdict import WORDS
from tests.benchmarks import coverage, regimes
from tests.benchmarks.coverage import INTERVALS, Rate, Result, broken, observe, simulate
from tests.benchmarks.regimes import Study

pytestmark = pytest.mark.process

STUDIES = 10_000
HALF = Study("half", (0.6, 0.8, 0.6, 0.7), 500)
NOTHING_GAINED = Study("nothing", (0.65, 0.65, 0.63, 0.63), 500)


def result(study, **shares):
    """Return a result that keeps all bounds, apart from the given rates."""
    good = dict.fromkeys(INTERVALS, 0.95) | dict.fromkeys(WORDS, 0.05)
    good |= {"undefined": 0.0, "gate": 0.025, "mcnemar": 0.05} | shares
    return Result(study, {name: Rate(round(share * STUDIES), STUDIES) for name, share in good.items()})


def row_name(study):
    return f"{study.name} n={study.n} runs={study.runs}"


@pytest.mark.parametrize(
    ("shares", "names"),
    [
        ({}, []),
        ({"survives": 0.055, "survival": 0.9445, "delta": 0.9555, "gate": 0.029}, []),  # within three errors
        ({"survives": 0.06, "survival": 0.94, "delta": 0.96}, ["delta", "survival", "survives"]),
        ({"kept": 0.94, "accuracy": 0.94, "ratio": 0.94, "log-odds": 0.94}, ["kept", "accuracy", "ratio", "log-odds"]),
        ({"kept": 0.99, "accuracy": 0.99, "ratio": 0.99, "log-odds": 0.99}, []),
        ({"lost": 0.06, "reduced": 0.9}, ["lost"]),  # half is lost: reduced is right
        ({"gate": 0.031, "mcnemar": 1.0}, ["gate"]),  # something is gained: McNemar's test ought to reject
    ],
)
def test_rates_beyond_three_monte_carlo_errors_of_their_bound_are_broken(shares, names):
    assert broken(result(HALF, **shares)) == names


def test_without_a_gain_any_claim_is_wrong_and_so_is_a_rejection():
    wrong = result(NOTHING_GAINED, mcnemar=0.06, lost=0.06, survives=0.06, reduced=0.06)
    assert broken(wrong) == ["lost", "survives", "reduced", "mcnemar"]
    assert wrong.wrong.share == pytest.approx(0.18)


@pytest.mark.parametrize(
    "changed",
    [{"few": True}, {"n": 20}, {"clusters": (50,) * 10}, {"runs": 2}],
    ids=lambda changed: next(iter(changed)),
)
def test_where_intervals_are_conservative_they_may_cover_more_but_not_less(changed):
    study = replace(HALF, **changed)
    assert broken(result(study, survival=0.99)) == []
    assert broken(result(study, survival=0.94)) == ["survival"]


@pytest.mark.parametrize(
    ("rates", "margin", "words"),
    [
        ((0.6, 0.8, 0.6, 0.7), None, ["lost", "survives"]),
        ((0.6, 0.8, 0.6, 0.69), None, ["survives"]),
        ((0.6, 0.8, 0.6, 0.78), None, ["lost", "survives"]),
        ((0.6, 0.8, 0.6, 0.79), None, ["lost"]),
        ((0.6, 0.8, 0.6, 0.78), 0.03, ["lost"]),
        ((0.6, 0.8, 0.6, 0.80), None, ["lost", "reduced"]),
        ((0.6, 0.605, 0.6, 0.6), None, ["survives"]),  # less than the margin, and yet all of the gain
        ((0.6, 0.6, 0.6, 0.6), None, ["lost", "survives", "reduced"]),
    ],
)
def test_the_truth_says_which_verdicts_are_wrong(rates, margin, words):
    assert Study("", rates, 500, margin).wrong_words == words


def test_a_share_that_is_rarely_named_is_held_to_how_often_a_wrong_one_is():
    """Only lucky studies show a small gain. Their shares err more often than 5 %, but a wrong one is rare."""
    rarely = result(HALF, undefined=0.8)
    named = rarely.rates | {"kept": Rate(1700, 2000)}
    assert broken(replace(rarely, rates=named)) == []
    assert broken(replace(rarely, rates=named | {"kept": Rate(1400, 2000)})) == ["kept"]


def test_a_row_that_is_known_not_to_hold_says_so_and_why():
    bad = result(replace(HALF, exception="runs are not normal"), survives=0.5)
    assert coverage.remark(bad) == "  not held: survives (runs are not normal)"
    assert coverage.remark(result(HALF, survives=0.5)) == "  BROKEN: survives"
    assert coverage.remark(result(HALF)) == ""


def test_a_rate_has_a_monte_carlo_error_and_none_without_studies():
    assert str(Rate(50, 1000)) == "5.0±0.7"
    assert str(Rate(0, 0)) == "-"
    assert not Rate(0, 0).is_above(0.0) and not Rate(0, 0).is_below(1.0)


@pytest.mark.parametrize("study", regimes.rows(), ids=row_name)
def test_answers_have_the_accuracies_that_the_regime_names(study):
    """Exactly for independent questions; within four standard errors where answers are drawn."""
    if study.is_independent:
        outcomes, probabilities = study.patterns
        assert probabilities.sum() == pytest.approx(1)
        assert outcomes @ probabilities == pytest.approx(study.rates, abs=1e-7)
        return
    rng, studies = np.random.default_rng(6), 20
    drawn = np.array([study.draw(rng).accuracies for _ in range(studies)])
    error = np.maximum(drawn.std(axis=0, ddof=1) / math.sqrt(studies), 1e-3)
    assert np.abs(drawn.mean(axis=0) - study.rates).max() <= 4 * error.max()


def test_the_regimes_are_at_least_those_of_the_referee():
    rows = regimes.rows()
    assert len(rows) >= 24
    assert {min(row.n for row in rows), max(row.n for row in rows)} == {20, 5000}
    assert {row.runs for row in rows} >= {1, 2, 3, 5, 10}
    gains = [row.gain for row in rows if row.gain]
    assert (min(gains), max(gains)) == (pytest.approx(0.01), pytest.approx(0.4))
    for word in ("floor", "ceiling", "20 clusters of 50", "a cluster of 500, 60 of 8", "the same run entered again"):
        assert any(row.name.startswith(word) for row in rows)
    assert {row.exception for row in rows if row.collapse} == {"runs are not normal"}
    assert len({(row.name, row.n, row.runs) for row in rows}) == len(rows)


@pytest.mark.parametrize("study", [row for row in regimes.rows()[::3] if row.runs < 10], ids=row_name)
def test_a_share_is_covered_where_the_bounds_of_what_is_beyond_it_enclose_0(study):
    """What `observe` tests in place of the interval's ends, which need sixty times as many contrasts."""
    rng = np.random.default_rng(8)
    for _ in range(2):
        share = share_of_gain(study.draw(rng).contrast)
        kept = share.kept
        assert (kept is None) == (not share.whole.low > 0)
        if kept is None:
            continue
        near = 0.02 * (kept.high - kept.low)
        ends = [kept.low - near, kept.low + near, kept.high - near, kept.high + near]
        for true in (kept.estimate, *ends):
            beyond = share.beyond(true)
            assert (beyond.low <= 0 <= beyond.high) == (kept.low <= true <= kept.high)


def test_a_simulated_regime_gives_all_rates():
    found = coverage.merged([simulate(HALF, 75, seed=(0, part)) for part in range(2)])
    assert 0.85 < found.rates["survival"].share <= 1
    assert found.rates["mcnemar"].share == 1
    assert found.rates["kept"].studies == found.rates["gain"].studies == 150
    assert sum(found.rates[word].hits for word in WORDS) == 150
    text = coverage.as_text([found])
    assert text.count("half ") >= 2 and "lost, survives" in text


def test_what_a_study_cannot_say_is_left_out():
    rng = np.random.default_rng(0)
    assert "kept" not in observe(NOTHING_GAINED, NOTHING_GAINED.draw(rng))
    clusters = replace(HALF, clusters=(50,) * 10)
    assert not {"mcnemar", "gate"} & set(observe(clusters, clusters.draw(rng)))
    floor = Study("floor", (0.02, 0.22, 0.0, 0.1), 500)
    assert not {"ratio", "log-odds"} & set(observe(floor, floor.draw(rng)))


def test_the_page_has_one_block_of_tables_with_every_regime():
    page = coverage.PAGE.read_text(encoding="utf-8")
    found = coverage.BLOCK.findall(page)
    assert len(found) == 1
    for study in regimes.rows():
        assert study.name in found[0]
