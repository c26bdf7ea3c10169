"""`chat.template_kwargs`: the same ids in training, calibration, evaluation, serving; refused where without effect."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import mlflow
import pytest

from qrl import checkpoint, recipe, tiny
from qrl.engine import hf
from qrl.errors import BadInput
from qrl.recipe import Rollout
from qrl.serve import engines, requests, transformers_server
from qrl.steps import evaluate, quantize, train
from qrl.study import preflight
from qrl.tasks import load, prompt, question_sets
from qrl.tracking import description, origin
from qrl.train import Job, grpo

# The part of Qwen3's template that decides about thinking.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
QUESTIONS = load("arithmetic", "train", 8, 0)
OFF = {"enable_thinking": False}


@pytest.fixture(scope="module")
def thinking(tmp_path_factory) -> Path:
    """The shipped model with a chat template that has a variable."""
    folder = tmp_path_factory.mktemp("thinking") / "model"
    shutil.copytree(tiny.PATH, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def settings(folder: Path, **more: str) -> recipe.Recipe:
    return recipe.load("tiny", {"model": str(folder), "chat.template_kwargs": json.dumps(OFF)} | more)


@pytest.mark.process
def test_training_calibration_evaluation_and_serving_see_the_same_ids(thinking, tmp_path, monkeypatch):
    own, question, seen = settings(thinking), QUESTIONS[0], {}
    tokens = hf.tokenizer(thinking)
    seen["evaluation"] = prompt.render(tokens, question.question, prompt.of_recipe(own))
    assert tokens.decode(seen["evaluation"]).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert (
        prompt.render(tokens, question.question, "plain")
        == seen["evaluation"][: -len(tokens("<think>\n\n</think>\n\n").input_ids)]
    )

    texts = SimpleNamespace(recipe=own)
    (text,) = quantize.Texts._rendered(texts, thinking, [(question, True)])
    ids = tokens(text, add_special_tokens=False)["input_ids"]
    seen["calibration"] = ids[: len(seen["evaluation"])]
    assert tokens.decode(ids[len(seen["evaluation"]) :]) == question.solution + tokens.eos_token

    small = own.train.model_copy(update={"prompts_per_step": 2, "generations": 2, "micro_batch": 4, "steps": 1})
    data = {"base": thinking, "questions": QUESTIONS, "task": "arithmetic", "rollout": Rollout()}
    where = {"seed": 0, "device": "cpu", "work": tmp_path / "work", "out": tmp_path / "out"}
    trainer = grpo.make_trainer(Job(settings=small, template=prompt.of_recipe(own), **data, **where))
    rows = {row["answer"]: row["prompt"] for row in trainer.train_dataset}
    seen["training"] = trainer._tokenize_prompts([rows[question.answer]])[0][0]

    messages = prompt.messages(question.question, prompt.of_recipe(own))
    server = transformers_server.Model(thinking, "cpu", "fp32", OFF)
    body = json.dumps({"model": "any", "messages": messages}).encode()
    seen["serving"] = server.prompt(requests.parse(requests.Chat, body))
    version = engines.ServedModel("thinking", 1, thinking, chat=OFF)
    for engine, option in ((engines.TRANSFORMERS, "--chat"), (engines.VLLM, "--default-chat-template-kwargs")):
        words = engines.arguments(engine, version, ("127.0.0.1", 1), tmp_path)
        assert json.loads(words[words.index(option) + 1]) == OFF

    stored = tmp_path / "stored"
    (stored / "model").mkdir(parents=True)
    for file in thinking.iterdir():
        shutil.copy(file, stored / "model")
    before = checkpoint.digest(stored / "model")
    model = SimpleNamespace(artifact_location=str(stored), source_run_id="0" * 32, model_id="m-" + "0" * 32)
    description.write(stored, model, {"scheme": "full", description.CHAT: json.dumps(OFF)})
    flavor = hf.tokenizer(stored / "components" / "tokenizer")  # of pyfunc and MLflow's own loader
    seen["pyfunc"] = flavor.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert checkpoint.digest(stored / "model") == before
    assert {name: tokens.decode(ids) for name, ids in seen.items() if ids != seen["evaluation"]} == {}


def test_a_variable_that_the_template_lacks_is_refused_before_a_model_is_loaded(thinking, monkeypatch):
    monkeypatch.setattr(hf, "load", None)
    plain, wrong = settings(tiny.PATH), settings(thinking, **{"chat.template_kwargs": '{"thinking": false}'})
    for own, says in ((plain, "which has none"), (wrong, "which has enable_thinking")):
        for step in (
            lambda own=own: preflight.check(own, {}),
            lambda own=own: train.train(own),
            lambda own=own: evaluate.check_cells(own, None),
            lambda own=own: quantize.check_sources(own, None),
        ):
            with pytest.raises(BadInput, match=f"no variable of the model's chat template, {says}: leave it out"):
                step()
    for name in ("messages", "add_generation_prompt", "tokenize", "eos_token", "raise_exception"):
        own = settings(thinking, **{"chat.template_kwargs": json.dumps({name: False})})
        with pytest.raises(BadInput, match=f"sets '{name}'"):
            question_sets.check_chat(own, thinking)
    question_sets.check_chat(settings(thinking), thinking)


def test_the_readmes_prompt_runs_and_is_kept_with_the_run_when_its_file_is_gone(store, tmp_path):
    text = (Path(prompt.__file__).parent / "README.md").read_text().partition("```yaml\n")[2].partition("```")[0]
    file = tmp_path / "my-prompt.yaml"
    file.write_text(text)
    small = {"evaluate.n": "4", "evaluate.max_new_tokens": "4", "prompt": str(file), "device": "cpu"}
    limits = ("max_truncation_rate=1", "min_eos_rate=0", "min_parse_rate=0", "max_prompt_leak_rate=1")
    own = recipe.load("tiny", small | dict(f"evaluate.{limit}".split("=") for limit in limits))
    file.unlink()
    evaluate.evaluate(own, None)
    (run,) = mlflow.search_runs(filter_string="params.variant = 'base'", output_format="list")
    assert run.data.params["prompt_hash"] == prompt.template_hash(own.prompt)
    (found,) = origin.find(run.info.run_id)  # what `qrl compare --cells RUN`, say, or a later step inherits
    inherited = recipe.load("auto", found.values)
    system, user = prompt.messages("1 + 1?", prompt.of_recipe(inherited))
    assert system["content"] == "You are a careful tutor." and user["content"].startswith("1 + 1?\n\nEnd with a line")
    with pytest.raises(BadInput, match="the task is math"):
        prompt.check_task("math", inherited.prompt)


@pytest.mark.parametrize("value", [False, None, 3, -0.5, 'it\'s "%}" ü\n', ["a", {"b": True}], {}])
def test_a_fixed_variable_renders_as_a_given_one(value):
    from transformers.utils.chat_template_utils import render_jinja_template

    template = (
        "\n{% macro show() %}{{ x | tojson }}{% endmacro %}{% for _ in messages %}{{ show() }}{{ x }}{% endfor %}"
    )
    turns = [[{"role": "user", "content": "1?"}]]
    given, _ = render_jinja_template(turns, chat_template=template, x=value)
    fixed, _ = render_jinja_template(turns, chat_template=prompt.with_fixed_variables(template, {"x": value}))
    assert fixed == given


def test_a_template_that_gives_its_variable_a_default_has_it(thinking):
    tokens = hf.tokenizer(thinking)
    tokens.chat_template = (
        "{% set depth = depth | default(2) %}{{ depth }}{% generation %}{{ messages }}{% endgeneration %}"
    )
    prompt.check_kwargs(tokens, prompt.Template("{question}", kwargs={"depth": 1}))
    assert tokens.decode(prompt.render(tokens, "1?", prompt.Template("{question}", kwargs={"depth": 7}))).startswith(
        "7"
    )


def test_the_hash_covers_kwargs_and_is_as_ever_without(thinking):
    ever = {"answer-line": "48618343481ba38c", "boxed": "7cb44ea61af94913", "plain": "8fac4e7d5afe56a3"}
    assert {name: prompt.template_hash(name) for name in ever} == ever
    assert prompt.template_hash(prompt.of_recipe(recipe.load("tiny"))) == ever["plain"]
    assert prompt.template_hash(prompt.of_recipe(settings(thinking))) != ever["plain"]
