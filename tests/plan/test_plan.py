"""Plans against simulated studies that `verdict.judge` itself judges; and the command, its files, its refusals."""

import json
import math
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
from click.testing import CliRunner
from statsmodels.stats.power import NormalIndPower, TTestPower

from qrl import cli, plan, stats
from qrl.errors import BadInput
from qrl.plan import Assumptions, power, table
from qrl.plan.patterns import ALL, Moment, nearest
from qrl.stats.simulate import Patterns, share_of_gain
from qrl.stats.verdict import WORDS, Gains, judge

pytestmark = pytest.mark.process

COMBINATIONS = np.array([[i >> cell & 1 for cell in range(4)] for i in range(16)])


def patterns(assumed):
    """Return (16,) probabilities of a question's outcomes with the assumed rates and correlations, by another route.

    A vertex of the polytope of all such distributions: as far as possible from the even one that a plan assumes.
    """
    base, trained = assumed.base_accuracy, assumed.base_accuracy + assumed.gain
    rates = np.array([base, trained, base, trained - assumed.drop])
    correlations = np.kron(
        [[1, assumed.scheme_correlation], [assumed.scheme_correlation, 1]],
        [[1, assumed.correlation], [assumed.correlation, 1]],
    )
    spread = np.sqrt(rates * (1 - rates))
    second = correlations * np.outer(spread, spread) + np.outer(rates, rates)
    pairs = [(i, j) for i in range(4) for j in range(i + 1, 4)]
    equations = np.vstack([np.ones(16), COMBINATIONS.T, *[COMBINATIONS[:, i] * COMBINATIONS[:, j] for i, j in pairs]])
    wanted = np.concatenate([[1], rates, [second[i, j] for i, j in pairs]])
    found = scipy.optimize.linprog(np.zeros(16), A_eq=equations, b_eq=wanted, bounds=(0, 1))
    assert found.status == 0, "no such questions exist"
    return np.clip(found.x, 0, None) / np.clip(found.x, 0, None).sum()


def only_losses(base, trained, lost):
    """Return (16,) probabilities: training and quantization never change an answer the other way."""
    chances = dict.fromkeys(range(16), 0.0)
    chances[0b0000] = 1 - trained
    chances[0b1111] = base
    chances[0b1010] = trained - base - lost
    chances[0b0010] = lost  # right after training, wrong once quantized
    return np.array(list(chances.values()))


def answers(chances, n=100_000):
    """Return (4, n) outcomes in which each combination is as frequent as its probability."""
    return np.repeat(COMBINATIONS, np.round(chances * n).astype(int), axis=0).T


def claimed(chances, n, margin=None, studies=300, seed=7):
    """Return the shares of simulated studies that show the gain, and that give each verdict, by `judge` itself."""
    rng = np.random.default_rng(seed)
    counted = dict.fromkeys(("shown", *WORDS), 0)
    for study, counts in enumerate(rng.multinomial(n, chances, size=studies)):
        cells = np.repeat(COMBINATIONS, counts, axis=0).T.astype(float)
        gains = Gains(share_of_gain(partial(stats.contrast, cells)), margin)
        counted["shown"] += gains.is_shown
        counted[gains.word()] += 1
        if study < 15:  # the reason, the share kept and the p-value beside the word take longer than the word
            assert judge(gains, dict(zip("abcd", cells.mean(axis=1), strict=True))).verdict == gains.word()
    return {name: count / studies for name, count in counted.items()}


def assert_agree(found, expected, studies=300, planned=600):
    """Within three Monte Carlo errors of these studies and of the plan's own, and 0.01."""
    for name, chance in expected.items():
        error = math.sqrt(max(chance * (1 - chance), 1e-3) * (1 / studies + 1 / planned))
        assert found[name] == pytest.approx(chance, abs=0.01 + 3 * error), name


def in_words(chances):
    return {"shown": chances.shown} | chances.words


@pytest.mark.parametrize(
    ("assumed", "n"),
    [
        (Assumptions(), 3000),  # a small gain
        (Assumptions(gain=0.1, drop=0.0, scheme_correlation=0.8), 1500),  # which margin applies is estimated too
        (Assumptions(gain=0.15, drop=0.04, base_accuracy=0.5), 1000),
        (Assumptions(gain=0.15, drop=0.04, base_accuracy=0.5, margin=0.06), 1000),
        (Assumptions(gain=0.15, drop=0.12, base_accuracy=0.5), 600),
        (Assumptions(gain=0.4, drop=0.3, base_accuracy=0.1, correlation=0.1), 100),
        (Assumptions(gain=0.26, drop=0.0, base_accuracy=0.7, scheme_correlation=0.9), 1000),  # near the ceiling
    ],
)
def test_chances_are_those_of_simulated_studies(assumed, n):
    """Also of questions that have the same correlations in another way."""
    assumed = assumed.checked()
    assert_agree(claimed(patterns(assumed), n, assumed.margin), in_words(power.chances(assumed, n, studies=600)))


@pytest.mark.parametrize(
    ("chances", "n", "margin"),
    [
        (only_losses(0.6, 0.8, 0.007), 300, 0.02),  # 2 changes
        (only_losses(0.6, 0.8, 0.007), 1000, None),
        (only_losses(0.7, 0.96, 0.0), 100, None),  # none changes
    ],
)
def test_chances_from_a_pilot_of_few_changes_are_those_of_simulated_studies(chances, n, margin):
    assumed = Assumptions(**plan.of_pilot(*answers(chances)), margin=margin).checked()
    assert_agree(claimed(chances, n, margin), in_words(power.chances(assumed, n, studies=600)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("assumed", "verdict"),
    [
        (Assumptions(gain=0.26, base_accuracy=0.7, scheme_correlation=0.9), "survives"),
        (Assumptions(gain=0.1, drop=0.04), "reduced"),
        (Assumptions(gain=0.15, drop=0.12, base_accuracy=0.5), "lost"),
        (Assumptions(**plan.of_pilot(*answers(only_losses(0.6, 0.8, 0.007)))), "survives"),
    ],
    ids=["ceiling", "reduced", "lost", "few changes"],
)
def test_the_n_of_a_plan_reaches_its_power_and_a_smaller_one_does_not(assumed, verdict):
    assumed = assumed.checked()
    n = power.questions(assumed, 1, power.gives(verdict, None), 0.8)
    assert assumed.expected_verdict == verdict
    assert 0.75 <= claimed(answers_of(assumed), n, studies=400)[verdict] <= 0.87
    assert power.chances(assumed, round(0.8 * n), studies=400).words[verdict] < 0.8


def answers_of(assumed):
    """Return (16,) probabilities, by another route if there is no pilot."""
    return patterns(assumed) if assumed.pilot is None else only_losses(0.6, 0.8, 0.007)


def printed(command):
    words = command.removeprefix("qrl plan").split()
    done = CliRunner().invoke(cli.cli, ["plan", *words])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.slow
def test_the_readmes_numbers_are_printed_by_its_commands():
    text = (Path(plan.__file__).parent / "README.md").read_text()
    rows = re.findall(r"^\| `(qrl plan .*)` \| ([\d,]+) \| `(\w+)` \| ([\d,]+) \|$", text, re.MULTILINE)
    assert len(rows) == 3
    for command, n_for_gain, verdict, n_for_verdict in rows:
        assert f"n = {n_for_gain} shows the gain, n = {n_for_verdict} gives `{verdict}`" in printed(command)


@pytest.mark.parametrize(("gain", "n"), [(0.05, 1000), (0.03, 3000), (0.1, 150)])
def test_power_of_the_gain_is_the_one_sided_part_of_a_z_test(gain, n):
    """One-sided, because a gain must be above 0; statsmodels' z test has infinite df, ours n − 1."""
    assumed = Assumptions(gain=gain, drop=0.0).checked()
    rates = np.array([0.68, 0.68 + gain])
    spread = np.sqrt(rates * (1 - rates))
    sd = math.sqrt(spread @ spread - 2 * 0.2 * spread.prod())
    alpha = 2 * scipy.stats.norm.sf(scipy.stats.t.ppf(0.975, n - 1))
    expected = NormalIndPower(ddof=0).power(gain / sd, n, alpha / 2, ratio=0, alternative="larger")
    assert power.chances(assumed, n).shown == pytest.approx(expected, abs=0.035)


@pytest.mark.parametrize("seeds", [3, 10])
def test_power_over_runs_with_questions_of_their_own_is_the_t_tests(seeds):
    assumed = Assumptions(gain=0.05, drop=0.0, between_gain=0.03, own_questions=True).checked()
    rates = np.array([0.68, 0.73])
    spread = np.sqrt(rates * (1 - rates))
    sd = math.sqrt(0.03**2 + (spread @ spread - 2 * 0.2 * spread.prod()) / 2000)
    expected = TTestPower().power(0.05 / sd, seeds, 0.025, alternative="larger")
    assert power.chances(assumed, 2000, seeds).shown == pytest.approx(expected, abs=0.05)


def claimed_over_runs(assumed, n, seeds, studies):
    rng, chances = np.random.default_rng(3), patterns(assumed)
    counted = dict.fromkeys(("shown", *WORDS), 0)
    for _ in range(studies):
        shared = rng.multinomial(n, chances)
        runs = []
        for _ in range(seeds):
            counts = rng.multinomial(n, chances) if assumed.own_questions else shared
            cells = np.repeat(COMBINATIONS, counts, axis=0).T.astype(float)
            gain, survival = rng.normal(scale=[assumed.between_gain, assumed.between_survival])
            cells[1] += gain  # a run's own effect, on every question alike: the arithmetic does not ask for 0 and 1
            cells[3] += gain + survival
            runs.append(cells)
        groups = [np.arange(n) + n * run * assumed.own_questions for run in range(seeds)]
        labels = [str(run) for run in range(seeds)]
        questions = n * seeds if assumed.own_questions else n

        def over(weights, runs=runs, groups=groups, labels=labels, questions=questions):
            return stats.contrast_over_runs(runs, weights, groups, labels, questions)

        gains = Gains(share_of_gain(over), assumed.margin)
        counted["shown"] += gains.is_shown
        counted[gains.word()] += 1
    return {name: count / studies for name, count in counted.items()}


@pytest.mark.parametrize(("seeds", "own_questions"), [(3, True), (6, True), (4, False)])
def test_chances_over_training_runs_are_those_of_simulated_studies(seeds, own_questions):
    spread = {"between_gain": 0.02, "between_survival": 0.015, "own_questions": own_questions}
    assumed = Assumptions(gain=0.1, drop=0.03, margin=0.05, **spread).checked()
    found = claimed_over_runs(assumed, 400, seeds, studies=150)
    assert_agree(found, in_words(power.chances(assumed, 400, seeds, studies=600)), studies=150)


@pytest.mark.slow
def test_more_runs_shrink_what_more_questions_cannot():
    spread = {"between_gain": 0.02, "between_survival": 0.02}
    assumed = Assumptions(gain=0.2, drop=0.06, **spread).checked()
    apart = Assumptions(gain=0.2, drop=0.06, **spread, own_questions=True).checked()
    reduced = power.gives("reduced", None)
    sizes = [power.questions(assumed, seeds, reduced, 0.8) for seeds in (2, 10, 20)]
    assert sizes[0] is None and sizes[1] > sizes[2]  # two runs: no n is enough
    assert power.questions(apart, 20, reduced, 0.8) < sizes[2]


def test_a_spread_that_is_too_wide_for_any_n_is_told():
    planned = plan.make(Assumptions(gain=0.1, between_gain=0.05, between_survival=0.05), seeds=2)
    assert "the spread between training runs alone is too wide" in table.summary(planned)


@pytest.mark.slow
def test_what_n_can_see_is_what_it_takes_to_see_it():
    seen = plan.make(Assumptions(gain=0.2, drop=0.01, base_accuracy=0.5, scheme_correlation=0.9), n=2000)
    row = seen.rows[0]
    assert sum(row.words.values()) == pytest.approx(1) and row.power_verdict == row.words["survives"]
    assert plan.make(seen.assumed, effect=row.least_gain).rows[0].n_effect_gain == pytest.approx(2000, rel=0.15)
    assert plan.make(seen.assumed, effect=row.least_change).rows[0].n_effect_survival == pytest.approx(2000, rel=0.15)
    assumed = Assumptions(gain=0.2, drop=row.largest_drop, base_accuracy=0.5, scheme_correlation=0.9).checked()
    assert power.chances(assumed, 2000).words["survives"] == pytest.approx(0.8, abs=0.06)


@pytest.mark.parametrize(
    ("gain", "drop", "margin", "verdict", "boundary"),
    [
        (0.2, 0.0, None, "survives", None),
        (0.2, -0.05, None, "survives", None),
        (0.2, 0.019, None, "survives", None),
        (0.05, 0.01, None, "reduced", "the margin"),  # the least margin, a fifth of this gain
        (0.2, 0.06, None, "reduced", None),
        (0.2, 0.1, None, "reduced", "half of the gain"),
        (0.2, 0.11, None, "lost", None),
        (0.2, 0.06, 0.07, "survives", None),
        (0.2, 0.12, 0.15, "lost", None),  # the verdict looks for a loss first
    ],
)
def test_the_expected_verdict_is_that_of_an_endless_study(gain, drop, margin, verdict, boundary):
    assumed = Assumptions(gain=gain, drop=drop, margin=margin).checked()
    assert (assumed.expected_verdict, assumed.boundary) == (verdict, boundary)
    assert power.chances(assumed, 10**7, studies=60).words[verdict] > 0.85


def test_a_loss_at_a_boundary_says_that_no_n_decides_between_its_sides():
    planned = plan.make(Assumptions(gain=0.1, drop=0.05))
    assert "equals half of the gain: no n decides on which side of it the truth is" in table.as_markdown(planned)
    assert "equals the margin: no n decides" in table.as_markdown(plan.make(Assumptions(gain=0.05, drop=0.01), n=500))


@pytest.mark.parametrize(
    ("base", "gain", "drop"), [(0.7, 0.3, 0.0), (0.0, 0.3, 0.1), (0.6, 0.2, 0.8), (0.02, 0.95, 0.5), (0.5, 0.5, 0.9)]
)
def test_floor_and_ceiling_can_be_planned_for(base, gain, drop):
    assumed = Assumptions(base_accuracy=base, gain=gain, drop=drop).checked()
    found = assumed.patterns()
    assert found.outcomes @ found.probabilities == pytest.approx(assumed.rates(), abs=1e-6)
    assert power.chances(assumed, 10**6, studies=10).words[assumed.expected_verdict] == 1


def test_patterns_have_the_moments_and_are_even_where_these_leave_a_choice():
    assumed = Assumptions(base_accuracy=0.6, gain=0.1, drop=0.02, correlation=0.3, scheme_correlation=0.6)
    found = assumed.patterns().probabilities
    other = patterns(assumed)
    pairs = COMBINATIONS.T @ (COMBINATIONS * found[:, None])
    assert pairs == pytest.approx(COMBINATIONS.T @ (COMBINATIONS * other[:, None]), abs=1e-5)
    assert scipy.stats.entropy(found) > scipy.stats.entropy(other)


def test_moments_that_no_questions_have_give_way_by_their_slack():
    """Both cells are right more often than the second one is."""
    moments = [Moment((0,), 0.5, 1e-12), Moment((1,), 0.2, 1e-12), Moment((0, 1), 0.3, 1e-6)]
    found = nearest(ALL, moments)
    rates = found.outcomes @ found.probabilities
    assert rates[:2] == pytest.approx([0.5, 0.2], abs=1e-5)
    assert (found.outcomes[0] * found.outcomes[1]) @ found.probabilities == pytest.approx(0.2, abs=1e-4)


def test_a_correlation_that_a_pilots_questions_cannot_have_is_refused_with_the_nearest():
    """Where training never makes an answer wrong, the accuracies alone fix the correlation."""
    suggested = plan.of_pilot(*answers(only_losses(0.6, 0.8, 0.007)))
    with pytest.raises(BadInput, match=r"'correlation' is 0\.2, but no questions have .*: 0\.612 is the nearest"):
        Assumptions(**suggested | {"correlation": 0.2}).checked()


def test_a_pilots_own_patterns_are_kept_and_reweighted_for_other_numbers():
    suggested = plan.of_pilot(*answers(only_losses(0.6, 0.8, 0.007)))
    assert Assumptions(**suggested).patterns().probabilities == pytest.approx(suggested["pilot"].probabilities)
    smaller = Assumptions(**suggested | {"gain": 0.1, "drop": 0.01}).checked().patterns()
    assert smaller.outcomes @ smaller.probabilities == pytest.approx([0.6, 0.7, 0.6, 0.69], abs=1e-4)
    assert smaller.outcomes.shape == (4, 4)  # still only losses
    with pytest.raises(BadInput, match="pilot has too few kinds of answers"):
        Assumptions(**suggested | {"drop": -0.1}).checked()


def test_a_pilot_of_several_samples_has_shares():
    rng = np.random.default_rng(0)
    cells = rng.integers(0, 5, size=(4, 300)) / 4
    cells[1] = np.minimum(1, cells[1] + 0.5)
    planned = plan.make(Assumptions(**plan.of_pilot(*cells)), n=300)
    assert planned.rows[0].power_gain == pytest.approx(1.0, abs=0.01)


def test_a_pilot_gives_back_what_made_it():
    assumed = Assumptions(base_accuracy=0.6, gain=0.1, drop=0.02, correlation=0.3, scheme_correlation=0.6).checked()
    found = plan.of_pilot(*answers(patterns(assumed), 200_000))
    assert isinstance(found.pop("pilot"), Patterns)
    assert found == pytest.approx(
        {"base_accuracy": 0.6, "gain": 0.1, "drop": 0.02, "correlation": 0.3, "scheme_correlation": 0.6}, abs=1e-3
    )


def test_a_pilot_with_a_cell_all_right_can_be_planned_with():
    base, all_right = np.arange(30) % 2, np.ones(30)
    planned = plan.make(Assumptions(**plan.of_pilot(base, all_right, base, np.arange(30) % 3 > 0)), n=100)
    row = planned.rows[0]
    assert planned.verdict == "lost" and row.power_verdict > 0.4
    assert row.least_gain == 0.5  # every question of the pilot was right after training: no other gain is possible


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--correlation", "0.95"], "'correlation' is 0.95"),
        (["--correlation", "-0.1"], "'correlation' is -0.1"),
        (["--drop", "0.01", "--scheme-correlation", "1"], "'scheme-correlation'"),
        (["--base-accuracy", "1.2"], "'base-accuracy'"),
        (["--base-accuracy", "nan"], "'base-accuracy'"),
        (["--gain", "0"], "'gain'"),
        (["--gain", "0.4"], "The trained cell would have the accuracy 1.080"),
        (["--drop", "0.8"], "The trained and quantized cell"),
        (["--drop", "nan"], "'drop'"),
        (["--margin", "0"], "'margin'"),
        (["--power", "1"], "'power'"),
        (["--n", "3"], "'n' is 3"),
        (["--effect", "0.9"], "'effect' is 0.9"),
        (["--n", "100", "--effect", "0.1"], "not both"),
        (["--seeds", "0"], "'seeds' is 0"),
        (["--seeds", "1", "--between-seed-sd", "0.1"], "--seeds of 2 or more"),
        (["--between-seed-sd", "-1"], "'between-seed-sd'"),
        (["--scheme", "nf4"], "--pilot FILE"),
        (["--reference", "bf16"], "--pilot FILE"),
        (["--pilot", "none.parquet"], "none.parquet"),
    ],
)
def test_numbers_out_of_range_are_refused_in_a_sentence(words, says):
    done = CliRunner().invoke(cli.cli, ["plan", *words])
    assert isinstance(done.exception, BadInput) and done.exception.exit_code == 2
    assert says in str(done.exception) and str(done.exception).endswith(".")


def test_the_command_prints_a_table_and_writes_it_with_a_figure(tmp_path):
    done = CliRunner().invoke(cli.cli, ["plan", "--n", "1000", "--out", str(tmp_path / "new")])
    assert done.exit_code == 0, done.output
    assert "| 1 | +0.050 ± 0.036 |" in done.output
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {"new/table.md", "new/table.json", "new/figures/plan.png"}
    written = json.loads((tmp_path / "new" / "table.json").read_text())
    assert written["n"] == 1000 and written["rows"][0]["power_gain"] == pytest.approx(0.78, abs=0.03)
    assert written["assumed"]["gain"] == 0.05


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--effect", "0.03"],
        ["--n", "500", "--gain", "0.2"],
        ["--gain", "0.1", "--between-seed-sd", "0.01", "--seeds", "3"],
    ],
)
def test_every_way_to_ask_is_answered_in_a_sentence(words):
    done = CliRunner().invoke(cli.cli, ["plan", *words])
    assert done.exit_code == 0 and "training run" in done.output and "Assumed: base 0.680" in done.output


def test_an_effect_that_no_n_shows_is_told_as_it_was_asked_for():
    done = CliRunner().invoke(cli.cli, ["plan", "--effect", "1e-9"])
    assert "no n shows a gain of 1e-09, no n shows a change of the gain by 1e-09, each" in done.output
    assert "of 0.000" not in done.output and "by 0.000" not in done.output and "n = none" not in done.output


def test_a_plan_from_a_pilot_takes_its_numbers_and_says_how_sure_they_are(tmp_path):
    import pandas as pd

    rng = np.random.default_rng(0)
    cells = np.repeat(
        COMBINATIONS, rng.multinomial(800, patterns(Assumptions(gain=0.1, drop=0.01).checked())), axis=0
    ).T
    names = [("base", "full"), ("grpo", "full"), ("base", "nf4"), ("grpo", "nf4")]
    pd.concat(
        pd.DataFrame({"variant": variant, "scheme": scheme, "question": range(800), "correct": cell})
        for (variant, scheme), cell in zip(names, cells, strict=True)
    ).to_csv(tmp_path / "pilot.csv", index=False)
    done = CliRunner().invoke(cli.cli, ["plan", "--pilot", str(tmp_path / "pilot.csv"), "--power", "0.9"])
    assert done.exit_code == 0, done.output
    assert f"base {cells[0].mean():.3f}, gain {cells[1].mean() - cells[0].mean():+.3f}" in done.output
    assert "n = 800: gain +" in done.output and "its lower bound" in done.output
    refused = CliRunner().invoke(cli.cli, ["plan", "--pilot", str(tmp_path / "pilot.csv"), "--scheme", "awq"])
    assert "has the quantized schemes nf4" in str(refused.exception)


def test_under_mlflow_run_the_plan_is_logged(store, monkeypatch):
    import mlflow

    opened = mlflow.MlflowClient().create_run("0").info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", opened)
    done = CliRunner().invoke(cli.cli, ["plan", "--n", "1000"])
    assert done.exit_code == 0, done.output
    run = mlflow.get_run(opened)
    kept = {file.path for folder in (None, "figures") for file in mlflow.MlflowClient().list_artifacts(opened, folder)}
    assert {"table.md", "table.json", "figures/plan.png"} <= kept
    assert run.info.status == "FINISHED" and run.data.params["plan.n"] == "1000" and run.data.tags["qrl.step"] == "plan"
    assert "What n = 1,000 questions can show" in run.data.tags["mlflow.note.content"]
