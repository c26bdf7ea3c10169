"""Whether a wrong or missing answer had stated the right value before."""

import time

import pytest

from qrl import tasks


def asked(answer, question="How many?"):
    return tasks.Question("q", question, "", answer)


@pytest.mark.parametrize(
    ("completion", "answer", "question", "stated"),
    [
        ("24+48=72\n72+5=77\n#### 77", "72", "How many?", True),
        ("#### 72\n#### 5", "72", "How many?", True),  # two answers
        ("So there are 72 clips. Then 72 - ", "72", "How many?", True),  # cut
        ("That makes 1,072.0 in all, so #### 5", "1072", "How many?", True),
        ("#### 72", "72", "How many?", False),  # nothing before it
        ("The 72 clips\n#### 5", "72", "She sold 72 clips.", False),  # a number of the question
        ("172 and 7.2\n#### 5", "72", "How many?", False),
        ("72<|im_end|>72\n#### 5", "7", "How many?", False),
    ],
)
def test_numbers(completion, answer, question, stated):
    assert tasks.has_stated_answer("gsm8k", completion, asked(answer, question)) is stated
    assert tasks.has_stated_answer("arithmetic", completion, asked(answer, question)) is stated


@pytest.mark.parametrize(
    ("completion", "answer", "question", "stated"),
    [
        (r"We get $x = \frac{14}{3}$, then \boxed{5}", r"\frac{14}{3}", "Find $x$.", True),
        (r"We get $x = \dfrac{14}{3}.$ So \boxed{5}", r"\frac{14}{3}", "Find $x$.", True),
        (r"\boxed{5}, or rather \boxed{6}", "5", "Find $x$.", True),
        (r"x = 5. But \boxed{6}", "5", "Let $x=5$.", False),  # stated by the question
        ("Perhaps 5 of them", "5", "Find $x$.", False),  # not a formula of its own
        (r"\boxed{5}", "5", "Find $x$.", False),
        ("x = 5, and then", "5", "Find $x$.", True),
    ],
)
def test_formulas(completion, answer, question, stated):
    assert tasks.has_stated_answer("math", completion, asked(answer, question)) is stated


def test_a_task_of_another_kind_has_no_rule():
    assert tasks.has_stated_answer("mine", "5", asked("5")) is None


@pytest.mark.parametrize("text", ["x=" * 50_000, "$1$ " * 20_000, "\\boxed{" * 20_000, "1 " * 100_000, "9" * 100_000])
def test_no_text_takes_long(text):
    began = time.process_time()
    assert not tasks.has_stated_answer("math", text, asked("72")) and not tasks.has_stated_answer(
        "gsm8k", text, asked("72")
    )
    assert time.process_time() - began < 5
