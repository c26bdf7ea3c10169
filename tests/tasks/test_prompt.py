"""One renderer: the same ids for training, calibration and evaluation; errors in one sentence."""

import pytest

from qrl import tiny
from qrl.errors import BadInput
from qrl.tasks import TASKS, load, prompt

QUESTION = load("arithmetic", "train", 1, 0)[0]


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny.PATH)


@pytest.mark.parametrize("template", prompt.TEMPLATES)
def test_training_calibration_and_evaluation_see_the_same_ids(tokenizer, template):
    evaluation = prompt.render(tokenizer, QUESTION.question, template)
    training = tokenizer.apply_chat_template(
        prompt.messages(QUESTION.question, template), add_generation_prompt=True, tokenize=True, return_dict=False
    )
    calibration = tokenizer(prompt.training_text(tokenizer, QUESTION, template), add_special_tokens=False)["input_ids"]
    assert training == evaluation
    assert calibration[: len(evaluation)] == evaluation
    assert tokenizer.decode(calibration[len(evaluation) :]) == QUESTION.solution + tokenizer.eos_token
    assert calibration[-1] == tokenizer.eos_token_id


def test_the_question_is_inserted_unchanged():
    (turn,) = prompt.messages("What is {question} in {x}?", "answer-line")
    assert turn["role"] == "user"
    assert turn["content"].startswith("What is {question} in {x}?\n")


def test_the_hash_depends_on_the_text_of_a_template(monkeypatch):
    hashes = {name: prompt.template_hash(name) for name in prompt.TEMPLATES}
    assert len(set(hashes.values())) == len(hashes)
    monkeypatch.setitem(prompt.TEMPLATES, "plain", prompt.Template("{question}!"))
    assert prompt.template_hash("plain") != hashes["plain"]


def test_a_system_turn_comes_first(monkeypatch):
    monkeypatch.setitem(prompt.TEMPLATES, "both", prompt.Template("{question}", system="Be brief."))
    assert [turn["role"] for turn in prompt.messages("1?", "both")] == ["system", "user"]


@pytest.mark.parametrize(
    "broken",
    [
        "{{ 1 / 0 }}",
        "{% if %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception('no user turns') }}",
        "{% for i in range(10**9) %}x{% endfor %}",
    ],
)
def test_a_chat_template_that_fails_is_reported_in_one_sentence(broken):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny.PATH)
    tokenizer.chat_template = broken
    with pytest.raises(BadInput, match="chat template fails on a single question"):
        prompt.render(tokenizer, "1?", "plain")


def test_an_unknown_template_and_a_tokenizer_without_chat_template_are_rejected(tokenizer):
    for call in (lambda: prompt.render(tokenizer, "1?", "none"), lambda: prompt.template_hash("none")):
        with pytest.raises(BadInput, match="answer-line, boxed, plain"):
            call()
    kept, tokenizer.chat_template = tokenizer.chat_template, None
    try:
        with pytest.raises(BadInput, match="chat template"):
            prompt.render(tokenizer, "1?", "plain")
    finally:
        tokenizer.chat_template = kept


@pytest.mark.parametrize("task", TASKS)
def test_a_template_asks_for_the_form_that_its_task_grades(task):
    fitting = {"math": "boxed", "deepmath": "boxed"}.get(task, "answer-line")
    prompt.check_task(task, fitting)
    prompt.check_task(task, "plain")
    other = "answer-line" if fitting == "boxed" else "boxed"
    with pytest.raises(BadInput, match=f"the task is {task}: expected prompt={fitting} or prompt=plain"):
        prompt.check_task(task, other)
