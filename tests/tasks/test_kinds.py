"""What graders were once wrong about, kind by kind: cases as data, generated answers, MATH-500 in Unicode's signs."""

import json
import os
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import qrl
from qrl import tasks
from qrl.tasks.math import latex
from tests.tasks import respelled, test_math

CASES = json.loads((Path(qrl.__file__).parents[1] / "tests" / "cases" / "kinds.json").read_text(encoding="utf-8"))
SIGNS = "√∛²³⁻ⁿ₂₁½¾°′π×·−（），｛｝θℝ𝑥\u0305\u2061()^_{}\\23x+,/ "


@pytest.fixture(scope="module")
def verdicts():
    return [tasks.grade(case["task"], case["completion"], case["answer"]) for case in CASES]


@pytest.mark.process
@pytest.mark.parametrize(
    "index", range(len(CASES)), ids=[f"{case['kind']} {case['completion'][:40]}" for case in CASES]
)
def test_cases(verdicts, index):
    assert (verdicts[index].strict, verdicts[index].fault) == (CASES[index]["strict"], None)


def test_every_kind_has_cases_of_both_verdicts():
    both = Counter((case["kind"], case["strict"]) for case in CASES)
    assert len(CASES) >= 150 and len({(case["completion"], case["answer"]) for case in CASES}) == len(CASES)
    for kind in {case["kind"] for case in CASES} - {"division by zero"}:
        assert both[kind, True] >= 5 and both[kind, False] >= 4, kind


def check_generated(kind: str, n: int, seed: int) -> None:
    answers = list(dict.fromkeys(respelled.answers(kind, n, seed)))
    wrong_verdicts = []
    for task in {answer.task for answer in answers}:
        of_task = [answer for answer in answers if answer.task == task]
        completions = [answer.completion for answer in of_task]
        graded = tasks.grade_many(task, completions, [answer.gold for answer in of_task])
        for answer, verdict in zip(of_task, graded, strict=True):
            if verdict.strict != answer.is_right or verdict.fault:
                wrong_verdicts.append((answer, verdict))
    assert wrong_verdicts == []
    assert any(answer.is_right for answer in answers) or kind == "division by zero"
    assert any(not answer.is_right for answer in answers)


@pytest.mark.process
@pytest.mark.parametrize("kind", respelled.KINDS)
def test_a_right_answer_stays_right_and_a_wrong_one_wrong(kind):
    check_generated(kind, 60, seed=0)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("kind", respelled.KINDS)
def test_six_thousand_more(kind):
    check_generated(kind, 900, seed=1)


@settings(deadline=None, max_examples=300)
@given(st.text(alphabet=SIGNS, max_size=30))
@example("\\" * 3)
@example("{" * 900)
@example("^" * 900)
@example("√" * 900)
@example("\\frac" * 190)
@example("√\\sqrt{")
def test_no_text_of_signs_and_braces_raises(text):
    spelled = latex.normal(text)
    assert latex.same(spelled, spelled)
    assert latex.same("5", spelled) in (True, False, None)


def math500() -> list[str]:
    if "QRL_DATA_DIR" not in os.environ:
        pytest.skip("QRL_DATA_DIR names no folder with math500/test.jsonl")
    lines = (Path(os.environ["QRL_DATA_DIR"]) / "math500" / "test.jsonl").read_text().splitlines()
    return sorted({json.loads(line)["answer"] for line in lines})


def in_unicode(latex_answer: str) -> str:
    """Return an answer with everything in Unicode's signs that has one."""
    text = re.sub(
        r"\\[dt]?frac\{(\d)\}\{(\d)\}|\\frac(\d)(\d)",
        lambda match: respelled.VULGAR.get(tuple(int(digit) for digit in match.groups() if digit), match[0]),
        latex_answer,
    )
    text = re.sub(r"\\sqrt\{(\d+|[a-z])\}|\\sqrt(\d)", lambda match: f"√{match[1] or match[2]}", text)
    text = re.sub(r"\\sqrt\[3\]\{(\d+)\}", r"∛\1", text)
    text = re.sub(r"\\sqrt\{([^{}]*)\}", r"√(\1)", text)
    text = re.sub(r"\^\{(-?\d+)\}|\^(\d)", lambda match: (match[1] or match[2]).translate(respelled.SUPERSCRIPTS), text)
    text = re.sub(r"_\{(\d+)\}|_(\d)", lambda match: (match[1] or match[2]).translate(respelled.SUBSCRIPTS), text)
    text = re.sub(r"\\(?:left|right)(?![A-Za-z])", "", text)
    for command, sign in (
        ("pi", "π"),
        ("infty", "∞"),
        ("cup", "∪"),
        ("cdot", "·"),
        ("le", "≤"),
        ("in", "∈"),
        ("pm", "±"),
    ):
        text = re.sub(rf"\\{command}(?![A-Za-z])", sign, text)
    text = re.sub(r"\^\{?\\circ\}?", "°", text).replace("-", "−")
    return text if "\\" in text else text.translate(respelled.FULL_WIDTH)


def test_a_spelling_is_its_own_spelling():  # gold answers are spelled as they are read, and again as they are graded
    for answer in math500():
        for text in (answer, in_unicode(answer)):
            assert latex.normal(latex.normal(text)) == latex.normal(text)


@pytest.mark.slow
@pytest.mark.process
def test_the_answers_of_math500_in_unicode_are_right_and_perturbed_ones_wrong():
    right = [(in_unicode(answer), answer) for answer in math500() if not in_unicode(answer).isascii()]
    wrong = []
    for answer in math500():
        for variant in test_math.perturbed(answer):
            if (answer, variant) not in test_math.EQUAL and not in_unicode(variant).isascii():
                wrong.append((in_unicode(variant), answer))
    assert len(right) > 150 and len(wrong) > 800

    pairs = right + wrong
    graded = tasks.grade_many("math", [f"\\boxed{{{text}}}" for text, _ in pairs], [answer for _, answer in pairs])
    unlike = [(*pair, verdict.strict) for pair, verdict in zip(pairs, graded, strict=True) if verdict.fault]
    unlike += [pair for pair, verdict in zip(right, graded[: len(right)], strict=True) if not verdict.strict]
    unlike += [pair for pair, verdict in zip(wrong, graded[len(right) :], strict=True) if verdict.strict]
    assert unlike == []
