"""Blocks by subject and level: n, accuracies, gains with intervals; what is too small is named and has no numbers."""

import json

import numpy as np
import pandas as pd
import pytest
import scipy.stats

from qrl import compare
from qrl.compare import subgroups

RATES = {("base", "full"): 0.4, ("grpo", "full"): 0.8, ("base", "nf4"): 0.4, ("grpo", "nf4"): 0.7}


def rows(n=300) -> pd.DataFrame:
    draw = np.random.default_rng(5)
    question = np.arange(n)
    subject = np.where(question < 200, "algebra", np.where(question < 288, "geometry", "number theory"))
    parts = [
        {"variant": v, "scheme": s, "question": question, "correct": draw.random(n) < rate, "subject": subject}
        for (v, s), rate in RATES.items()
    ]
    return pd.concat(map(pd.DataFrame, parts), ignore_index=True)


def block(text: str, kind: str) -> str:
    return text.partition(f"## By {kind}")[2].partition("## ")[0]


def test_each_subject_has_its_n_accuracies_and_gain():
    frame = rows()
    found = compare.from_questions(frame)
    algebra, geometry, small = found.subgroups["subject"]
    assert (algebra.name, algebra.n, geometry.n, small.n) == ("algebra", 200, 88, 12)
    own = frame[frame["subject"] == "geometry"]
    assert geometry.gains["grpo", "nf4"] == compare.from_questions(own).row("nf4").delta
    wide = own.pivot(index="question", columns=["variant", "scheme"], values="correct").astype(float)
    interval = scipy.stats.ttest_rel(wide["grpo", "nf4"], wide["base", "nf4"]).confidence_interval()
    assert geometry.gains["grpo", "nf4"].high == pytest.approx(interval.high)
    text = block(found.markdown(), "subject")
    assert "| subject | n | scheme | base | grpo | gain: grpo − base |" in text
    assert text.count("| algebra | 200 |") == text.count("| geometry | 88 |") == 2 and "| number theory" not in text
    assert "Exploratory" in text and "fewer than 20 questions: number theory (n = 12)" in text
    for line in text.splitlines():
        if line.startswith("| geometry"):
            assert line.count("[") == 3  # no rate and no difference without its interval
    entry = json.loads(json.dumps(found.table_json()["nf4"]["subgroups"], allow_nan=False))["subject"]
    assert entry["algebra"]["n"] == 200 and set(entry["algebra"]["cells"]) == {"base", "grpo"}
    assert entry["algebra"]["delta"]["grpo"]["low"] < entry["algebra"]["delta"]["grpo"]["high"]
    assert entry["number theory"] == {"n": 12, "cells": {}, "delta": {}}


def test_a_group_of_just_enough_questions_has_numbers():
    frame = rows()
    frame.loc[frame["question"] >= 280, "subject"] = "twenty"
    (group,) = [group for group in compare.from_questions(frame).subgroups["subject"] if group.name == "twenty"]
    assert group.n == 20 and group.gains and group.accuracies


def test_levels_are_numbers_in_order_also_beside_empty_values(tmp_path):
    frame = rows().drop(columns="subject")
    frame = frame.assign(level=(frame["question"] % 11 + 1).where(frame["question"] % 50 > 0))  # floats, some empty
    frame.to_parquet(tmp_path / "rows.parquet")
    for found in (compare.from_questions(frame), compare.compare(tmp_path / "rows.parquet")):
        assert [group.name for group in found.subgroups["level"]] == [str(level) for level in range(1, 12)]
        assert sum(group.n for group in found.subgroups["level"]) == 294
        assert "## By subject" not in found.markdown() and "| 11 |" in block(found.markdown(), "level")


@pytest.mark.parametrize("change", [{"subject": None}, {"subject": "algebra"}])
def test_no_block_without_groups(change):
    found = compare.from_questions(rows().assign(**change))
    assert not found.subgroups and "## By" not in found.markdown() and "subgroups" not in found.table_json()["nf4"]
    counts = compare.from_counts({"n": 100, "base": {"full": 68}, "grpo": {"full": 72}})
    assert not counts.subgroups and "## By" not in counts.markdown()


def test_seeds_samples_and_clusters_keep_their_errors():
    frame = rows()
    seeds = pd.concat([frame.assign(seed=k, correct=frame["correct"] ^ (frame["question"] % 8 == k)) for k in range(3)])
    gain = compare.from_questions(seeds).subgroups["subject"][0].gains["grpo", "full"]
    assert gain.runs.count == 3 and gain.n == 200
    samples = pd.concat([frame.assign(sample=0), frame.assign(sample=1)])
    assert compare.from_questions(samples).subgroups["subject"][0].n == 200
    clustered = frame.assign(cluster=np.where(frame["subject"] == "geometry", -1, frame["question"] // 10))
    found = compare.from_questions(clustered)
    assert not found.subgroups["subject"][1].gains  # one cluster gives no error
    assert "all questions in one cluster: geometry (n = 88)" in found.markdown()


def test_a_kind_of_very_many_groups_shows_the_largest():
    frame = rows(2000).assign(subject=lambda table: (table["question"] // 25).map("s{}".format))
    found = compare.from_questions(frame)
    assert len(found.subgroups["subject"]) == 80
    assert "The 60 largest of 80 groups by subject are shown" in found.markdown()


def test_the_largest_groups_are_shown_if_there_are_many(monkeypatch):
    monkeypatch.setattr(subgroups, "MOST", 1)
    text = block(compare.from_questions(rows()).markdown(), "subject")
    assert "| algebra | 200 |" in text and "| geometry" not in text
    assert "The 1 largest of 2 groups by subject are shown." in text
