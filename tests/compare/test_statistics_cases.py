"""Verdicts on tables whose answer is known: made ones, and those of a real model on sums (SmolLM2-135M-Instruct, GRPO).

`tests/cases/smollm2-sums.parquet` has a row per training seed and question; bit k of `right` says whether the k-th of
`REAL` was right. The full-precision gain is 0.523 in seed 0 (n = 2,000).
"""

from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from qrl import compare
from qrl.compare import seeds

SUMS = Path(__file__).parents[1] / "cases" / "smollm2-sums.parquet"
REAL = [
    (variant, scheme) for scheme, variant in product(("full", "nf4", "awq-ct", "gptq", "gptq-int3"), ("base", "grpo"))
]
CELLS = [("base", "full"), ("grpo", "full"), ("base", "q"), ("grpo", "q")]


def nested(n: int, *right: int) -> pd.DataFrame:
    """Return a table in which the first questions are right in each cell, as many as named: one-way changes only."""
    question = np.arange(n)
    parts = [
        pd.DataFrame({"variant": variant, "scheme": scheme, "question": question, "correct": question < count})
        for (variant, scheme), count in zip(CELLS, right, strict=True)
    ]
    return pd.concat(parts, ignore_index=True)


def of_templates(templates: int = 20, each: int = 50) -> pd.DataFrame:
    """Return a table with a cluster per template; the trained model loses a share of its own in each, under q."""
    draw = np.random.default_rng(7)
    rows = []
    for template in range(templates):
        loss = draw.beta(2, 30)
        for place in range(each):
            base = draw.random() < 0.55
            trained = base or draw.random() < 0.5
            base_q = base if draw.random() < 0.97 else not base
            trained_q = trained and draw.random() > loss
            outcomes = zip(CELLS, (base, trained, base_q, trained_q), strict=True)
            rows += [(*cell, f"{template}-{place}", f"t{template}", right) for cell, right in outcomes]
    return pd.DataFrame(rows, columns=["variant", "scheme", "question", "cluster", "correct"])


def of_sums(seed: int | None = None) -> pd.DataFrame:
    """Return the real answers, under one training seed or both."""
    stored = pd.read_parquet(SUMS)
    if seed is not None:
        stored = stored[stored["seed"] == seed]
    parts = [
        pd.DataFrame(
            {
                "variant": variant,
                "scheme": scheme,
                "question": stored["question"],
                "correct": stored["right"].to_numpy() >> place & 1,
            }
            | ({"seed": stored["seed"]} if seed is None else {})
        )
        for place, (variant, scheme) in enumerate(REAL)
    ]
    return pd.concat(parts, ignore_index=True)


def verdict(found: compare.Comparison, scheme: str = "q") -> str:
    return found.row(scheme).verdict.verdict


def test_a_gain_of_which_43_percent_is_lost_is_reduced_and_more_than_half_is_kept():
    found = compare.from_questions(nested(1000, 500, 800, 500, 670))
    kept = found.row("q").gain_kept
    assert verdict(found) == "reduced"
    assert kept.estimate == pytest.approx(170 / 300) and 0.5 < kept.low < kept.estimate < kept.high < 1


def test_a_collapse_to_nothing_is_lost_all_of_it():
    found = compare.from_questions(nested(1000, 600, 800, 0, 0))
    assert verdict(found) == "lost" and "all of it" in found.sentence()


def test_a_trained_model_at_the_ceiling_that_loses_nothing_survives():
    assert verdict(compare.from_questions(nested(1000, 700, 960, 700, 960))) == "survives"


FEW = (300, 180, 240, 180, 238)  # two answers change


@pytest.mark.process
def test_two_changes_of_300_are_inconclusive_at_a_margin_of_002():
    assert verdict(compare.from_questions(nested(*FEW), margin=0.02)) == "inconclusive"


def test_the_same_run_three_times_says_no_more_than_once():
    thrice = pd.concat([nested(*FEW).assign(seed=seed) for seed in range(3)])
    assert verdict(compare.from_questions(thrice, margin=0.02)) == "inconclusive"


def test_the_same_run_three_times_is_named():
    thrice = pd.concat([nested(*FEW).assign(seed=seed) for seed in range(3)])
    found = compare.from_questions(thrice, margin=0.02)
    assert seeds.repeated(found.answered) == [("0", "1", "2")]
    assert "seeds 0, 1 and 2 gave the same answers in every cell: they are one run" in found.markdown()


def test_twenty_templates_of_fifty_questions_have_the_interval_of_a_clustered_t():
    found = compare.from_questions(of_templates())
    survival = found.row("q").gain_survival
    assert (survival.low, survival.high) == pytest.approx((-0.085, -0.021), abs=0.01)
    assert verdict(found) == "reduced"


KEPT = {"nf4": 0.62, "awq-ct": 0.70, "gptq": 1.04, "gptq-int3": 0.70}  # of the gain, in seed 0


def test_the_stored_answers_are_those_that_were_measured():
    found = compare.from_questions(of_sums(0))
    assert found.n == 2000 and found.row("full").delta.estimate == pytest.approx(0.5235)
    for scheme, kept in KEPT.items():
        assert found.row(scheme).delta.estimate / found.row("full").delta.estimate == pytest.approx(kept, abs=0.005)
    assert found.cells["grpo", "nf4"].estimate == pytest.approx(0.3705)
    assert compare.from_questions(of_sums()).runs == ("0", "1")


@pytest.mark.parametrize(
    ("scheme", "expected"), [("nf4", "reduced"), ("awq-ct", "reduced"), ("gptq", "survives"), ("gptq-int3", "reduced")]
)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_real_models_gain_under_four_schemes(scheme, expected, seed):
    found = compare.from_questions(of_sums(seed))
    kept = found.row(scheme).gain_kept
    assert verdict(found, scheme) == expected and kept.low > 0.5
    if seed == 0:
        assert kept.estimate == pytest.approx(KEPT[scheme], abs=0.005)
        assert (kept.high < 1) == (expected == "reduced")
