"""A recipe for another model leaves out what a model lacks, with a line; what is typed is refused instead."""

import json
import shutil

import pytest

from qrl import recipe, tiny
from qrl.engine import hf
from qrl.errors import BadInput, Objections
from qrl.recipe import rules
from qrl.study import fit, preflight
from qrl.tasks import question_sets

MADE_FOR_OTHERS = [name for name in recipe.names() if recipe.load(name).model != "qrl-tiny"]


def replaced(name: str, **typed: str) -> dict[str, str]:
    return fit.replacements(name, {"model": "qrl-tiny", "device": "cpu"} | typed)


@pytest.mark.process
@pytest.mark.parametrize("name", MADE_FOR_OTHERS)
def test_each_recipe_for_another_model_can_be_tried_on_the_shipped_one(name, capsys):
    typed = {"model": "qrl-tiny", "device": "cpu"}
    new = fit.replacements(name, dict(typed))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(new) and all(f"of recipe {name}" in line and "is left out" in line for line in lines)
    tried = recipe.load(name, typed | new)
    assert (tried.task, tried.data, tried.chat.template_kwargs) == ("arithmetic", None, {})
    assert tried.prompt in ("plain", "answer-line")  # both elicit what the task grades
    assert max(tried.train.max_completion_tokens, tried.evaluate.max_new_tokens) < 512
    assert tried.train.teacher in (None, "qrl-tiny")

    rules.check(tried)
    objections = Objections()
    preflight._check_base(tried, objections)
    preflight._check_machine(tried, "cpu", objections)
    assert preflight._too_long(tried, objections) == []
    objections.insist()
    assert len(question_sets.load(tried, "heldout", 20, tried.evaluate.selection)) == 20
    assert fit.replacements(name, typed | new) == {}  # a step of the study finds nothing more, and prints nothing


def test_what_is_typed_stays_and_is_refused(capsys):
    typed = {
        "chat.template_kwargs": '{"enable_thinking": false}',
        "train.max_completion_tokens": "2048",
        "evaluate.max_new_tokens": "2048",
        "task": "math",
        "prompt": "boxed",
    }
    assert replaced("qwen3-math-full", **typed) == {} and capsys.readouterr().err == ""
    own = recipe.load("qwen3-math-full", {"model": "qrl-tiny"} | typed)
    with pytest.raises(BadInput, match="no variable of the model's chat template"):
        question_sets.check_chat(own, tiny.PATH)
    assert replaced("qwen3-8b-qlora-deepmath", **{"rollout.engine": "vllm"}).keys() & {"rollout.engine"} == set()


def test_a_recipe_for_this_very_model_and_models_that_are_not_at_hand_change_nothing(tmp_path, capsys):
    assert replaced("tiny") == {} and replaced("qad-int4") == {}
    assert fit.replacements("qwen3-math-full", {"model": "Qwen/Qwen3-1.7B"}) == {}
    file = tmp_path / "mine.yaml"
    file.write_text('extends: tiny\nchat:\n  template_kwargs: {"enable_thinking": false}\n')
    assert fit.replacements(str(file), {"model": "qrl-tiny"}) == {} and capsys.readouterr().err == ""


def test_other_models_keep_what_they_have_and_lose_what_they_lack(tmp_path, capsys):
    folder = shutil.copytree(tiny.PATH, tmp_path / "model")
    template = hf.tokenizer(folder).chat_template
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{% if enable_thinking %}Think. {% endif %}" + template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    file = tmp_path / "mine.yaml"
    file.write_text(
        "extends: qwen3-8b-qlora-deepmath\ntrain:\n  lora_targets: [query_key_value]\n"
        'chat:\n  template_kwargs: {"enable_thinking": false, "depth": 3}\n'
    )
    new = fit.replacements(str(file), {"model": str(folder), "device": "cpu"})
    assert json.loads(new["chat.template_kwargs"]) == {"enable_thinking": False}
    assert new["train.lora_targets"] == "down_proj,gate_proj,k_proj,o_proj,q_proj,up_proj,v_proj"
    assert new["train.max_completion_tokens"] == new["evaluate.max_new_tokens"] == "256"
    assert new["rollout.max_model_tokens"] == "512"
    assert not {"task", "prompt", "rollout.engine"} & new.keys()  # nobody knows what a model of the user's can do
    said = capsys.readouterr().err
    assert "has no depth" in said and "has no linear query_key_value" in said and "has 512 positions" in said
