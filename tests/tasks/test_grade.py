"""The grader of numbers: cases as data, properties of any text, every real gold answer."""

import importlib
import json
import os
import re
from fractions import Fraction
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import qrl
from qrl import tasks
from qrl.errors import BadInput
from qrl.tasks.number import LONGEST, numbers, text, tidy
from qrl.tasks.numeric import flexible, grade, strict

CASES = json.loads((Path(qrl.__file__).parents[1] / "tests" / "cases" / "grade.json").read_text(encoding="utf-8"))
KINDS = {
    "format", "prose", "sign", "thousands", "decimals", "units", "currency", "percent", "latex", "fractions",
    "equation", "full stop", "brackets", "boxed", "markdown", "several answers", "end token", "prompt leak",
    "unicode", "gold",
}  # fmt: skip
MODULE = importlib.import_module("qrl.tasks.numeric")
NASTY = st.text(alphabet="0123456789 .,-+#/=$%\\{}()*^xe\n\u2009\u202f½−", max_size=40)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["why"][:60])
def test_cases(case):
    verdict = grade(case["completion"], case["answer"])
    assert (verdict.parsed, verdict.strict, verdict.flexible) == (case["parsed"], case["strict"], case["flexible"])


def test_there_are_enough_cases_of_every_kind_and_each_says_why():
    assert len({(case["completion"], case["answer"]) for case in CASES}) == len(CASES) >= 200
    assert len({case["why"] for case in CASES}) == len(CASES)
    assert {case["kind"] for case in CASES} == KINDS
    for kind in KINDS - {"prose"}:  # strict verdicts of both kinds; no prose is right
        assert {case["strict"] for case in CASES if case["kind"] == kind} >= (
            {True} if kind in ("brackets", "gold") else {True, False}
        )


@given(st.text(max_size=300), st.text(max_size=300))
@example("#### ", "\ud800")
@example("####" * 3, "٣ ½ ² 1\u2028#### 2")
def test_no_text_raises_and_strict_implies_that_the_answer_was_stated(before, after):
    for completion in (before, after, f"{before}#### 18{after}", f"{before}\n#### 18\n{after}"):
        verdict = grade(completion, "18")
        assert verdict.strict == (verdict.parsed == "18")
        assert verdict == grade(completion, "18")


@given(NASTY)
@example("- 5")
@example(" 18\n")
@example("#####-5\n")
def test_the_short_cut_for_plain_answers_changes_no_verdict(line):
    for body in (line, f"#### {line}", f"10\n####{line}"):
        short = strict(body), flexible(body)
        # A pattern that matches nothing sends every text through the full rules.
        with mock.patch.object(MODULE, "_SIMPLE", re.compile("(?!)")):
            assert (strict(body), flexible(body)) == short


@given(st.lists(NASTY, max_size=5).map("\n".join))
@example("18\nB3 x4")
@example("1/2\n/3")
@example("1e1 1/2")
def test_the_flexible_number_is_the_last_one_of_the_last_line_that_has_any(body):
    values = [number for line in body.split("\n") for number in numbers(tidy(line))]
    assert flexible(body) == (values[-1] if values else None)


@given(st.integers(-(10**12), 10**12))
def test_every_way_to_write_an_integer_is_the_same_number(number):
    sign, size = "-" if number < 0 else "", abs(number)
    for written in (
        f"{number}", f"{number:,}", f"{number}.0", f"{number:,}.00", f"${number}", f"{sign}${size:,}",
        f"{sign}US${size}", f"{number}%", f"{number} eggs.", f"\\boxed{{{number}}}", f"${number}$", f"**{number}**",
        f"x = {number}", f"{number}/1", f"{number:,}".replace(",", "\u202f"), f"{number:,}".replace(",", "{,}"),
        f"{number}".replace("-", "−"),
    ):  # fmt: skip
        assert strict(f"so\n#### {written}\n") == flexible(f"so\n#### {written}\n") == number, written


@given(st.decimals(-(10**9), 10**9, places=3))
def test_decimals_are_exact_and_normalized_text_reads_back(number):
    assert strict(f"#### {number:f}") == Fraction(number)
    assert Fraction(text(Fraction(number))) == Fraction(number)


@given(st.fractions(max_denominator=10**6))
def test_normalized_text_of_a_fraction_grades_as_itself(number):
    assert grade(f"#### {number}", text(number)).strict
    assert strict(f"#### \\frac{{{number.numerator}}}{{{number.denominator}}}") == number


@given(st.integers(-999, 999), st.integers(2, 99), st.integers(1, 98))
def test_a_mixed_number_is_the_sum_of_its_parts(whole, under, over):
    part = Fraction(over, under)
    wanted = None if over >= under else whole - part if whole < 0 else whole + part
    assert strict(f"#### {whole} {over}/{under}") == strict(f"#### {whole}\\frac{{{over}}}{{{under}}}") == wanted


@given(st.integers(0, 999), st.integers(0, 999))
def test_two_answers_are_an_answer_only_if_they_agree(first, second):
    verdict = grade(f"#### {first}\n#### {second}", str(first))
    assert verdict.strict == (first == second)
    assert (verdict.parsed is None) == (first != second)


@given(st.integers(-9999, 9999))
def test_a_calculation_without_its_result_is_no_answer(number):
    for sign in ("+", "*", " - ", "×", "^", " \\times "):
        assert strict(f"#### {abs(number)}{sign}{abs(number)}") is None


def test_a_gold_solution_is_graded_by_its_answer_and_one_in_words_is_rejected():
    assert tasks.grade("gsm8k", "#### 18", "He earns 9 * 2 = 18.\n#### 18").strict
    for gold in ("", "eighteen", "1 or 2", "1.2.3", "2 + 2"):
        with pytest.raises(BadInput, match="gold answer"):
            grade("#### 18", gold)


@pytest.mark.process
def test_every_real_gold_answer_is_right_and_every_perturbed_one_wrong():
    if "QRL_DATA_DIR" not in os.environ:
        pytest.skip("QRL_DATA_DIR names no folder with gsm8k/train.jsonl and gsm8k/test.jsonl")
    folder = Path(os.environ["QRL_DATA_DIR"], "gsm8k")
    solutions = [json.loads(line)["answer"] for name in ("train", "test") for line in (folder / f"{name}.jsonl").open()]
    assert len(solutions) == 8792
    for solution in solutions:  # as in the files, with calculator annotations
        reasoning, _, gold = solution.rpartition("####")
        verdict = grade(solution, gold.strip())
        assert verdict.strict and verdict.flexible and grade(solution, solution) == verdict, solution
        number = Fraction(gold.strip().replace(",", ""))
        for other in {number + 1, number - 1, -number, number * 10} - {number}:
            for written in (text(other), f"${text(other)}"):
                verdict = grade(f"{reasoning}#### {written}", gold.strip())
                assert verdict.parsed == text(other) and not (verdict.strict or verdict.flexible), (gold, written)


def test_a_number_of_the_longest_length_counts_and_a_longer_one_does_not():
    assert numbers("9" * LONGEST) == [int("9" * LONGEST)]
    assert numbers("9" * (LONGEST + 1)) == [None]
