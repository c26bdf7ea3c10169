"""What quantization costs each training, and whether GRPO's cost differs: contrasts of four cells, as computed here."""

import numpy as np
import pandas as pd
import pytest

from qrl import stats
from qrl.compare import damage, ranking

RIGHT = {("base", "full"): 0.5, ("base", "nf4"): 0.45, ("grpo", "full"): 0.8, ("grpo", "nf4"): 0.6}
RIGHT |= {("sft", "full"): 0.8, ("sft", "nf4"): 0.75, ("qat-int4", "rtn-int4"): 0.7}


def frame(cells=RIGHT, n=4000, seeds=("0",), seed=0):
    """Answers to shared questions: a question is right where its difficulty and some noise are below the rate."""
    draw = np.random.default_rng(seed)
    hard, rows = draw.random(n), []
    for run in seeds:
        for (variant, scheme), rate in cells.items():
            right = np.where(draw.random(n) < 0.7, hard, draw.random(n)) < rate
            rows += [(variant, scheme, run, f"q{number}", int(each)) for number, each in enumerate(right)]
    return pd.DataFrame(rows, columns=["variant", "scheme", "seed", "question", "correct"])


def test_losses_and_their_differences_are_paired_contrasts():
    rows = frame()
    found = {row.variant: row for row in ranking.measure(rows).damages}
    assert list(found) == ["grpo", "base", "sft"] and {row.scheme for row in found.values()} == {"nf4"}
    cells = {
        cell: part.set_index("question")["correct"].sort_index() for cell, part in rows.groupby(["variant", "scheme"])
    }
    four = np.stack([cells[cell].to_numpy() for cell in list(RIGHT)[:4]])
    assert found["base"].loss == stats.contrast(four[:2], (1, -1))
    expected = stats.contrast(four, (-1, 1, 1, -1))
    assert found["base"].excess.estimate == pytest.approx(expected.estimate)
    assert (found["base"].excess.low, found["base"].excess.high) == pytest.approx((expected.low, expected.high))
    assert found["grpo"].excess is None and found["grpo"].p_holm is None
    assert found["base"].excess.low > 0 and found["sft"].excess.low > 0  # 0.20 was lost, against 0.05 and 0.05
    says = damage.findings(found.values())
    assert len(says) == 2 and all(
        each.startswith("Under nf4: the scales agree. It costs grpo more than") for each in says
    )
    text = ranking.markdown(ranking.measure(rows))
    assert "## Does RL change how cleanly the model quantizes?" in text and "| nf4 | grpo |" in text
    assert ranking.metrics(ranking.measure(rows))["damage/base_nf4_low"] == found["base"].excess.low


def test_where_the_scales_disagree_no_sentence_names_one_alone():
    """In points grpo loses 0.20 and the base 0.15; of its accuracy grpo keeps 75 %, the base 25 %."""
    cells = {("base", "full"): 0.2, ("base", "nf4"): 0.05, ("grpo", "full"): 0.8, ("grpo", "nf4"): 0.6}
    cells |= {("sft", "full"): 0.8, ("sft", "nf4"): 0.6}
    measured = ranking.measure(frame(cells))
    grpo, base, sft = measured.damages
    assert base.excess.low > 0 and base.scales.ratio.low > 1 and base.scales.agree is False
    assert base.scales.kept["base"].estimate == pytest.approx(0.25, abs=0.03)
    about_base, about_sft = damage.findings(measured.damages)
    assert about_base.startswith("Under nf4: the scales disagree. It costs grpo more than base on one scale (−0.0")
    assert "less on another (" in about_base and "neither alone answers the question" in about_base
    assert about_sft == "On no scale is a difference shown between grpo and sft under nf4."
    written = damage.as_json(measured.damages)
    assert written[0]["accuracy_kept_ratio"] is None and written[1]["scales_agree"] is False
    assert [row["accuracy_kept"]["estimate"] for row in written] == pytest.approx([0.75, 0.25, 0.75], abs=0.03)
    assert sft.scales.agree is None and grpo.scales is None
    rows = [line for line in damage.markdown(measured.damages) if line.startswith("| nf4 |")]
    assert rows[0].endswith("| reference | reference |") and all(row.count(" % [") == 1 for row in rows)


@pytest.mark.slow
@pytest.mark.process
def test_equal_losses_are_not_told_apart_more_often_than_the_level_says():
    equal = {("base", "full"): 0.5, ("base", "nf4"): 0.45, ("grpo", "full"): 0.8, ("grpo", "nf4"): 0.75}
    found = [ranking.measure(frame(equal, n=300, seed=seed)).damages[1] for seed in range(200)]
    assert sum(row.differs for row in found) <= 20  # 10 expected at 5 %; 21 or more in 1 of 700 tries
    assert sum(row.excess.low <= 0 <= row.excess.high for row in found) >= 180


def test_seeds_are_a_random_effect_and_cells_without_a_partner_are_left_out():
    several = ranking.measure(frame(seeds=("0", "1", "2"), n=300))
    assert several.runs == 3 and [row.variant for row in several.damages] == ["grpo", "base", "sft"]
    without = {cell: rate for cell, rate in RIGHT.items() if cell[0] in ("grpo", "qat-int4") or cell[1] == "full"}
    assert ranking.measure(frame(without, n=50)).damages == () and damage.markdown(()) == []


def test_a_control_competes_with_no_method():
    measured = ranking.measure(frame())
    assert {row.variant for row in measured.rows if row.quantized} == {"grpo", "qat-int4"}
    assert "sft" not in "".join(ranking.findings(measured))
    assert all(row.over_grpo is None for row in measured.rows if row.variant == "sft")
