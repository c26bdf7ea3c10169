"""Several training runs and several samples per question, from the table of outcomes to the verdict."""

import json

import numpy as np
import pandas as pd
import pytest
import scipy.stats

from qrl import compare, figures
from qrl.compare import seeds
from qrl.errors import BadInput
from qrl.steps import compare as steps

RATES = {("base", "full"): 0.65, ("base", "nf4"): 0.63, ("grpo", "full"): 0.80, ("grpo", "nf4"): 0.78}


def study(seeds=3, n=400, *, nested=False, samples=1, spread=0.0, random=0):
    """Every cell under every seed; on the same questions the base answers alike under each of them."""
    rng = np.random.default_rng(random)
    difficulty, base, rows = rng.normal(size=n), {}, []
    for seed in range(seeds):
        if nested and seed:
            difficulty, base = rng.normal(size=n), {}
        for (variant, scheme), rate in RATES.items():
            shift = spread * rng.normal() if variant != "base" else 0
            for sample in range(samples):
                correct = (0.8 * difficulty + 0.6 * rng.normal(size=n) < scipy.stats.norm.ppf(rate) + shift).astype(int)
                if variant == "base":
                    correct = base.setdefault((scheme, sample), correct)
                names = [f"q{i}-{seed if nested else 0}" for i in range(n)]
                rows.append(
                    pd.DataFrame(
                        {
                            "variant": variant,
                            "scheme": scheme,
                            "question": names,
                            "correct": correct,
                            "seed": seed,
                            "sample": sample,
                        }
                    )
                )
    frame = pd.concat(rows, ignore_index=True)
    return frame if samples > 1 else frame.drop(columns="sample")


@pytest.fixture(scope="module", params=[False, True], ids=["crossed", "nested"])
def frame(request):
    return study(nested=request.param, spread=0.1)


@pytest.mark.process
def test_the_mean_over_seeds_is_that_of_each_seed_alone(frame):
    found = compare.from_questions(frame).table_json()
    for scheme in ("full", "nf4"):
        entry = found[scheme]
        assert entry["seeds"] == 3 and set(entry["per_seed"]) == {"0", "1", "2"} and entry["mcnemar"] is None
        for name in ("delta",) if scheme == "full" else ("delta", "gain_survival"):
            assert set(entry[name]) == {"estimate", "stderr", "low", "high"}
            alone = [
                compare.from_questions(frame[frame["seed"] == seed]).table_json()[scheme][name] for seed in range(3)
            ]
            for seed, value in enumerate(alone):
                assert {key: entry["per_seed"][str(seed)][name][key] for key in value} == pytest.approx(value, rel=1e-9)
            means = [value["estimate"] for value in alone]
            assert entry[name]["estimate"] == pytest.approx(np.mean(means), rel=1e-9)
            within = np.sqrt(np.mean([value["stderr"] ** 2 for value in alone]))
            assert entry["within_seed_sd"][name] == pytest.approx(within, rel=1e-9)
            assert entry["between_seed_sd"][name] >= 0
            if frame["question"].nunique() > 400:  # questions of their own: the t interval of three numbers
                interval = scipy.stats.ttest_1samp(means, 0).confidence_interval()
                if entry["between_seed_sd"][name] > 0:
                    assert (entry[name]["low"], entry[name]["high"]) == pytest.approx(
                        (interval.low, interval.high), rel=1e-9
                    )
    json.dumps(found, allow_nan=False)


def test_seeds_are_never_pooled_as_if_they_were_questions(frame):
    """The naive interval of all rows as questions of one run is narrower than what three runs can say."""
    found = compare.from_questions(frame)
    naive = frame.assign(question=frame["question"] + "-" + frame["seed"].astype(str)).drop(columns="seed")
    pooled = compare.from_questions(naive)
    assert found.row("nf4").delta.high - found.row("nf4").delta.low > 1.3 * (
        pooled.row("nf4").delta.high - pooled.row("nf4").delta.low
    )
    assert found.cells["base", "nf4"].stderr == pytest.approx(
        compare.from_questions(frame[frame["seed"] == 0]).cells["base", "nf4"].stderr
        / np.sqrt(1 if frame["question"].nunique() == 400 else 3),
        rel=0.05,
    )


def test_the_table_shows_each_seed_both_spreads_and_the_counts(frame):
    found = compare.from_questions(frame)
    text = found.markdown()
    assert "## Seed by seed: grpo" in text and text.count("| nf4 | ") >= 5
    assert "between-seed sd" in text and "random effect" in text and "2 degrees of freedom" in text
    assert ("All 3 seeds answered the same questions" in text) == (frame["question"].nunique() == 400)
    assert "3 seeds)" in text and f"n = {found.n}, 3 seeds" in found.sentence()
    assert "compare/gain_survival_nf4_between_seed_sd" in found.metrics()


def test_one_seed_says_that_the_spread_between_seeds_is_unknown():
    found = compare.from_questions(study(seeds=1))
    assert "no interval includes the variation between training seeds" in found.markdown()
    entry = found.table_json()["nf4"]
    assert (entry["seeds"], entry["between_seed_sd"], entry["per_seed"]) == (1, None, {})
    assert compare.from_questions(study(seeds=1).drop(columns="seed")).table_json() == found.table_json()


@pytest.mark.parametrize("base", ["once", "unnamed", "of another seed"])
def test_the_base_is_one_model_however_often_it_was_asked(base):
    frame = study()
    whole = compare.from_questions(frame).table_json()
    is_base = frame["variant"] == "base"
    once = frame[~is_base | (frame["seed"] == 0)]
    named = {
        "once": lambda f: f,
        "unnamed": lambda f: f.assign(seed=f["seed"].where(f["variant"] != "base")),
        "of another seed": lambda f: f.assign(seed=f["seed"].where(f["variant"] != "base", 77)),
    }
    assert compare.from_questions(named[base](once)).table_json() == whole


def test_a_base_that_answers_otherwise_under_another_seed_is_said_to():
    frame = study()
    assert "differently under another seed" not in compare.from_questions(frame).markdown()
    is_one = (
        (frame["variant"] == "base")
        & (frame["scheme"] == "nf4")
        & (frame["seed"] == 1)
        & frame["question"].isin(["q3-0", "q7-0"])
    )
    odd = frame.assign(correct=frame["correct"].where(~is_one, 1 - frame["correct"]))
    assert (
        "base · nf4 answers 2 question(s) differently under another seed; its answers are averaged"
        in compare.from_questions(odd).markdown()
    )
    kept = odd[(odd["variant"] == "base") | (odd["seed"] == 0)]
    assert (
        "its answers are taken from the first seed"
        in compare.from_questions(kept[kept["seed"].isin([0, 1])]).markdown()
    )


def test_models_of_several_training_seeds_asked_under_one_question_seed_are_a_random_effect():
    """As `evaluate --seed 7` writes them: `seed` is the training's, `question_seed` is 7, and so is the base's seed."""
    frame = study()
    whole = compare.from_questions(frame).table_json()
    asked = frame[(frame["variant"] != "base") | (frame["seed"] == 0)].assign(question_seed=7)
    asked["seed"] = asked["seed"].where(asked["variant"] != "base", 7)
    assert compare.from_questions(asked).table_json() == whole


def test_a_base_that_was_not_asked_a_seeds_questions_is_refused():
    frame = study(nested=True)
    with pytest.raises(BadInput, match=r"lacks 400 of 400 questions under seed 1, 'q0-1' first"):
        compare.from_questions(frame[(frame["variant"] != "base") | (frame["seed"] == 0)])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda f: f[(f["scheme"] != "nf4") | (f["variant"] == "base") | (f["seed"] != 2)],
            "Cell grpo · nf4 lacks seed '2' of '0', '1', '2'",
        ),
        (
            lambda f: f.assign(seed=f["seed"].where((f["variant"] == "base") | (f["seed"] != 2))),
            "without a seed beside others with one",
        ),
        (
            lambda f: f[(f["seed"] != 1) | (f["variant"] == "base") | (f["question"] != "q7-0")],
            "lacks 1 of 400 questions under seed 1, 'q7-0'",
        ),
        (lambda f: f.assign(seed=f["seed"].map({0: "a|b", 1: "1", 2: "2"})), "no label for a seed"),
        (lambda f: f.drop(columns="seed"), "training runs in a column 'seed'"),
        (
            lambda f: f.assign(question=f["question"].where(f["seed"] != 1, "one")).drop_duplicates(
                ["variant", "scheme", "seed", "question"]
            ),
            "Seed 1 has questions of one group only",
        ),
    ],
)
def test_seeds_that_cannot_be_compared_are_refused_in_a_sentence(change, sentence):
    with pytest.raises(BadInput, match=sentence.replace("|", r"\|")) as error:
        compare.from_questions(change(study()))
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


def test_seeds_that_share_some_of_their_questions_lie_between():
    """Subsets drawn by seed from one test set, say: questions in common are counted as such."""
    frame = study(n=600, spread=0.05)
    number = frame["question"].str.extract(r"q(\d+)")[0].astype(int)
    parts = frame[(number >= 150 * frame["seed"]) & (number < 150 * frame["seed"] + 300)]
    found = compare.from_questions(parts)
    assert found.n == 600 and "share some of their questions" in found.markdown()
    shared = found.row("full").delta.runs.shared
    whole = compare.from_questions(frame).row("full").delta.runs.shared
    assert 0 < shared < 2 * whole


def test_an_open_verdict_says_what_more_seeds_would_do():
    found = compare.from_questions(study(seeds=3, n=1000, spread=0.2, random=4))
    verdict = found.row("nf4").verdict
    assert verdict.verdict == "inconclusive" and verdict.seeds_to_decide > 3
    assert f"{verdict.seeds_to_decide} seeds would decide" in found.markdown()


def test_samples_are_averaged_per_question():
    frame = study(seeds=1, samples=8)
    found = compare.from_questions(frame)
    means = frame.groupby(["variant", "scheme", "question"])["correct"].mean().unstack("question")
    values = (means.loc["grpo", "nf4"] - means.loc["base", "nf4"]) - (
        means.loc["grpo", "full"] - means.loc["base", "full"]
    )
    survival = found.row("nf4").gain_survival
    assert (survival.estimate, survival.stderr) == pytest.approx((values.mean(), values.std(ddof=1) / 20), rel=1e-9)
    by_question = compare.from_questions(
        frame.assign(cluster=frame["question"], question=frame["question"] + frame["sample"].astype(str)).drop(
            columns="sample"
        )
    )
    assert by_question.row("nf4").gain_survival.stderr == pytest.approx(
        survival.stderr, rel=1e-9
    )  # the same as clustering the samples
    assert found.cells["grpo", "nf4"].estimate == pytest.approx(means.loc["grpo", "nf4"].mean())
    assert found.row("nf4").mcnemar is None and "p of gain (t)" in found.markdown()


def test_pass_at_k_stands_in_the_table_only_where_there_are_samples():
    frame = study(seeds=1, samples=8)
    found = compare.from_questions(frame)
    cell = found.table_json()["nf4"]["cells"]["grpo"]
    assert cell["samples"] == 8 and list(cell["pass_at"]) == ["2", "4", "8"]
    some_right = (
        frame[(frame["variant"] == "grpo") & (frame["scheme"] == "nf4")].groupby("question")["correct"].max().mean()
    )
    assert cell["pass_at"]["8"]["accuracy"] == pytest.approx(some_right)
    assert cell["accuracy"] < cell["pass_at"]["2"]["accuracy"] < cell["pass_at"]["4"]["accuracy"]
    assert cell["pass_at"]["4"]["low"] < cell["pass_at"]["4"]["accuracy"] < cell["pass_at"]["4"]["high"]
    assert "| pass@1 | pass@2 | pass@4 | pass@8 |" in found.markdown()
    assert "pass@" not in compare.from_questions(study(seeds=1)).markdown()


def test_a_cell_asked_once_may_stand_beside_one_that_is_sampled():
    frame = study(seeds=2, samples=4)
    found = compare.from_questions(frame[(frame["variant"] != "base") | (frame["sample"] == 0)])
    assert "samples" not in found.table_json()["nf4"]["cells"]["base"]
    assert found.table_json()["nf4"]["cells"]["grpo"]["samples"] == 4


def test_questions_with_fewer_samples_than_others_are_refused():
    frame = study(seeds=1, samples=4)
    with pytest.raises(BadInput, match=r"answers question 'q9-0' 3 time\(s\), others 4 times"):
        compare.from_questions(
            frame[(frame["question"] != "q9-0") | (frame["sample"] > 0) | (frame["variant"] == "base")]
        )


@pytest.mark.process
def test_files_and_figures_bear_seeds_and_samples(tmp_path):
    frame = study(samples=2, spread=0.1)
    frame.to_csv(tmp_path / "q.csv", index=False)
    found = compare.from_questions(compare.read_questions(tmp_path / "q.csv"))
    assert found.table_json() == compare.from_questions(frame).table_json()
    steps.write(found, tmp_path / "out")
    figures.survival(found, tmp_path / "survival.png")
    assert (tmp_path / "out" / "figures" / "survival.png").stat().st_size > 10_000


def test_evaluations_of_several_seeds_are_compared_from_their_runs(store, tmp_path):
    """`compare --cells` over the cells of two studies, with the real MLflow."""
    import mlflow
    from click.testing import CliRunner

    from qrl import cli

    client, run_ids = mlflow.MlflowClient(), []
    frame = study(seeds=2, n=200)
    for number, (_, rows) in enumerate(frame.groupby(["variant", "scheme", "seed"])):
        run_ids.append(client.create_run("0").info.run_id)
        (tmp_path / str(number)).mkdir()
        rows.to_parquet(tmp_path / str(number) / "questions.parquet")
        client.log_artifact(run_ids[-1], str(tmp_path / str(number) / "questions.parquet"))
    done = CliRunner().invoke(cli.cli, ["compare", "--cells", ",".join(run_ids)])
    assert done.exit_code == 0, done.output
    made = next(run for run in client.search_runs(["0"]) if run.data.tags.get("qrl.step") == "compare")
    assert made.data.metrics["compare/delta_nf4"] == pytest.approx(
        compare.from_questions(frame).row("nf4").delta.estimate
    )
    assert made.data.metrics["compare/delta_nf4_between_seed_sd"] >= 0
    assert "Seed by seed" in made.data.tags["mlflow.note.content"]


@pytest.mark.parametrize("spellings", [("1", "1.0"), ("1", "01", "2")])
def test_a_seed_written_in_two_ways_is_not_pooled(spellings):
    frame = study(seeds=len(spellings), n=50, nested=True)
    frame["seed"] = frame["seed"].map(dict(enumerate(spellings)))
    with pytest.raises(BadInput, match="same number"):
        compare.from_questions(frame)


@pytest.mark.parametrize("seeds", [(1e30, 2e30), ("inf", "run b"), (0.5, 1.5)])
def test_seeds_that_are_no_whole_numbers_are_labels(seeds):
    frame = study(seeds=2, n=50, nested=True)
    frame["seed"] = frame["seed"].map(dict(enumerate(seeds)))
    assert set(compare.from_questions(frame).table_json()["full"]["per_seed"]) == set(map(str, seeds))


def test_seeds_with_equal_answers_are_named_as_one_run():
    one, other = study(seeds=1), study(seeds=1, random=7)
    copied = pd.concat([*(one.assign(seed=k) for k in (0, 1, 10)), other.assign(seed=7)], ignore_index=True)
    copied.loc[(copied["variant"] == "base") & (copied["seed"] == 1), "correct"] = 0  # only trained cells decide
    found = compare.from_questions(copied.sample(frac=1, random_state=0))
    assert seeds.repeated(found.answered) == [("0", "1", "10")]
    assert "seeds 0, 1 and 10 gave the same answers in every cell: they are one run" in found.markdown()
    for column in ("n_tokens", "completion", "parsed", "finish_reason"):  # other answers that are as often right
        assert seeds.repeated(compare.from_questions(copied.assign(**{column: copied["seed"]})).answered) == []


def test_seeds_that_differ_or_know_nothing_are_no_one_run():
    frame = study()
    assert seeds.repeated(compare.from_questions(frame).answered) == []
    changed = pd.concat([study(seeds=1).assign(seed=k) for k in (0, 1)], ignore_index=True)
    last = changed.index[(changed["variant"] == "grpo") & (changed["seed"] == 1)][-1]
    changed.loc[last, "correct"] = 1 - changed.loc[last, "correct"]
    assert seeds.repeated(compare.from_questions(changed).answered) == []
    alike = changed.assign(correct=(changed["variant"] == "base").astype(int))  # all wrong, as after a collapse
    assert seeds.repeated(compare.from_questions(alike).answered) == []


def test_a_run_without_a_base_of_its_own_is_compared_with_the_first_seeds():
    question = np.arange(40)
    right_of_base = {"0": question % 2 == 0, "1": question % 4 == 0}
    parts = [
        pd.DataFrame({"variant": "base", "scheme": "full", "question": question, "seed": seed, "correct": right})
        for seed, right in right_of_base.items()
    ]
    parts += [
        pd.DataFrame(
            {"variant": "grpo", "scheme": "full", "question": question, "seed": seed, "correct": question != 1}
        )
        for seed in ("0", "1", "2")
    ]
    gains = [39 / 40 - right_of_base[seed].mean() for seed in ("0", "1", "0")]  # the third run has the first's base
    found = compare.from_questions(pd.concat(parts, ignore_index=True))
    assert found.row("full").delta.estimate == pytest.approx(np.mean(gains))
