"""What answers are like beside right and wrong: measures against full precision, changed answers, hostile texts."""

import json

import numpy as np
import pandas as pd
import pytest
import scipy.stats

from qrl import compare, figures
from qrl.compare import answers
from qrl.errors import BadInput
from qrl.steps import compare as steps

CELLS = [(variant, scheme) for variant in ("base", "grpo") for scheme in ("full", "awq")]
GRPO_AWQ, GRPO = ("grpo", "awq"), ("grpo", "full")


def rows(n=300, seed=0, **columns):
    """Return a row per cell and question; awq answers are longer by up to 3 tokens, and some of its verdicts change."""
    rng, frames = np.random.default_rng(seed), []
    right, length = rng.random(n) < 0.7, rng.integers(20, 40, n)
    for variant, scheme in CELLS:
        quantized = scheme != "full"
        correct = right ^ (rng.random(n) < 0.1 * quantized)
        frame = pd.DataFrame({"variant": variant, "scheme": scheme, "question": [f"q{i}" for i in range(n)]})
        frame = frame.assign(correct=correct.astype(int), n_tokens=length + quantized * rng.integers(0, 4, n))
        frame["finish_reason"] = np.where(rng.random(n) < 0.05 + 0.1 * quantized, "length", "stop")
        frame["reached"] = (~correct & (rng.random(n) < 0.3)).astype(int)
        frame["reference_logprob"] = -rng.random(n) - 0.1 * quantized
        frames.append(frame)
    return pd.concat(frames, ignore_index=True).assign(**columns)


@pytest.fixture(scope="module")
def frame():
    return rows()


@pytest.fixture(scope="module")
def comparison(frame):
    return compare.from_questions(frame)


@pytest.mark.parametrize(("name", "column"), [("tokens", "n_tokens"), ("reference_logprob", "reference_logprob")])
def test_a_measure_is_paired_with_full_precision_in_its_own_unit(frame, comparison, name, column):
    wide = frame.pivot(index="question", columns=["variant", "scheme"], values=column).astype(float)
    found = comparison.answers[GRPO_AWQ]
    assert found.means[name].estimate == pytest.approx(wide[GRPO_AWQ].mean())
    expected = scipy.stats.ttest_rel(wide[GRPO_AWQ], wide[GRPO])
    interval, change = expected.confidence_interval(), found.changes[name]
    assert change.estimate == pytest.approx((wide[GRPO_AWQ] - wide[GRPO]).mean())
    assert change.low == pytest.approx(interval.low, abs=0.02) and change.high == pytest.approx(interval.high, abs=0.02)
    assert comparison.answers[GRPO].changes == {}


def test_shares_and_perplexity_are_those_of_the_rows(frame, comparison):
    own = frame[(frame["variant"] == "grpo") & (frame["scheme"] == "awq")]
    found = comparison.answers[GRPO_AWQ]
    assert found.means["unfinished"].estimate == pytest.approx((own["finish_reason"] == "length").mean())
    assert found.means["reached"].estimate == pytest.approx(own["reached"].mean())
    assert 0 < found.means["reached"].low < found.means["reached"].high < 1
    assert found.perplexity == pytest.approx(np.exp(-own["reference_logprob"].mean()))


def test_changed_answers_are_counted_both_ways(frame, comparison):
    wide = frame.pivot(index="question", columns=["variant", "scheme"], values="correct")
    worse = ((wide[GRPO] == 1) & (wide[GRPO_AWQ] == 0)).sum()
    better = ((wide[GRPO] == 0) & (wide[GRPO_AWQ] == 1)).sum()
    found = comparison.answers[GRPO_AWQ]
    assert (found.right_to_wrong, found.wrong_to_right) == (worse, better)
    assert found.mcnemar == pytest.approx(scipy.stats.binomtest(min(worse, better), worse + better).pvalue)
    own = comparison.changed[comparison.changed["variant"] == "grpo"]
    assert len(own) == worse + better and (own["correct"] != own["correct_full"]).all()
    assert (comparison.answers[GRPO].right_to_wrong, comparison.answers[GRPO].mcnemar) == (None, None)


def test_one_sample_a_question_is_paired_like_an_answer_without_a_number(frame, comparison):
    found = compare.from_questions(frame.assign(sample=0)).answers[GRPO_AWQ]
    expected = comparison.answers[GRPO_AWQ]
    assert expected.right_to_wrong > 0 and expected.wrong_to_right > 0
    assert (found.right_to_wrong, found.wrong_to_right, found.mcnemar) == (
        expected.right_to_wrong,
        expected.wrong_to_right,
        expected.mcnemar,
    )


def test_values_of_a_users_columns_may_be_lists(frame, tmp_path):
    messages = [[{"role": "user"}, {"role": "assistant", "content": "5"}]] * len(frame)
    listed = frame.assign(completion=messages, parsed=[[1, 2]] * len(frame))
    shown = answers.sample_texts(compare.from_questions(listed).changed)
    assert "assistant" in shown["completion"][0]


def test_a_measure_known_in_too_few_clusters_is_left_out(frame):
    number = frame["question"].str[1:].astype(int)
    partly = frame.assign(cluster=number % 2, n_tokens=frame["n_tokens"].where(number % 2 == 0))
    found = compare.from_questions(partly).answers[GRPO_AWQ]
    assert "tokens" not in found.means and "unfinished" in found.means


def test_table_json_metrics_and_the_table_hold_them(comparison):
    entry = json.loads(json.dumps(comparison.table_json(), allow_nan=False))["awq"]["answers"]["grpo"]
    change = comparison.answers[GRPO_AWQ].changes["tokens"]
    assert entry["tokens"]["n"] == 300 and entry["tokens"]["change"]["low"] == change.low
    assert entry["reference_perplexity"] > 1 and entry["right_to_wrong"] > 0
    metrics = comparison.metrics()
    assert metrics["compare/tokens_change_awq_high"] == change.high
    assert metrics["compare/right_to_wrong_awq_base"] == comparison.answers["base", "awq"].right_to_wrong
    table = comparison.markdown().split("## Answers")[1].split("##")[0]
    assert "tokens an answer" in table and table.count("| grpo · ") == 2 and "perplexity of references" in table


def test_rows_of_an_older_store_compare_with_what_they_have(frame):
    old = frame[["variant", "scheme", "question", "correct"]]
    found = compare.from_questions(old)
    assert found.answers[GRPO_AWQ].means == {} and found.answers[GRPO_AWQ].right_to_wrong > 0
    assert (
        found.table_json()["awq"]["gain_survival"] == compare.from_questions(frame).table_json()["awq"]["gain_survival"]
    )
    partly = frame.assign(reached=frame["reached"].where(frame["scheme"] == "full"))
    measures = compare.from_questions(partly).answers[GRPO_AWQ].means
    assert "reached" not in measures and "tokens" in measures
    assert compare.from_counts({"n": 9, "base": {"full": 5}, "grpo": {"full": 6}}).answers == {}


def test_questions_without_a_value_are_left_out_of_that_measure_alone(frame):
    some = frame.assign(reference_logprob=frame["reference_logprob"].where(frame["question"] != "q0"))
    measures = compare.from_questions(some).answers[GRPO_AWQ].means
    assert (measures["reference_logprob"].n, measures["tokens"].n) == (299, 300)


def test_a_column_of_words_is_refused_in_a_sentence(frame):
    with pytest.raises(BadInput, match="'n_tokens' holds 'many', but must hold numbers"):
        compare.from_questions(frame.assign(n_tokens="many")).markdown()


def test_the_base_counts_once_under_several_seeds_and_samples_are_not_paired(frame):
    trained = frame[frame["variant"] == "grpo"]
    base = frame[frame["variant"] == "base"].assign(seed=0)
    both = pd.concat([base, base.assign(seed=1), trained.assign(seed=0), trained.assign(seed=1)], ignore_index=True)
    once, twice = compare.from_questions(frame), compare.from_questions(both)
    assert twice.answers["base", "awq"].right_to_wrong == once.answers["base", "awq"].right_to_wrong
    assert twice.answers[GRPO_AWQ].right_to_wrong == 2 * once.answers[GRPO_AWQ].right_to_wrong
    assert twice.answers[GRPO_AWQ].mcnemar is None and twice.answers[GRPO_AWQ].changes["tokens"].low > 0
    sampled = pd.concat([frame.assign(sample=0), frame.assign(sample=1)], ignore_index=True)
    assert compare.from_questions(sampled).answers[GRPO_AWQ].right_to_wrong is None


HOSTILE = "</pre></details><script>alert(1)</script>\u202e\x00\x1b[31m {{ 7*7 }}" + "x" * 5000 + "THE END"


@pytest.mark.process
def test_changed_answers_are_shown_bounded_and_harmless(tmp_path):
    texts = {"completion": HOSTILE, "parsed": None, "answer": "<b>5</b>", "question_text": "Why? <img src=x onerror=y>"}
    found = compare.from_questions(rows(**texts))
    shown = answers.sample_texts(found.changed)
    assert set(shown.groupby(["variant", "scheme", "change"]).size()) <= set(range(1, answers.SHOWN + 1))
    text = shown["completion"].iloc[0]
    assert len(text) < answers.LONGEST + 100 and text.endswith("THE END") and "left out" in text
    assert not set("\x00\x1b\u202e") & set("".join(shown.map(str).to_numpy().ravel()))
    steps.write(found, tmp_path)
    table = pd.DataFrame(**json.loads((tmp_path / "changed_answers.json").read_text()))
    pd.testing.assert_frame_equal(table, shown, check_dtype=False)
    figures.report(figures.Study(found.table_json(), changed=table), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "<script>alert" not in page and "&lt;script&gt;alert(1)" in page and "<img src=x" not in page
    assert "{{ 7*7 }}" in page and "<b>5</b>" not in page and 'class="answer"' in page
    assert ">Answers</h2>" in page and ">Changed answers</h2>" in page


def test_a_runs_changed_answers_are_a_table_of_mlflows(store, tmp_path):
    import mlflow

    from qrl import names, recipe
    from qrl.tracking import contents, reuse, runs

    frame, run_ids = rows(completion=HOSTILE, parsed="5", answer="5"), []
    for (_variant, _scheme), part in frame.groupby(["variant", "scheme"], sort=False):
        with runs.step("evaluate") as run:
            part.to_parquet(tmp_path / names.QUESTIONS)
            mlflow.log_artifact(str(tmp_path / names.QUESTIONS))
            reuse.record_outputs(artifacts=[names.QUESTIONS])
        run_ids.append(run.info.run_id)
    steps.compare(recipe.load("tiny"), run_ids)
    (run,) = mlflow.search_runs(filter_string="tags.`qrl.step` = 'compare'", output_format="list")
    tables = json.loads(run.data.tags["mlflow.loggedArtifacts"])
    assert {"path": names.CHANGED_JSON, "type": "table"} in tables
    shown = json.loads(contents.artifact(run.info.run_id, names.CHANGED_JSON).read_text())
    assert len(shown["data"]) == len(answers.sample_texts(compare.from_questions(frame).changed))
    assert run.data.metrics["compare/wrong_to_right_awq"] > 0
