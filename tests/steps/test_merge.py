"""`merge` compares distributions on questions that are at hand, else on random token ids: it needs no hub."""

import socket

import datasets
import huggingface_hub
import pytest

from qrl import recipe, tiny
from qrl.engine import hf
from qrl.errors import BadInput
from qrl.steps import train

pytestmark = pytest.mark.unit


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """Leave the hub's cache empty, and fail at any request."""

    def refuse(*args):
        raise AssertionError("The hub was requested.")

    for switch in (datasets.config, huggingface_hub.constants):  # the tests' own is off line
        monkeypatch.setattr(switch, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.parametrize("task", ["gsm8k", "math", "deepmath"])
def test_without_data_a_task_of_the_hub_is_replaced_by_random_token_ids(offline, task):
    settings = recipe.load("instruct", {"task": task, "prompt": "boxed" if task != "gsm8k" else "plain"})
    prompts, said = train._prompts_to_check(settings, tiny.PATH)
    assert "random token ids" in said and task in said
    assert len(prompts) == train.PROMPTS_TO_CHECK and prompts == train._prompts_to_check(settings, tiny.PATH)[0]
    known = range(len(hf.tokenizer(tiny.PATH)))
    assert all(len(ids) == train.RANDOM_TOKENS and set(ids) <= set(known) for ids in prompts)
    assert datasets.config.HF_HUB_OFFLINE is huggingface_hub.constants.HF_HUB_OFFLINE is False


def test_questions_of_the_task_or_of_a_folder_are_used(offline, tmp_path):
    prompts, said = train._prompts_to_check(recipe.load("tiny"), tiny.PATH)
    assert "questions of arithmetic" in said and len(prompts) == train.PROMPTS_TO_CHECK
    rows = '{"question": "What is 1 + 1?", "answer": "#### 2"}\n' * 3
    (tmp_path / "train.jsonl").write_text(rows)
    own = recipe.load("instruct", {"task": "gsm8k", "data": str(tmp_path)})
    prompts, said = train._prompts_to_check(own, tiny.PATH)
    assert said == "3 questions of gsm8k"
    (tmp_path / "train.jsonl").write_text("{")
    with pytest.raises(BadInput, match="line 1"):
        train._prompts_to_check(own, tiny.PATH)
