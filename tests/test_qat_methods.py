"""The table of methods: each cell against base and against full precision, paired, whatever its scheme."""

import numpy as np
import pandas as pd
import pytest

from qrl import stats
from qrl.compare import methods
from qrl.compare.text import interval
from qrl.errors import BadInput

RATES = {("base", "fp16"): 0.3, ("grpo", "fp16"): 0.7, ("grpo", "nf4"): 0.6, ("qat-int4", "rtn-int4"): 0.8}


def frame(cells=RATES, n=400, seeds=("0",)):
    generator = np.random.default_rng(0)
    rows = []
    for seed in seeds:
        for (variant, scheme), rate in cells.items():
            for question, right in enumerate(generator.random(n) < rate):
                rows.append((variant, scheme, seed, f"q{question}", int(right), f"{variant}{scheme}"))
    return pd.DataFrame(rows, columns=["variant", "scheme", "seed", "question", "correct", "settings_digest"])


def test_methods_need_no_common_scheme_and_stand_best_first_with_paired_intervals():
    found = frame()
    text = methods.markdown(found)
    lines = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line and "method" not in line]
    assert [line.split(" | ")[0].strip("| ") for line in lines] == ["qat-int4", "grpo", "grpo", "base"]
    cells = {
        cell: part.sort_values("question")["correct"].to_numpy() for cell, part in found.groupby(["variant", "scheme"])
    }
    for against in (("base", "fp16"), ("grpo", "fp16")):
        wanted = stats.contrast(np.stack([cells["qat-int4", "rtn-int4"], cells[against]]), (1, -1))
        assert interval(wanted) in lines[0]
    assert "n = 400 held-out questions, one training run each" in text


def test_several_training_runs_are_a_random_effect():
    one, three = methods.markdown(frame()), methods.markdown(frame(seeds=("0", "1", "2")))
    assert "3 training runs" in three and one != three


def test_without_base_or_full_precision_there_is_nothing_to_measure_from():
    for cell in (("base", "fp16"), ("grpo", "fp16")):
        with pytest.raises(BadInput, match=f"Cell {cell[0]} · fp16 is missing"):
            methods.markdown(frame({key: rate for key, rate in RATES.items() if key != cell}))


def test_a_table_without_its_columns_is_refused_in_a_sentence():
    with pytest.raises(BadInput, match="lacks 'variant'"):
        methods.markdown(frame().drop(columns="variant"))
    with pytest.raises(BadInput, match="'scheme' has 1600 empty values"):
        methods.markdown(frame().assign(scheme=None))
