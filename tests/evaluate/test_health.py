"""Limits of health: broken only if that is shown, an outcome if quantization broke them, and told with answers."""

import pandas as pd
import pytest

from qrl import names
from qrl.evaluate import health
from qrl.recipe import Evaluate

pytestmark = pytest.mark.unit


def rows(n: int = 100, unfinished: int = 0, unreadable: int = 0, leaked: int = 0) -> pd.DataFrame:
    """Rows of right answers; the last ones are unfinished, unreadable or leak."""
    return pd.DataFrame(
        {
            "question": [f"q{i}" for i in range(n)],
            "correct": [1] * (n - unreadable) + [0] * unreadable,
            "parsed": ["7"] * (n - unreadable) + [None] * unreadable,
            "answer": "7",
            "completion": [f"answer {i}" for i in range(n)],
            "leaked": [0] * (n - leaked) + [1] * leaked,
            "finish_reason": ["stop"] * (n - unfinished) + ["length"] * unfinished,
            "fault": None,
        }
    )


@pytest.mark.parametrize("full", ["one leak of 32", "one leak of 2,000", "four unfinished of 32"])
def test_a_limit_is_broken_only_if_the_rates_interval_excludes_it(full):
    frame = {
        "one leak of 32": rows(32, leaked=1),
        "one leak of 2,000": rows(2000, leaked=1),
        "four unfinished of 32": rows(32, unfinished=4),
    }[full]
    assert health.problems(health.rates(frame), Evaluate(), len(frame)) == []


@pytest.mark.parametrize(("n", "leaked"), [(32, 4), (2000, 40)])
def test_many_leaks_break_their_limit_and_it_is_named(n, leaked):
    (said,) = health.problems(health.rates(rows(n, leaked=leaked)), Evaluate(), n)
    assert names.PROMPT_LEAK_RATE in said and "evaluate.max_prompt_leak_rate = 0.01" in said and f"n = {n}" in said


@pytest.mark.parametrize(
    ("here", "beyond", "note"),
    [
        (rows(unfinished=16), {names.EOS_RATE, names.TRUNCATION_RATE}, "16 % unfinished, 3 % at full precision"),
        (rows(unreadable=40), {names.PARSE_RATE}, "40 % unreadable, 0 % at full precision"),
        (rows(leaked=9), {names.PROMPT_LEAK_RATE}, "9 % gone on with a new prompt, 0 % at full precision"),
    ],
)
def test_a_note_says_what_quantization_did_to_the_answers(here, beyond, note):
    rates = health.rates(here)
    found = health.broken_metrics(rates, Evaluate(), 100)
    assert set(found) == beyond
    assert health.note(rates, health.rates(rows(unfinished=3)), found) == note


def test_unfinished_answers_of_a_marked_cell_are_wrong_and_the_mark_can_be_taken_off():
    frame = rows(unfinished=16, unreadable=10)
    marked = health.with_note(frame, "16 % unfinished")
    assert marked["correct"].tolist() == [1] * 84 + [0] * 16
    assert set(marked[names.UNHEALTHY]) == {"16 % unfinished"}
    pd.testing.assert_frame_equal(health.without_note(marked), frame)
    assert health.without_note(frame) is frame


def test_the_answers_that_a_message_shows_are_those_that_broke_the_limit():
    def shown(frame: pd.DataFrame) -> list[str]:
        return [
            line.partition(" ")[0]
            for line in health.lines_of_broken(frame, health.broken_metrics(health.rates(frame), limits, 100))
        ]

    limits = Evaluate()
    assert shown(rows(unfinished=16)) == ["q84", "q85"]
    assert shown(rows(leaked=16)) == ["q84", "q85"]
    assert shown(rows(unfinished=16, unreadable=40)) == ["q84", "q85"]  # which cannot be read either
    apart = rows(unfinished=16).assign(parsed=[None] * 40 + ["7"] * 60)
    assert shown(apart) == ["q84", "q85", "q0", "q1"]
    (line, _) = health.lines_of_broken(rows(unfinished=16), [names.TRUNCATION_RATE])
    assert "unfinished" in line and line.endswith("answer 84")
