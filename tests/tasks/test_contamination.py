"""Contamination: counts by definition, the counts of real GSM8K, and a run that fails before it trains."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qrl import recipe
from qrl.errors import BadInput
from qrl.tasks import contamination, load
from qrl.tasks.contamination import overlap
from qrl.tasks.question import Question
from qrl.tiny import corpus
from qrl.tracking import keys

LONG = "Tom has 3 red apples and 4 green ones and gives 2 of them to Ann, how many are left?"


def questions(*texts: str, split: str = "heldout") -> list[Question]:
    return [Question(f"{split}-{i}", text, "#### 1", "1") for i, text in enumerate(texts)]


@pytest.mark.process
@given(
    st.lists(st.lists(st.sampled_from("ab"), max_size=16), max_size=4),
    st.lists(st.lists(st.sampled_from("ab"), max_size=16), min_size=1, max_size=4),
)
def test_counts_agree_with_the_definition_by_another_route(trained, heldout):
    trained, heldout = [" ".join(words) for words in trained], [" ".join(words) for words in heldout]
    counts = overlap(questions(*trained), questions(*heldout))
    assert counts.exact == sum(text in trained for text in heldout)
    windows = [[text[i : i + 25] for i in range(0, len(text) - 24, 2)] for text in heldout]  # 13 letters, 12 spaces
    assert counts.shared == sum(any(window in text for window in mine for text in trained) for mine in windows)


def test_exact_ignores_case_and_white_space_but_not_signs():
    assert overlap(questions("What is  1+1?"), questions("what is 1 + 1?\n")).exact == 1
    assert overlap(questions("What is x - 1?"), questions("What is x + 1?")).exact == 0


def test_thirteen_words_count_and_twelve_do_not_regardless_of_case_and_punctuation():
    words = LONG.split()
    assert overlap(questions(LONG), questions("So: " + " ".join(words[:13]).upper() + "!")).shared == 1
    assert overlap(questions(LONG), questions("So: " + " ".join(words[:12]) + " pears")).shared == 0


def test_a_question_from_the_training_set_is_rejected_by_name():
    counts = overlap(questions("1?", LONG, split="train"), questions("2?", LONG, LONG))
    assert (counts.exact, counts.shared, counts.heldout, counts.training) == (2, 2, 3, 2)
    with pytest.raises(
        BadInput, match=r"2 of 3 held-out questions are among .* word for word: the first is heldout-1 .* is train-1"
    ):
        contamination.check_overlap(counts, "arithmetic", 1.0)


def test_the_share_has_a_limit_by_task_or_by_recipe():
    counts = overlap(questions(LONG, split="train"), questions(LONG + " And then?", *map(str, range(99))))
    assert counts.share == 0.01 and counts.pairs[0]["words"] == "tom has 3 red apples and 4 green ones and gives 2 of"
    contamination.check_overlap(counts, "gsm8k")
    contamination.check_overlap(counts, "arithmetic")
    for task in ("gsm8k", "arithmetic"):
        with pytest.raises(
            BadInput,
            match=r"1 of 100 .*0\.0100.* train\.max_ngram_share = 0\.009 .* heldout-0 and train-0 share 'tom has",
        ):
            contamination.check_overlap(counts, task, 0.009)


@pytest.mark.process
def test_real_gsm8k_shares_three_questions_and_none_whole():
    if "QRL_DATA_DIR" not in os.environ:
        pytest.skip("QRL_DATA_DIR names no folder with gsm8k/train.jsonl and gsm8k/test.jsonl")
    folder = str(Path(os.environ["QRL_DATA_DIR"], "gsm8k"))
    counts = overlap(load("gsm8k", "train", data=folder), load("gsm8k", "heldout", data=folder))
    assert (counts.training, counts.heldout, counts.exact, counts.shared) == (7473, 1319, 0, 3)
    contamination.check_overlap(counts, "gsm8k")


@pytest.mark.process
def test_generated_heldout_questions_are_in_neither_the_training_set_nor_the_corpus_of_qrl_tiny():
    heldout = load("arithmetic", "heldout", 1000, 0)
    for trained in (load("arithmetic", "train", 4096, 0), corpus.sample_questions(4096)):
        counts = overlap(trained, heldout)
        assert counts.exact == 0 < counts.shared < counts.heldout  # sentences are shared, questions are not
    assert overlap(heldout, heldout).exact == 1000


def test_the_sample_of_qrl_tinys_corpus_is_the_text_it_was_trained_on():
    assert [question.question for question in corpus.sample_questions(50)] == [
        question.question for question in corpus.Corpus().questions(60, 0)
    ][:50]
    assert len({question.id for question in corpus.sample_questions(50)}) == 50


def test_a_comparison_imports_nothing_heavy():
    code = "import sys; import qrl.tasks.contamination, qrl.tiny.corpus; "
    code += "print({'torch', 'numpy', 'mlflow'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=keys.ROOT)
    assert done.stdout.strip() == "set()"


def test_training_is_checked_against_the_same_questions_whatever_the_sample_size(tmp_path):
    from qrl.tasks import question_sets

    rows = [json.dumps({"question": f"{i}?", "answer": f"#### {i}"}) for i in range(9)]
    (tmp_path / "test.jsonl").write_text("\n".join(rows))
    chosen = [recipe.load("tiny", {"task": "gsm8k", "data": str(tmp_path), "evaluate.n": n}) for n in ("2", "5")]
    assert [len(question_sets.load_all_heldout(settings)) for settings in chosen] == [9, 9]
    assert len({keys.trained(settings, "digest", "cpu") for settings in chosen}) == 1
    assert len(question_sets.load_all_heldout(recipe.load("tiny", {"evaluate.n": "7"}))) == 7


@pytest.mark.process
@pytest.mark.parametrize(
    ("held", "limit", "reason"), [(LONG, "1", "word for word"), (LONG + " And then?", "0.1", "train.max_ngram_share")]
)
def test_a_contaminated_run_fails_before_it_trains_and_shows_the_pairs(store, tmp_path, held, limit, reason):
    import mlflow

    from qrl.steps import train

    data = tmp_path / "data"
    data.mkdir()
    for name, texts in (("train", ["1?", "2?", LONG]), ("test", ["3?", "4?", held])):
        rows = [json.dumps({"question": question, "answer": "#### 1"}) for question in texts]
        (data / f"{name}.jsonl").write_text("\n".join(rows))
    settings = {
        "data": str(data),
        "train.prompts_per_step": "2",
        "train.max_ngram_share": limit,
        "evaluate.n": "2",
        "device": "cpu",
    }
    with pytest.raises(BadInput, match=reason):
        train.train(recipe.load("tiny", settings))
    (run,) = mlflow.search_runs(output_format="list")
    assert run.info.status == "FAILED" and reason in run.data.tags["qrl.reason"]
    assert run.data.metrics["contamination/exact"] == (held == LONG) and run.data.metrics["contamination/ngram13"] == 1
    assert run.data.metrics["contamination/ngram13_share"] == pytest.approx(1 / 3)
    assert (
        run.data.metrics["contamination/base_exact"] == 0
        and run.data.metrics["contamination/base_train_n"] == corpus.CHUNK
    )
    table = json.loads(mlflow.artifacts.load_text(f"{run.info.artifact_uri}/contamination.json"))
    assert LONG in table["data"][0]
    assert "train/reward" not in run.data.metrics


def test_a_clean_run_logs_its_figures(store):
    import mlflow

    from qrl import tiny
    from qrl.steps import train
    from qrl.tasks import question_sets
    from qrl.tracking import runs

    settings = recipe.load("tiny", {"evaluate.n": "200"})
    with runs.step("train", settings) as run:
        train._check_contamination(
            settings, tiny.PATH, question_sets.load(settings, "train", 4096), question_sets.load_all_heldout(settings)
        )
    metrics = mlflow.get_run(run.info.run_id).data.metrics
    assert metrics["contamination/exact"] == metrics["contamination/base_exact"] == 0
    assert (metrics["contamination/train_n"], metrics["contamination/heldout_n"]) == (4096, 200)
    assert 0 < metrics["contamination/ngram13_share"] < metrics["contamination/base_ngram13_share"] < 1
