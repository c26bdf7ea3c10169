"""Plans against simulated studies that `verdict.judge` itself judges; and the command, its files, its refusals."""

import json
import math

import numpy as np
import pytest
import scipy.optimize
from click.testing import CliRunner

from qrl import cli, plan, stats
from qrl.errors import BadInput
from qrl.plan import Assumptions, power, table
from qrl.stats.verdict import judge

PATTERNS = np.array([[i >> cell & 1 for cell in range(4)] for i in range(16)])


def patterns(assumed):
    """Return (16,) probabilities of a question's outcomes in four cells, with the assumed rates and correlations."""
    rates = assumed.base_accuracy + np.array([0, assumed.gain, 0, assumed.gain - assumed.drop])
    second = assumed.covariance() + np.outer(rates, rates)
    pairs = [(i, j) for i in range(4) for j in range(i + 1, 4)]
    equations = np.vstack([np.ones(16), PATTERNS.T, *[PATTERNS[:, i] * PATTERNS[:, j] for i, j in pairs]])
    wanted = np.concatenate([[1], rates, [second[i, j] for i, j in pairs]])
    found = scipy.optimize.linprog(np.zeros(16), A_eq=equations, b_eq=wanted, bounds=(0, 1))
    assert found.status == 0, "no such questions exist"
    return np.clip(found.x, 0, None) / np.clip(found.x, 0, None).sum()


def claimed(assumed, n, studies=1500, seed=0):
    """Return the shares of simulated studies that show the gain, and that give each verdict, by `judge` itself."""
    rng, chances = np.random.default_rng(seed), patterns(assumed)
    shares = {"shown": 0.0, "survives": 0.0, "lost": 0.0, "inconclusive": 0.0}
    for counts in rng.multinomial(n, chances, size=studies):
        cells = np.repeat(PATTERNS, counts, axis=0).T
        gain = stats.contrast(cells, (-1, 1, 0, 0))
        survival, kept = stats.contrast(cells, (1, -1, -1, 1)), stats.contrast(cells, (0.5, -0.5, -1, 1))
        verdict = judge(gain, survival, kept, dict(zip("abcd", cells.mean(axis=1), strict=True)), assumed.margin)
        shares["shown"] += gain.low > 0
        shares[verdict.verdict] += 1
    return {name: count / studies for name, count in shares.items()}


CASES = [
    (Assumptions(), 1044),
    (Assumptions(), 3000),
    (
        Assumptions(gain=0.04, drop=0.0, scheme_correlation=0.8),
        1500,
    ),  # the margin is at its least, or half, as the estimate falls
    (Assumptions(gain=0.15, drop=0.04, base_accuracy=0.5), 1000),
    (Assumptions(gain=0.15, drop=0.04, base_accuracy=0.5, margin=0.06), 1000),
    (Assumptions(gain=0.15, drop=0.12, base_accuracy=0.5), 600),
    (Assumptions(gain=0.2, drop=0.08, base_accuracy=0.6, correlation=0.1, scheme_correlation=0.6), 2000),
]


@pytest.mark.parametrize(("assumed", "n"), CASES)
def test_chances_are_those_of_simulated_studies(assumed, n):
    """Within three Monte Carlo errors of 1,500 studies and 0.015 for the normal approximation."""
    assumed = assumed.checked()
    shares = claimed(assumed, n)
    expected = {"shown": power.chance_shown(assumed, n)} | {
        verdict: power.chance_decided(assumed, n, verdict=verdict) for verdict in ("survives", "lost")
    }
    for name, chance in expected.items():
        assert shares[name] == pytest.approx(
            chance, abs=0.015 + 3 * math.sqrt(max(chance * (1 - chance), 1e-3) / 1500)
        ), name


def test_the_n_of_a_plan_reaches_its_power_and_a_smaller_one_does_not():
    assumed = Assumptions(gain=0.12, drop=0.02)
    row = plan.make(assumed, power=0.8).rows[0]
    full = assumed.checked()
    assert power.chance_decided(full, row.n_verdict) >= 0.8 > power.chance_decided(full, row.n_verdict - 1)
    assert power.chance_shown(full, row.n_gain) >= 0.8 > power.chance_shown(full, row.n_gain - 1)
    assert claimed(full, row.n_verdict)["survives"] == pytest.approx(0.8, abs=0.045)


def test_the_readmes_numbers_are_a_plans():
    from pathlib import Path

    text = (Path(plan.__file__).parent / "README.md").read_text()
    row = plan.make(Assumptions()).rows[0]
    of_tiny = plan.make(Assumptions(correlation=0.23, scheme_correlation=0.91)).rows[0]
    assert (
        f"n = {row.n_gain:,} shows the gain, n = {row.n_verdict:,} gives `survives`" in text
        and f"needs n = {of_tiny.n_verdict:,}" in " ".join(text.split())
    )


def simulated_over_runs(assumed, n, seeds, studies=400):
    rng, chances = np.random.default_rng(3), patterns(assumed)
    survives = shown = 0
    gains, survivals = np.array([-1, 1, 0, 0]), np.array([1, -1, -1, 1])
    for _ in range(studies):
        runs = []
        for _ in range(seeds):
            cells = np.repeat(PATTERNS, rng.multinomial(n, chances), axis=0).T.astype(float)
            gain, survival = rng.normal(scale=[assumed.between_gain, assumed.between_survival])
            cells[1] += gain  # a run's own effect, on every question alike: the arithmetic does not ask for 0 and 1
            cells[3] += gain + survival
            runs.append(cells)
        groups = [np.arange(n) + n * run for run in range(seeds)]

        def over(weights, runs=runs, groups=groups):
            return stats.contrast_over_runs(runs, weights, groups, [str(i) for i in range(seeds)], n * seeds)

        gain, survival, kept = over(gains), over(survivals), over(survivals + gains * 0.5)
        shown += gain.low > 0
        survives += judge(gain, survival, kept, {"a": 0.5}, assumed.margin).verdict == "survives"
    return shown / studies, survives / studies


@pytest.mark.parametrize("seeds", [3, 6])
def test_chances_over_training_runs_are_those_of_simulated_studies(seeds):
    assumed = Assumptions(gain=0.1, drop=0.01, between_gain=0.02, between_survival=0.015, own_questions=True).checked()
    shown, survives = simulated_over_runs(assumed, 400, seeds)
    assert shown == pytest.approx(power.chance_shown(assumed, 400, seeds), abs=0.08)
    assert survives == pytest.approx(power.chance_decided(assumed, 400, seeds), abs=0.08)


def test_more_runs_shrink_what_more_questions_cannot():
    spread = {"between_gain": 0.02, "between_survival": 0.02}
    made = plan.make(Assumptions(gain=0.1, drop=0.01, **spread))
    sizes = [row.n_verdict for row in made.rows]
    assert sizes[0] is None and made.rows[0].seeds == 2  # two runs: no n is enough
    found = [n for n in sizes if n is not None]
    assert len(found) > 3 and found == sorted(found, reverse=True)
    apart = plan.make(Assumptions(gain=0.1, drop=0.01, **spread, own_questions=True), seeds=20).rows[0]
    assert apart.n_verdict < found[-1]


def test_what_n_can_see_is_what_it_takes_to_see_it():
    seen = plan.make(Assumptions(drop=0.0), n=2000).rows[0]
    assert plan.make(Assumptions(drop=0.0), effect=seen.least_gain).rows[0].n_effect_gain == pytest.approx(
        2000, rel=0.01
    )
    assert plan.make(Assumptions(drop=0.0), effect=seen.least_change).rows[0].n_effect_survival == pytest.approx(
        2000, rel=0.01
    )
    safe = plan.make(Assumptions(gain=0.2, drop=0.01, base_accuracy=0.5), n=2000).rows[0].largest_drop
    assert power.chance_decided(Assumptions(gain=0.2, drop=safe, base_accuracy=0.5).checked(), 2000) == pytest.approx(
        0.8, abs=0.01
    )


def test_a_loss_beyond_the_margin_plans_for_the_verdict_lost_and_one_at_it_for_none():
    assert plan.make(Assumptions(gain=0.1, drop=0.09)).verdict == "lost"
    made = plan.make(Assumptions(gain=0.1, drop=0.05))
    assert "so no n decides" in table.as_markdown(plan.make(Assumptions(gain=0.1, drop=0.05), n=500))
    assert made.verdict is None and made.rows[0].n_verdict is None and "no n decides" in table.as_markdown(made)


def test_a_pilot_gives_back_what_made_it():
    assumed = Assumptions(base_accuracy=0.6, gain=0.1, drop=0.02, correlation=0.3, scheme_correlation=0.6).checked()
    counts = np.round(patterns(assumed) * 200_000).astype(int)
    cells = np.repeat(PATTERNS, counts, axis=0).T
    found = plan.of_pilot(*cells)
    assert found == pytest.approx(
        {"base_accuracy": 0.6, "gain": 0.1, "drop": 0.02, "correlation": 0.3, "scheme_correlation": 0.6}, abs=1e-3
    )


def test_a_pilot_with_a_cell_all_right_is_refused_in_a_sentence():
    base, all_right = np.arange(30) % 2, np.ones(30)
    found = plan.of_pilot(base, all_right, base, np.arange(30) % 3 > 0)
    with pytest.raises(BadInput, match=r"The trained cell would have the accuracy 1\.000"):
        plan.make(Assumptions(**found))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--correlation", "0.95"], "'correlation' is 0.95"),
        (["--correlation", "-0.1"], "'correlation' is -0.1"),
        (["--scheme-correlation", "1"], "'scheme-correlation'"),
        (["--base-accuracy", "1.2"], "'base-accuracy'"),
        (["--base-accuracy", "nan"], "'base-accuracy'"),
        (["--gain", "0"], "'gain'"),
        (["--gain", "0.3"], "The trained cell would have the accuracy 0.980"),
        (["--drop", "0.8"], "The trained and quantized cell"),
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
    assert written["n"] == 1000 and written["rows"][0]["power_gain"] == pytest.approx(0.78, abs=0.01)
    assert written["assumed"]["gain"] == 0.05


@pytest.mark.parametrize(
    "words", [[], ["--effect", "0.03"], ["--n", "500", "--gain", "0.2"], ["--gain", "0.1", "--between-seed-sd", "0.01"]]
)
def test_every_way_to_ask_is_answered_in_a_sentence(words):
    done = CliRunner().invoke(cli.cli, ["plan", *words])
    assert done.exit_code == 0 and "training run" in done.output and "Assumed: base 0.680" in done.output


def test_an_effect_that_no_n_shows_is_told_as_it_was_asked_for():
    done = CliRunner().invoke(cli.cli, ["plan", "--effect", "1e-9"])
    assert "no n shows a gain of 1e-09, no n shows a change of the gain by 1e-09, each" in done.output
    assert "0.000" not in done.output and "n = none" not in done.output


def test_a_plan_from_a_pilot_takes_its_numbers_and_says_how_sure_they_are(tmp_path):
    import pandas as pd

    rng = np.random.default_rng(0)
    cells = np.repeat(PATTERNS, rng.multinomial(800, patterns(Assumptions(gain=0.1, drop=0.01).checked())), axis=0).T
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
