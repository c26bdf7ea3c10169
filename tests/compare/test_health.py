"""Cells whose answers quantization made unhealthy are marked wherever their accuracy stands."""

import pandas as pd
import pytest

from qrl import compare, figures, names
from qrl.compare import health, ranking

pytestmark = pytest.mark.unit
NOTE = "16 % unfinished, 3 % at full precision"


def cell(variant: str, scheme: str, unfinished: int = 0, **more: str) -> pd.DataFrame:
    """200 questions, half of them right; the last ones are unfinished."""
    ends = ["stop"] * (200 - unfinished) + ["length"] * unfinished
    named = {"variant": variant, "scheme": scheme, "question": [f"q{i}" for i in range(200)]}
    return pd.DataFrame(named | {"correct": [1, 0] * 100, "finish_reason": ends, **more})


def four(full: int, quantized: int, **more: str) -> pd.DataFrame:
    cells = [
        cell("base", "full", full),
        cell("grpo", "full"),
        cell("base", "nf4", quantized, **more),
        cell("grpo", "nf4"),
    ]
    return pd.concat(cells, ignore_index=True)


def test_the_mark_of_a_cells_rows_stands_in_table_record_and_page(tmp_path):
    comparison = compare.compare(four(6, 32, **{names.UNHEALTHY: NOTE}))
    assert comparison.unhealthy == {("base", "nf4"): NOTE}
    text = comparison.markdown()
    assert text.count(f"(n = 200) {health.MARK}") == 1 and f"- base · nf4: {NOTE}" in text
    table = comparison.table_json()
    assert table["nf4"]["cells"]["base"]["unhealthy"] == NOTE and "unhealthy" not in table["nf4"]["cells"]["grpo"]
    figures.report(figures.Study(table), tmp_path / "report.html")
    assert f"base · nf4: {NOTE}" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert f"- base · nf4: {NOTE}" in ranking.markdown(ranking.measure(four(6, 32, **{names.UNHEALTHY: NOTE})))


@pytest.mark.parametrize(
    ("full", "quantized", "note"),
    [
        (6, 32, NOTE),
        (6, 12, None),  # 6 % of 200 may be 5 % of all
        (40, 60, None),  # at full precision it is no different
        (0, 0, None),
    ],
)
def test_a_file_that_says_how_answers_end_is_told_of_without_marks(full, quantized, note):
    assert health.notes(four(full, quantized)).get(("base", "nf4")) == note


def test_a_file_that_says_nothing_of_its_answers_has_no_mark():
    assert health.notes(four(6, 32).drop(columns="finish_reason")) == {}
    assert health.notes(four(6, 32).query("variant != 'base' or scheme != 'full'")) == {}
