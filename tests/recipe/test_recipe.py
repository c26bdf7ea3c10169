"""Recipes: what is typed is what runs, and what cannot run is refused in one sentence."""

import re
import typing

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from qrl import names, recipe, tasks
from qrl.errors import BadInput
from qrl.recipe import Train, documents, sections
from qrl.recipe.load import RENAMED
from qrl.tasks import prompt


@pytest.mark.parametrize("name", recipe.names())
def test_every_shipped_recipe_loads_and_dumps_to_itself(name, tmp_path):
    loaded = recipe.load(name)
    path = tmp_path / "again.yaml"
    path.write_text(loaded.dump())
    assert recipe.load(str(path)) == loaded


def test_every_field_reads_back_the_text_that_it_is_logged_as():
    loaded = recipe.load("tiny")
    assert recipe.load("tiny", loaded.flat()) == loaded


@pytest.mark.parametrize("key", ["rollout.server", "train.teacher_server"])
def test_a_servers_address_names_its_protocol(key):
    assert recipe.load("tiny", {key: "https://host:8001/"}).flat()[key] == "https://host:8001/"
    for wrong in ("localhost:8001", "ftp://127.0.0.1:9", "http://"):
        with pytest.raises(BadInput, match=key):
            recipe.load("tiny", {key: wrong})


def test_overrides_win_over_the_file():
    assert recipe.load("tiny", {"train.steps": "7", "quantize.schemes": "nf4"}).train.steps == 7
    assert recipe.load("tiny", {"quantize.schemes": "nf4"}).quantize.schemes == ("nf4",)


def test_a_model_of_the_users_own_starts_from_the_general_recipe():
    assert recipe.load("auto") == recipe.load("tiny")
    assert recipe.load("auto", {"model": "some/model"}).prompt == "answer-line"
    assert recipe.load("auto", {"model": "some/model", "task": "math"}) == recipe.load("math", {"model": "some/model"})


def test_seed_000s_recipe_is_its_run():
    loaded, floor = recipe.load("study-gsm8k-1.5b"), recipe.load("study-gsm8k-0.5b")
    assert floor == loaded.model_copy(update={"model": "Qwen/Qwen2.5-0.5B-Instruct"})
    train, asked = loaded.train, loaded.evaluate
    assert (train.selection, asked.selection, asked.n, asked.dtype) == ("first", "first", 100, "fp16")
    assert (train.steps * train.prompts_per_step, train.questions) == (2000, 1000)  # two epochs of its 1,000 prompts
    assert (train.generations, train.loss, train.scale_rewards, train.beta) == (8, "dr_grpo", "none", 0)
    assert (train.learning_rate, train.max_completion_tokens, train.temperature, train.dtype) == (
        1e-6,
        512,
        1.0,
        "bf16",
    )


def test_seed_001s_recipe_is_its_run():
    loaded = recipe.load("qwen3-8b-qlora-deepmath")
    train = loaded.train
    assert (loaded.model, loaded.task, train.storage, train.compute) == ("Qwen/Qwen3-8B", "deepmath", "nf4", "bf16")
    assert (train.lora_rank, train.lora_alpha, train.lora_targets) == (16, 32, ("q_proj", "k_proj", "v_proj", "o_proj"))
    assert (train.generations, train.beta, train.max_completion_tokens, loaded.rollout.quantization) == (
        8,
        0.01,
        2048,
        "fp8",
    )
    for wider in ("int8", "bf16"):  # a 4-bit base that proves too lossy is exchanged by this key alone
        assert recipe.load("qwen3-8b-qlora-deepmath", {"train.base_storage": wider}).train == train.model_copy(
            update={"base_storage": wider}
        )


@pytest.mark.parametrize("size", ["0.6B", "1.7B", "4B", "8B"])
def test_seed_002s_recipes_are_its_runs(size):
    model = {"model": f"Qwen/Qwen3-{size}"}
    adapter, full, quantized = (
        recipe.load(f"qwen3-math-{name}", model | more)
        for name, more in (("qlora", {}), ("full", {}), ("full", {"train.qat": "int8-attention"}))
    )
    assert (adapter.train.method, adapter.train.storage, adapter.train.lora_rank, adapter.train.lora_alpha) == (
        "qlora",
        "nf4",
        8,
        16,
    )
    assert [each.train.learning_rate for each in (adapter, full, quantized)] == [1e-4, 1e-6, 1e-6]
    for each in (adapter, full, quantized):
        assert each.task == "math" and each.model == model["model"]
        assert each.train.steps * each.train.prompts_per_step == each.train.questions == 10_000  # one epoch


@pytest.mark.parametrize("format", ["nvfp4-a16", "nvfp4-a4"])
def test_seed_003s_llama_recipes_train_its_model_in_the_format_that_they_store(format):
    loaded = recipe.load(f"llama-8b-qat-{format}")
    train = loaded.train
    assert (loaded.model, train.qat, train.method) == ("meta-llama/Llama-3.1-8B-Instruct", format, "full")
    assert train.steps * train.prompts_per_step == train.questions == 10_000  # one epoch
    assert loaded.chat.template_kwargs == {}  # a variable that Llama's chat template lacks is refused
    assert (train.parallel, loaded.rollout.engine, loaded.rollout.mode) == ("fsdp2", "vllm", "colocate")
    assert loaded.quantize.schemes == (f"rtn-{format}",)
    assert [stage.cell for stage in loaded.promote.stages][1:] == [f"qat-{format}:full", f"qat-{format}:rtn-{format}"]


@pytest.mark.parametrize(
    ("key", "text", "says"),
    [
        ("train.steps", "banana", "must be a valid integer"),
        ("train.steps", "0", "greater than or equal to 1"),
        ("train.gradient_checkpointing", "maybe", "must be true or false"),
        ("train.stpes", "3", "did you mean 'train.steps'"),
        ("train.loss", "ppo", "'grpo', 'dr_grpo', 'dapo' or 'bnpo'"),
        ("train.generations", "1", "greater than or equal to 2"),
        ("quantize.schemes", "nf4,gguf", "'nf4', 'int8', 'awq'"),
        ("quantize.group_size", "100", "32, 64 or 128"),
        ("evaluate.min_eos_rate", "1.5", "less than or equal to 1"),
        ("task", "trivia", "math, deepmath or FILE.py"),
        ("train.learning_rate", "inf", "must be a finite number"),
        ("train.learning_rate", "1e300", "less than or equal to 1"),
        ("train.steps", "99999999999999999999", "less than or equal to 1000000"),
        ("train.generations", "100000", "less than or equal to 4096"),
        ("train.micro_batch", "99999999999999999999", "less than 2147483648"),
        ("watch.max_reference_kl", "nan", "must be a finite number"),
        ("quantize.calibration_samples", "999999999", "less than or equal to 100000"),
        ("benchmark.batches", "1,1", "is '1,1', but must name at least one batch"),
        ("train.lora_targets", " ,", "which names nothing"),
        ("train.lora_targets", "q_proj,v_proj,q_proj", "must name each linear once"),
        ("watch.stop", "kl,kl", "must name each watcher once"),
        ("rollout.kv_cache", "int8", "'auto' or 'fp8'"),
        ("nonsense", "1", "not a key"),
        ("train.selection", "last", "must be 'random' or 'first'"),
        ("chat.template_kwargs", "thinking", 'must be JSON, such as {"name": false}'),
        ("chat.template_kwargs", "{a: ", "is not valid YAML"),
        ("prompt", "{user: 'Solve it.'}", "no `user` with {question}"),
        ("data", "d\udcff", "which is not in UTF-8"),
    ],
)
def test_bad_values_are_refused_in_one_sentence_that_names_key_and_allowed_values(key, text, says):
    with pytest.raises(BadInput) as refused:
        recipe.load("tiny", {key: text})
    assert key in str(refused.value) and says in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ("train: fast", "'train' is a section of the recipe, but its value is 'fast'"),
        ("train:\n  steps: 3\n  seed: 1\n  steps: 4", "'steps' is given twice"),
        ("train: {steps: true}", "'train.steps' is True, but a number was expected"),
        ("train: {rewards: 5}", "'train.rewards' is 5, but must be a list"),
        ("train: {reward_weights: [0]}", "'train.reward_weights' is [0], but must hold a number other than 0"),
        ("train.steps: 3", "write 'steps' below 'train'"),
        ("seed: 1:30", "'seed' is '1:30', but must be a valid integer"),
        ("seed: 0x10", "'seed' is '0x10', but must be a valid integer"),
        ("5: 3", "'5' is not a key of a recipe"),
        ("train: {5: 3}", "'train.5' is not a key of a recipe"),
        ("{a: " * 3000 + "1" + "}" * 3000, "is nested hundreds deep"),
    ],
)
def test_a_recipe_file_that_means_nothing_is_refused_in_one_sentence(document, says, tmp_path):
    (tmp_path / "own.yaml").write_text(document)
    with pytest.raises(BadInput) as refused:
        recipe.load(str(tmp_path / "own.yaml"))
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_a_file_that_is_read_again_is_not_what_a_reader_made_of_it(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text("train: {steps: 3}")
    documents.parse(path, "It")["train"]["steps"] = 4
    assert documents.parse(path, "It") == {"train": {"steps": 3}}


def test_in_a_recipe_file_a_list_is_written_as_it_is_typed_and_an_empty_section_has_its_defaults(tmp_path):
    (tmp_path / "own.yaml").write_text("train:\nquantize:\n  schemes: nf4, int8\n")
    loaded = recipe.load(str(tmp_path / "own.yaml"), {"train.steps": "7"})
    assert loaded.quantize.schemes == ("nf4", "int8") and loaded.train == Train(steps=7)


def test_a_recipe_file_means_what_the_same_words_mean_on_the_command_line(tmp_path):
    words = {
        "rollout.sleep": "off",
        "train.steps": "010",
        "train.teacher": "none",
        "data": "none",
        "seed": "1_000",
        "quantize.bits": "8",
        "train.lora_rank": "8",
    }
    nested = {}
    for key, text in words.items():
        section, _, name = key.rpartition(".")
        nested.setdefault(section, []).append(f"{name}: {text}")
    lines = [*nested.pop(""), *(f"{section}: {{{', '.join(pairs)}}}" for section, pairs in nested.items())]
    (tmp_path / "own.yaml").write_text("\n".join(lines))
    (tmp_path / "empty.yaml").write_text("")
    loaded = recipe.load(str(tmp_path / "own.yaml"))
    assert loaded == recipe.load(str(tmp_path / "empty.yaml"), words)
    assert (loaded.rollout.sleep, loaded.train.steps, loaded.train.teacher, loaded.seed) == ("off", 10, None, 1000)


@pytest.mark.parametrize("document", ["- a list", "a: [", "train: 3", "train: {stepz: 3}", "stepz: 3"])
def test_a_file_that_is_no_recipe_is_refused(document, tmp_path):
    path = tmp_path / "broken.yaml"
    path.write_text(document)
    with pytest.raises(BadInput):
        recipe.load(str(path))


def test_an_unknown_recipe_lists_the_known_ones():
    with pytest.raises(BadInput, match="tiny"):
        recipe.load("tinny")


@pytest.mark.process
@given(st.sampled_from(sorted(recipe.fields())), st.text(max_size=20))
def test_any_text_for_any_field_gives_a_recipe_or_a_sentence(key, text):
    try:
        loaded = recipe.load("tiny", {key: text})
    except BadInput as refused:
        assert str(refused).endswith(".")
    else:
        assert yaml.safe_load(loaded.dump())


def test_the_schemes_to_choose_from_are_those_of_the_package():
    assert typing.get_args(sections.Scheme) == names.QUANTIZED_SCHEMES


def test_a_recipe_that_extends_another_holds_only_what_differs(tmp_path):
    (tmp_path / "more").mkdir()
    (tmp_path / "parent.yaml").write_text("extends: tiny\ntrain: {steps: 7, qat: int4}\nseed: 3")
    (tmp_path / "more" / "own.yaml").write_text("extends: ../parent.yaml\ntrain: {steps: 9}\nquantize:\n")
    loaded = recipe.load(str(tmp_path / "more" / "own.yaml"), {"quantize.bits": "8"})
    changed = {"train.steps": "9", "train.qat": "int4", "seed": "3", "quantize.bits": "8"}
    assert loaded == recipe.load("tiny", changed)
    assert "extends" not in loaded.dump()


@pytest.mark.parametrize(
    ("extends", "says"),
    [
        ("tinny", ("'tinny'", "expected one of", "tiny-lora", ".yaml")),
        ("absent.yaml", ("'absent.yaml'", "relative to")),
        ("[tiny]", ("['tiny']", "expected one of")),
        ("own.yaml", ("extends itself", "own.yaml → own.yaml")),
        ("other.yaml", ("extends itself", "own.yaml → other.yaml → own.yaml")),
    ],
)
def test_a_recipe_that_extends_itself_or_nothing_is_refused(extends, says, tmp_path):
    (tmp_path / "own.yaml").write_text(f"extends: {extends}")
    (tmp_path / "other.yaml").write_text("extends: own.yaml")
    with pytest.raises(BadInput) as refused:
        recipe.load(str(tmp_path / "own.yaml"))
    assert all(part in str(refused.value) for part in says) and "\n" not in str(refused.value)


@pytest.mark.parametrize(("former", "present"), RENAMED.items())
def test_a_former_key_names_the_present_one_in_options_and_files(former, present, tmp_path):
    section, name = former.split(".")
    (tmp_path / "own.yaml").write_text(f"{section}: {{{name}: 1}}")
    for name_or_path, overrides in (("tiny", {former: "1"}), (str(tmp_path / "own.yaml"), {})):
        with pytest.raises(BadInput, match=f"'{former}' is now called '{present}'"):
            recipe.load(name_or_path, overrides)


def test_a_recipe_that_an_older_version_recorded_is_read(tmp_path):
    (tmp_path / "old.yaml").write_text("train: {clip: 0.3}\nmerge: {max_logit_diff: 0.25}\n")
    read = recipe.stored(tmp_path / "old.yaml")
    assert read.train.epsilon == 0.3 and read.merge.max_kl == recipe.Recipe().merge.max_kl
    with pytest.raises(BadInput, match=r"merge\.max_kl limits the KL instead, in nats per token"):
        recipe.load("tiny", {"merge.max_logit_diff": "0.25"})


def test_the_prompts_description_names_every_template():
    assert all(name in recipe.fields()["prompt"][1] for name in prompt.TEMPLATES)


def test_every_task_is_a_choice_and_every_recipes_prompt_asks_for_the_form_that_its_task_grades():
    for task in tasks.TASKS:
        assert recipe.load("tiny", {"task": task}).task == task and task in recipe.fields()["task"][1]
    for name in recipe.names():
        loaded = recipe.load(name)
        prompt.check_task(loaded.task, loaded.prompt)


def test_a_prompt_file_of_an_impossible_name_is_refused(tmp_path):
    (tmp_path / "own.yaml").write_text('prompt: "a\\0.yaml"')
    with pytest.raises(BadInput, match="There is no prompt file"):
        recipe.load(str(tmp_path / "own.yaml"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("user: '{question}'\nsytem: Be brief.", "has the key 'sytem', but only user, system and tasks"),
        ("user: Solve it.", "has no `user` with {question}"),
        ("system: Be brief.", "has no `user` with {question}"),
        ("user: 5", "has no `user` with {question}"),
        ("user: '{question}'\nsystem: ' '", "`system` that is empty"),
        ("user: '{question}'\ntasks: gsm8k", "`tasks` that are no list"),
        ("user: '{question}'\ntasks: []", "`tasks` that are no list"),
        ("user: '{question}'\nuser: '{question}!'", "'user' is given twice"),
        ("user: {question", "is not valid YAML"),
        ("user: '{question}" + "a" * 6000 + "'", "is too long: 6,0"),
        ("#" * 60_001, "is too long: 60,001 bytes"),
        ("- '{question}'", "holds a list"),
        ("", "has no `user`"),
        ("user: '{question}'".encode("utf-16"), "is in UTF-16"),
        ("user: '{question}'".encode("utf-16-be"), "iconv -f UTF-16BE"),
        (None, "There is no prompt file"),
    ],
)
def test_a_prompt_file_that_cannot_be_used_is_refused_in_one_sentence(text, says, tmp_path):
    path = tmp_path / "own.yaml"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(BadInput) as refused:
        recipe.load("tiny", {"prompt": str(path)})
    assert "own.yaml" in str(refused.value) and says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_recipe_holds_the_contents_of_its_prompt_file_so_that_the_file_may_go(tmp_path):
    (tmp_path / "own.yaml").write_text('system: Be brief.\nuser: "Q: {question}\\nA:"\ntasks: [arithmetic]')
    (tmp_path / "study.yaml").write_text("extends: tiny\nprompt: own.yaml")  # beside the recipe, wherever it is run
    loaded = recipe.load(str(tmp_path / "study.yaml"))
    assert recipe.load("tiny", {"prompt": str(tmp_path / "own.yaml")}) == loaded
    (tmp_path / "own.yaml").unlink()
    (tmp_path / "kept.yaml").write_text(loaded.dump())
    assert recipe.load(str(tmp_path / "kept.yaml")) == recipe.load("tiny", loaded.flat()) == loaded
    assert yaml.safe_load(loaded.dump())["prompt"] == {
        "system": "Be brief.",
        "user": "Q: {question}\nA:",
        "tasks": ["arithmetic"],
    }
    assert [turn["content"] for turn in prompt.messages("1?", prompt.of_recipe(loaded))] == ["Be brief.", "Q: 1?\nA:"]
    with pytest.raises(BadInput, match="is for arithmetic, as its `tasks` say, but the task is gsm8k"):
        prompt.check_task("gsm8k", loaded.prompt)


def test_what_a_run_recorded_of_a_mapping_is_read_back_as_it_was():
    typed = '{"a": 0.00001, "b": "\\u0085 on", "c": [1, true]}'
    once = recipe.load("tiny", {"chat.template_kwargs": typed})
    assert once.chat.template_kwargs == {"a": 1e-05, "b": "\x85 on", "c": [1, True]}
    again = recipe.load("tiny", {"chat.template_kwargs": once.flat()["chat.template_kwargs"]})
    assert again.chat == once.chat
    with pytest.raises(BadInput, match="given twice"):
        recipe.load("tiny", {"chat.template_kwargs": '{"a": 1, "a": 2}'})


def test_a_users_reward_does_not_take_the_name_of_something_else_that_training_logs():
    with pytest.raises(BadInput, match="by that name: rename"):
        recipe.load("tiny", {"train.rewards": "correct,mine.py:std"})


def test_qwen3_answers_without_thinking_within_the_default_health_limits():
    limits = [key for key in recipe.fields() if re.match(r"evaluate\.(min|max)_.*_rate", key)]
    named = [recipe.load(name) for name in recipe.names() if "qwen3" in name]
    assert len(limits) == 5 and len(named) == 5
    for loaded in named:
        assert loaded.chat.template_kwargs == {"enable_thinking": False}
        assert all(loaded.flat()[key] == recipe.load("tiny").flat()[key] for key in limits)


def test_a_recipe_says_whether_it_needs_a_gpu_and_those_that_extend_it_inherit_it(tmp_path):
    (tmp_path / "own.yaml").write_text("extends: instruct\ntrain: {steps: 3}")
    (tmp_path / "small.yaml").write_text("extends: own.yaml\nmachine: any")
    assert recipe.needs_gpu(str(tmp_path / "own.yaml")) and not recipe.needs_gpu(str(tmp_path / "small.yaml"))
    assert not recipe.needs_gpu("auto") and not recipe.needs_gpu("tiny-qlora")
    assert recipe.load(str(tmp_path / "own.yaml")).train.steps == 3
    (tmp_path / "own.yaml").write_text("machine: toaster")
    with pytest.raises(BadInput, match="machine: 'toaster', but gpu or any"):
        recipe.load(str(tmp_path / "own.yaml"))


def test_what_auto_stands_for_depends_on_model_task_and_device():
    own = {"model": "some/model"}
    assert [recipe.default(typed) for typed in ({}, own, {"task": "math"})] == ["tiny", "instruct", "math"]
    assert recipe.default(own, device="cpu") == "instruct-cpu" and recipe.default({}, device="cpu") == "tiny"
    assert recipe.load("math-cpu").prompt == "boxed" and recipe.load("instruct-cpu").train.compute == "fp32"


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ({"quantize.schemes": "nf4,nf5"}, r"'nf5' \(did you mean 'nf4'\?\), but must be 'nf4'"),
        ({"quantize.schemes": "nf4,int4"}, r"'int4' \(did you mean 'gptq', 'awq' or 'nf4'\?\), but must be 'nf4'"),
        ({"rollout.engine": "vlm"}, r"'vlm' \(did you mean 'vllm'\?\)"),
        ({"rollout.engine": "zzz"}, r"'zzz', but must be"),
    ],
)
def test_a_misspelt_choice_is_answered_with_the_nearest(typed, says):
    with pytest.raises(BadInput, match=says):
        recipe.load("tiny", typed)


def test_a_misspelt_recipe_is_answered_with_the_nearest():
    with pytest.raises(BadInput, match=r"'tiny-qlor' \(did you mean 'tiny-qlora'\?\): expected one of"):
        recipe.load("tiny-qlor")


def test_an_adapter_has_a_learning_rate_of_its_own_where_none_is_given(tmp_path):
    def rate(name: str = "tiny", **overrides: str) -> float:
        return recipe.load(name, {f"train.{key}": text for key, text in overrides.items()}).train.learning_rate

    full = rate()
    for method in ("lora", "qlora"):
        assert rate(method=method) == pytest.approx(10 * full)  # the recipe's is for all weights
        assert rate(method=method, learning_rate="2e-5") == 2e-5
    assert rate("instruct", method="lora") == 1e-5
    assert rate("tiny-lora", method="qlora") == rate("tiny-lora") == rate("tiny-qlora") == 1e-3
    assert rate("tiny-lora", method="full") == 1e-4
    assert recipe.load("qwen3-8b-qlora-deepmath").train.learning_rate == 1e-5  # its own, below another adapter's

    file = tmp_path / "mine.yaml"
    for text, expected in (
        ("train: {method: lora}", 3e-4),
        ("train: {method: full}", 3e-5),
        ("train: {method: lora, learning_rate: 5e-6}", 5e-6),
        ("extends: instruct\ntrain: {method: lora}", 1e-5),
        ("extends: instruct\ntrain: {method: lora, learning_rate: 5e-6}", 5e-6),
        ("extends: instruct\ntrain: {lora_rank: 8}", 1e-6),
    ):
        file.write_text(text)
        assert rate(str(file)) == expected
    with pytest.raises(BadInput, match="learning_rate"):
        rate(method="lora", learning_rate="fast")
