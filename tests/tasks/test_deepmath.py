"""DeepMath-103K: its columns become questions, and a hash of the text divides its one split."""

import json

import pytest

from qrl import tasks
from qrl.errors import BadInput
from qrl.tasks import deepmath

ROW = {
    "question": "Evaluate the limit.",
    "final_answer": "\\dfrac{2}{3}",
    "difficulty": 5.5,
    "topic": "Mathematics -> Calculus -> Limits",
}
SOLUTIONS = {f"r1_solution_{i}": "Hmm. " * 50 + "\\boxed{9}" for i in (1, 2, 3)}


def write(folder, rows):
    for name in ("train.jsonl", "test.jsonl"):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


@pytest.mark.process
def test_its_columns_become_a_question_with_topic_and_difficulty(tmp_path):
    (question,) = tasks.load("deepmath", "heldout", data=write(tmp_path, [ROW | SOLUTIONS]))
    assert question.question == ROW["question"] and (question.subject, question.level) == ("Calculus", 5)
    assert question.solution == "\\boxed{" + question.answer + "}" and "9" not in question.answer
    assert tasks.grade("deepmath", "So it is $\\boxed{\\frac{2}{3}}$.", question.answer).strict
    assert not tasks.grade("deepmath", "So it is $\\boxed{\\frac{3}{2}}$.", question.answer).strict
    assert tasks.grade("deepmath", question.solution, question.answer).strict


@pytest.mark.parametrize("answer", ["Yes", "0", "\\infty", "[0, 1)", "x^2 + 1", "-\\frac{1}{2}"])
def test_answers_of_every_kind_are_right_when_repeated(answer, tmp_path):
    (question,) = tasks.load("deepmath", "train", data=write(tmp_path, [ROW | {"final_answer": answer}]))
    assert tasks.grade("deepmath", question.solution, question.answer).strict


def test_an_error_names_the_row_without_an_answer(tmp_path):
    with pytest.raises(BadInput, match=r"train\.jsonl, line 2"):
        tasks.load("deepmath", "train", data=write(tmp_path, [ROW, ROW | {"final_answer": "", "question": "?"}]))
    with pytest.raises(BadInput, match=r"'problem' .* is missing"):
        tasks.load("deepmath", "train", data=write(tmp_path, [{"final_answer": "1"}]))


def test_about_one_text_in_a_hundred_is_held_out_however_it_is_spaced():
    texts = [f"Find the {i}-th coefficient of the series." for i in range(20_000)]
    heldout = [text for text in texts if deepmath.split_of(text) == "heldout"]
    assert 140 < len(heldout) < 260  # 200 expected, 4 standard deviations
    assert all(deepmath.split_of(f"  {text.upper()}\n") == "heldout" for text in heldout)
