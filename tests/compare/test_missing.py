"""Answers that a cell lacks: refused, with the way out; or counted as wrong and told."""

import json

import numpy as np
import pandas as pd
import pytest

from qrl import cli, compare
from qrl.compare import ranking
from qrl.compare.missing import MISSING_ANSWERS, fill
from qrl.errors import BadInput

CELLS = [("base", "full"), ("grpo", "full"), ("base", "nf4"), ("grpo", "nf4")]


def answers(n=200, **columns) -> pd.DataFrame:
    draw = np.random.default_rng(0)
    rates = (0.4, 0.8, 0.4, 0.7)
    cells = zip(CELLS, rates, strict=True)
    parts = [
        pd.DataFrame({"variant": v, "scheme": s, "question": np.arange(n), "correct": draw.random(n) < rate} | columns)
        for (v, s), rate in cells
    ]
    return pd.concat(parts, ignore_index=True)


def is_lacking(frame: pd.DataFrame, below: int = 12) -> pd.Series:
    return (frame["variant"] == "grpo") & (frame["scheme"] == "nf4") & (frame["question"] < below)


def wrong(frame: pd.DataFrame, below: int = 12) -> pd.DataFrame:
    """Return the table with wrong answers where `is_lacking`."""
    return frame.assign(correct=frame["correct"] & ~is_lacking(frame, below))


def test_a_cell_that_lacks_answers_is_refused_with_the_way_out():
    frame = answers()
    for lacking in (frame[~is_lacking(frame)], frame.assign(correct=frame["correct"].where(~is_lacking(frame)))):
        with pytest.raises(BadInput, match="--missing wrong"):
            compare.from_questions(lacking)
    with pytest.raises(BadInput, match="missing is 'right'"):
        compare.from_questions(frame, missing="right")
    with pytest.raises(BadInput, match="no effect on counts"):
        compare.compare({"n": 100, "base": {"full": 68}, "grpo": {"full": 72}}, missing="wrong")


@pytest.mark.parametrize("kind", ["row", "value", "text"])
def test_missing_answers_count_as_wrong_and_are_told(kind, tmp_path):
    frame = answers()
    lacking = frame[~is_lacking(frame)]
    if kind == "value":
        lacking = frame.assign(correct=frame["correct"].astype(object).where(~is_lacking(frame)))
    if kind == "text":  # an empty field of a CSV file
        frame.assign(correct=frame["correct"].astype(int).astype(str).where(~is_lacking(frame), "")).to_csv(
            tmp_path / "a.csv", index=False
        )
        lacking = str(tmp_path / "a.csv")
    found = compare.compare(lacking, missing="wrong")
    expected = compare.from_questions(wrong(frame))
    assert found.row("nf4").gain_survival == expected.row("nf4").gain_survival and found.cells == expected.cells
    assert found.answered.missing_answers == {("grpo", "nf4"): 12}
    assert "grpo · nf4 lacked 12 answer(s) to the 200 questions; they count as wrong" in found.markdown()
    assert found.table_json()["nf4"]["cells"]["grpo"]["missing"] == 12
    assert "missing" not in found.table_json()["nf4"]["cells"]["base"]


def test_a_table_that_lacks_nothing_is_as_without_the_option():
    assert (
        compare.from_questions(answers(), missing="wrong").table_json()
        == compare.from_questions(answers()).table_json()
    )


def test_groups_engine_and_lengths_stay_right():
    more = {"engine": "vllm 0.31.0", "settings_digest": "a", "dtype": "bf16", "n_tokens": 5}
    frame = answers(**more)
    frame = frame.assign(cluster=frame["question"] % 40, subject=(frame["question"] % 2).map({0: "even", 1: "odd"}))
    found = compare.from_questions(frame[~is_lacking(frame)], missing="wrong")
    expected = compare.from_questions(wrong(frame))
    assert found.row("nf4").gain_survival == expected.row("nf4").gain_survival
    assert found.engine == "vllm 0.31.0" and found.full == expected.full and found.evidence.clusters == 40
    assert found.answered.frame["subject"].notna().all()
    assert found.answers["grpo", "nf4"].means["tokens"].n == 188  # no length is made up


@pytest.mark.process
def test_seeds_and_samples_are_filled_apart():
    seeds = pd.concat(
        [answers().assign(seed=k, correct=answers()["correct"] ^ (answers()["question"] % 9 == k)) for k in range(3)]
    )
    seeds = seeds[(seeds["variant"] != "base") | (seeds["seed"] == 0)].reset_index(drop=True)  # one base for all
    short = seeds[~(is_lacking(seeds) & (seeds["seed"] == 1))]
    found = compare.from_questions(short, missing="wrong")
    expected = compare.from_questions(
        seeds.assign(correct=seeds["correct"] & ~(is_lacking(seeds) & (seeds["seed"] == 1)))
    )
    assert found.row("nf4").gain_survival == expected.row("nf4").gain_survival
    assert found.answered.missing_answers == {("grpo", "nf4"): 12}
    base = (seeds["variant"] == "base") & (seeds["scheme"] == "nf4") & (seeds["question"] < 7)
    found = compare.from_questions(seeds[~base], missing="wrong")  # serves three runs, and lacks seven answers
    expected = compare.from_questions(seeds.assign(correct=seeds["correct"] & ~base))
    assert found.row("nf4").gain_survival == expected.row("nf4").gain_survival
    assert found.answered.missing_answers == {("base", "nf4"): 7} and not found.evidence.differing
    samples = pd.concat([answers().assign(sample=k) for k in range(4)], ignore_index=True)
    short = samples[~(is_lacking(samples) & (samples["sample"] > 1))]
    found = compare.from_questions(short, missing="wrong")
    expected = compare.from_questions(
        samples.assign(correct=samples["correct"] & ~(is_lacking(samples) & (samples["sample"] > 1)))
    )
    assert found.cells == expected.cells and found.pass_at == expected.pass_at
    assert found.answered.missing_answers == {("grpo", "nf4"): 24}


def test_the_command_and_the_ranking_say_how_many(tmp_path, capsys):
    frame = answers().assign(completion="so")
    frame.to_parquet(tmp_path / "all.parquet")
    frame[~is_lacking(frame)].to_parquet(tmp_path / "few.parquet")  # long texts stay in the file
    options = ["--missing", "wrong", "--out", str(tmp_path / "out")]
    cli.cli.main(["compare", "--questions", str(tmp_path / "few.parquet"), *options], standalone_mode=False)
    assert "lacked 12 answer(s)" in capsys.readouterr().out
    changed = json.loads((tmp_path / "out" / "changed_answers.json").read_text())
    assert "completion" in changed["columns"]
    assert "lacked 12 answer(s)" in ranking.markdown(ranking.measure(fill(frame[~is_lacking(frame)], "wrong")))
    counts = ["compare", "--counts", "c.json", *options]
    with pytest.raises(BadInput, match="--missing is about files of --questions or --logs"):
        cli.cli.main(counts, standalone_mode=False)


@pytest.mark.parametrize("change", [{"columns": ["question"]}, {"index": range(800)}])
def test_a_table_that_cannot_be_read_is_refused_as_before(change):
    with pytest.raises(BadInput, match=r"lacks|empty"):
        compare.from_questions(answers().drop(**change), missing="wrong")


def test_a_question_that_the_base_was_never_asked_has_as_many_wrong_samples_as_others():
    frame = pd.concat([answers()] * 2, ignore_index=True)
    frame["seed"] = np.where(frame["variant"] == "base", "0", "1")
    of_base = (frame["variant"] == "base") & (frame["scheme"] == "full")
    filled = fill(frame[~(of_base & (frame["question"] < 3))], "wrong")
    assert filled.attrs[MISSING_ANSWERS] == {("base", "full"): 3 * 2}
