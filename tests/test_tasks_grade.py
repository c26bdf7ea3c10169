"""The grader: cases as data, and what holds for any text."""

import json
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qrl.errors import BadInput
from qrl.tasks import grade as ask
from qrl.tasks.grade import grade, strict, text

CASES = json.loads((Path(__file__).parent / "cases" / "grade.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["why"][:60])
def test_cases(case):
    verdict = grade(case["completion"], case["answer"])
    assert (verdict.parsed, verdict.strict, verdict.flexible) == (case["parsed"], case["strict"], case["flexible"])


def test_there_are_enough_cases_and_each_says_why():
    assert len(CASES) >= 60
    assert len({case["why"] for case in CASES}) == len(CASES)


@given(st.text(max_size=300), st.text(max_size=300))
@example("#### ", "\ud800")
@example("####" * 3, "٣ ½ ² 1\u2028#### 2")
def test_no_text_raises_and_strict_implies_the_answer_was_said(before, after):
    for completion in (before, after, f"{before}#### 18{after}", f"{before}\n#### 18\n{after}"):
        verdict = grade(completion, "18")
        assert verdict.strict == (verdict.parsed == "18")


@given(st.integers(-(10**12), 10**12))
def test_every_way_to_write_an_integer_is_the_same_number(number):
    for written in (f"{number}", f"{number:,}", f"{number}.0", f"{number:,}.00", f"${number}", f"{number}%", f"{number} eggs."):
        assert strict(f"so\n#### {written}\n") == number


@given(st.decimals(-(10**9), 10**9, places=3))
def test_decimals_are_exact_and_normalized_text_reads_back(number):
    assert strict(f"#### {number:f}") == Fraction(number)
    assert Fraction(text(Fraction(number))) == Fraction(number)


@given(st.fractions(max_denominator=10**6))
def test_normalized_text_of_a_fraction_grades_as_itself(number):
    assert grade(f"#### {number}", text(number)).strict


@given(st.integers(0, 999), st.integers(0, 999))
def test_two_answers_are_an_answer_only_if_they_agree(first, second):
    verdict = grade(f"#### {first}\n#### {second}", str(first))
    assert verdict.strict == (first == second)
    assert (verdict.parsed is None) == (first != second)


def test_listing_every_number_earns_nothing():
    for spam in ("\n".join(f"#### {i}" for i in range(1000)), "#### " + " ".join(map(str, range(50))), "#### 1,2,3,18"):
        assert not grade(spam, "18").strict


@pytest.mark.parametrize(
    "unit",
    ["1", "1 ", "1,", "1.", "#", "####", "#### ", "#### 1 ", "#### 1\n", "-", "$", "\\frac{", "\\frac{1}{", "1/", "=", "1,111", "é", "<|im_end", "\u00a0"],
)
def test_a_megabyte_takes_linear_time(unit):
    spam = (unit * (1_000_000 // len(unit) + 1))[:1_000_000]
    started = time.process_time()
    for completion in (spam, "#### " + spam, spam + "\n#### 18"):
        grade(completion, "18")
    assert time.process_time() - started < 5


def test_speed():
    completion = "Tom has 3+4=7 apples.\nAnn has 7*6=42 apples.\n#### 42"
    started = time.process_time()
    for _ in range(5000):
        grade(completion, "42")
    assert 5000 / (time.process_time() - started) > 10_000  # a second; about 40,000 on one quiet core


def test_a_gold_solution_stands_for_its_answer_and_a_wordy_one_is_refused():
    assert ask("gsm8k", "#### 18", "He earns 9 * 2 = 18.\n#### 18").strict
    for gold in ("", "eighteen", "1 or 2", "1.2.3"):
        with pytest.raises(BadInput, match="gold answer"):
            grade("#### 18", gold)
