"""The generator: right, varied, reproducible, and no question in both splits."""

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qrl.tasks import arithmetic, grade, load

seeds = st.integers(0, 2**31 - 1)
CALCULATION = re.compile(r"(\d+)([-+*/])(\d+)=(\d+)")
DO = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": lambda a, b: a // b if a % b == 0 else None}

PINNED = (
    "arithmetic-heldout-0-0",
    "Ben starts with 218 stones. Sam has 2 times as many stones as Ben. Kai has 11 more stones than Sam. "
    "How many stones does Kai have now?",
    "Sam has 218*2=436 stones.\nKai has 436+11=447 stones.\n#### 447",
)


@pytest.mark.process
@settings(max_examples=30, deadline=None)
@given(seeds, seeds, st.integers(1, 300))
def test_no_question_is_in_both_splits_whatever_the_seeds(train_seed, heldout_seed, n):
    train = {question.question for question in load("arithmetic", "train", n, train_seed)}
    heldout = {question.question for question in load("arithmetic", "heldout", n, heldout_seed)}
    assert not train & heldout
    assert {arithmetic.split_of(text) for text in train} == {"train"}
    assert {arithmetic.split_of(text) for text in heldout} == {"heldout"}


@settings(max_examples=20, deadline=None)
@given(seeds, st.sampled_from(["train", "heldout"]))
def test_every_step_is_true_and_the_last_one_is_the_answer(seed, split):
    for question in load("arithmetic", split, 100, seed):
        *lines, last = question.solution.split("\n")
        assert 1 <= len(lines) <= 4
        for line in lines:
            left, sign, right, result = CALCULATION.search(line).groups()
            assert DO[sign](int(left), int(right)) == int(result)
            assert 0 <= int(result) <= arithmetic.LARGEST
        assert last == f"#### {question.answer}" == f"#### {result}"
        assert grade("arithmetic", question.solution, question.answer).strict


def test_numbers_of_a_solution_come_from_the_question_or_from_a_step_before():
    for question in load("arithmetic", "train", 500, seed=1):
        known = set(re.findall(r"\d+", question.question))
        for left, _, right, result in CALCULATION.findall(question.solution):
            assert left in known
            assert right in known
            known.add(result)


def test_same_seed_same_questions_and_a_longer_set_begins_with_the_shorter():
    assert load("arithmetic", "train", 50, 7) == load("arithmetic", "train", 80, 7)[:50]
    assert load("arithmetic", "train", 50, 7) != load("arithmetic", "train", 50, 8)


def test_the_stream_is_pinned():
    first = load("arithmetic", "heldout", 1, 0)[0]
    assert (first.id, first.question, first.solution) == PINNED


def test_no_duplicates_within_a_split_and_ids_are_unique():
    questions = load("arithmetic", "train", 5000, 3)
    assert len({q.question for q in questions}) == len({q.id for q in questions}) == 5000


def test_all_kinds_and_all_lengths_appear():
    drawn = [problem for problem, _ in zip(arithmetic.problems("train", 0), range(2000), strict=False)]
    kinds = {step.kind for problem in drawn for step in problem.steps}
    assert kinds == {*arithmetic.KINDS, "together"}
    assert {len(problem.steps) for problem in drawn} == {1, 2, 3, 4}


def test_wrong_signs_give_a_wrong_solution_or_none():
    for problem, _ in zip(arithmetic.problems("train", 2), range(500), strict=False):
        signs = ["+" if step.kind == "times" else arithmetic.SIGN[step.kind] for step in problem.steps]
        solved = arithmetic.solve(problem, signs)
        if solved and not any(step.kind == "times" for step in problem.steps):
            assert solved == arithmetic.solve(problem)


def test_it_is_fast():
    started = time.process_time()
    load("arithmetic", "train", 5000, 11)
    assert 5000 / (time.process_time() - started) > 5000  # per second; about 30,000 on one idle core


def test_a_share_may_have_any_divisor_of_one_digit():
    class Last:
        """Draws the last of each list."""

        def random(self) -> float:
            return 0.999

    assert arithmetic._operand("share", 9, Last()) == ("share", 9)
