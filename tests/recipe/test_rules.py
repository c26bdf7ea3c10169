"""Settings that do not go together: every rule is told by name, all at once, and printed as a table."""

import re
from pathlib import Path

import pytest

from qrl import recipe
from qrl.errors import BadInput, Objections
from qrl.recipe import Evaluate, Quantize, Recipe, Rollout, Train, Watch, rules

README = Path(rules.__file__).parent / "README.md"
VLLM = {"engine": "vllm"}
BROKEN = {  # rule → a recipe that breaks it
    "weights-match-rewards": Recipe(train=Train(rewards=("correct", "format"), reward_weights=(1,))),
    "saves-between-batches": Recipe(train=Train(num_iterations=4, save_every=10)),
    "overlong-tokens-need-their-reward": Recipe(train=Train(soft_overlong_tokens=8)),
    "overlong-tokens-are-of-a-completion": Recipe(train=Train(rewards=("soft_overlong",), soft_overlong_tokens=81)),
    "lora_rank-needs-an-adapter": Recipe(train=Train(lora_rank=8)),
    "lora_alpha-needs-an-adapter": Recipe(train=Train(lora_alpha=8)),
    "lora_targets-needs-an-adapter": Recipe(train=Train(lora_targets=("q_proj",))),
    "full-training-is-in-fp32": Recipe(train=Train(base_storage="nf4")),
    "bf16-storage-computes-in-bf16": Recipe(train=Train(method="lora", base_storage="bf16", dtype="fp32")),
    "merge-stores-an-adapter": Recipe(train=Train(method="lora", store_dtype="fp32")),
    "processes-need-parallel": Recipe(train=Train(processes=2)),
    "qat-trains-all-weights": Recipe(train=Train(qat="int8", method="lora")),
    "calibration-needs-qat": Recipe(train=Train(qat_calibration="texts.jsonl")),
    "qat-layers-need-qat": Recipe(train=Train(qat_layers=("mlp",))),
    "qat-layers-are-stored-as-trained": Recipe(train=Train(qat="int4", qat_layers=("mlp",))),
    "attention-has-layers-of-its-own": Recipe(
        train=Train(qat="int8-attention", qat_layers=("mlp",)), quantize=Quantize(schemes=("nf4",), layers=("mlp",))
    ),
    "sft-has-no-teacher": Recipe(train=Train(algorithm="sft", teacher="m")),
    "sft-has-no-qat": Recipe(train=Train(algorithm="sft", qat="int8")),
    "sft-trains-all-weights": Recipe(train=Train(algorithm="sft", method="lora")),
    "sft-stops-by-the-probe": Recipe(train=Train(algorithm="sft"), watch=Watch(stop=("entropy",))),
    **{
        f"raft-has-no-{section}.{key}": Recipe(**{section: {"algorithm": "raft", key: text}})
        for section, key, text in (
            ("train", "teacher", "m"),
            ("train", "qat", "int8"),
            ("train", "beta", 0.1),
            ("train", "max_resamples", 2),
            ("train", "loss", "dapo"),
            ("train", "importance_sampling_level", "sequence"),
            ("train", "epsilon", 0.1),
            ("train", "epsilon_high", 0.3),
            ("train", "scale_rewards", "group"),
        )
    },
    "raft-has-no-rollout.is_correction_max": Recipe(
        train=Train(algorithm="raft"), rollout=Rollout(is_correction_max=3.0, **VLLM)
    ),
    "raft-corrects-no-engine": Recipe(
        train=Train(algorithm="raft"), rollout=Rollout(is_correction="sequence_mask", **VLLM)
    ),
    "raft-measures-the-gap-at-temperature-1": Recipe(
        train=Train(algorithm="raft", temperature=0.7), rollout=Rollout(**VLLM)
    ),
    "raft-stops-by-what-it-measures": Recipe(train=Train(algorithm="raft"), watch=Watch(stop=("kl", "entropy"))),
    "raft-knows-no-right-answer-of-own-rewards": Recipe(
        train=Train(algorithm="raft", rewards=("correct", "mine.py:short"))
    ),
    "min-kept-reward-needs-raft": Recipe(train=Train(min_kept_reward=1.0)),
    "distillation-has-no-mask_truncated": Recipe(train=Train(teacher="m", mask_truncated=True)),
    "distillation-has-no-max_resamples": Recipe(train=Train(teacher="m", max_resamples=1)),
    "distillation-has-no-watchers": Recipe(train=Train(teacher="m"), watch=Watch(probe_every=2)),
    "distillation-trains-all-weights": Recipe(train=Train(teacher="m", method="lora")),
    "placement-needs-a-teacher": Recipe(train=Train(teacher_placement="sharded")),
    "teacher-server-needs-its-placement": Recipe(train=Train(teacher="m", teacher_server="http://a:1")),
    "stop-kl-needs-its-measure": Recipe(watch=Watch(stop=("kl",))),
    "stop-probe-needs-its-measure": Recipe(watch=Watch(stop=("probe",))),
    "stop-resample-needs-its-measure": Recipe(watch=Watch(stop=("resample",))),
    "stop-rollout-needs-its-measure": Recipe(watch=Watch(stop=("rollout",))),
    "kv_cache-is-ignored-by-engine-transformers": Recipe(rollout=Rollout(kv_cache="fp8")),
    "server-is-ignored-by-mode-colocate": Recipe(rollout=Rollout(server="http://a:1", **VLLM)),
    "sleep-is-ignored-by-mode-server": Recipe(rollout=Rollout(mode="server", sleep="on", **VLLM)),
    "max_engine_kl-is-ignored-by-is_correction-none": Recipe(
        rollout=Rollout(is_correction="none", max_engine_kl=1, **VLLM)
    ),
    "real-codes-need-their-format": Recipe(rollout=Rollout(quantization="real", **VLLM)),
    "a-server-rounds-inputs-of-all-linears": Recipe(
        train=Train(qat="fp8", qat_layers=("mlp",)),
        rollout=Rollout(mode="server", **VLLM),
        quantize=Quantize(schemes=("rtn-fp8",), layers=("mlp",)),
    ),
    "real-codes-need-an-engine-within-training": Recipe(
        train=Train(qat="int4"), rollout=Rollout(quantization="real", mode="server", **VLLM)
    ),
    "codes-are-rounded-once": Recipe(train=Train(qat="int4"), rollout=Rollout(quantization="fp8", **VLLM)),
    "a-slot-holds-an-adapter": Recipe(rollout=Rollout(adapter="slot", **VLLM)),
    "a-slot-needs-an-engine-within-training": Recipe(
        train=Train(method="lora"), rollout=Rollout(adapter="slot", mode="server", **VLLM)
    ),
    "a-slot-needs-an-unquantized-engine": Recipe(
        train=Train(method="lora"), rollout=Rollout(adapter="slot", quantization="fp8", **VLLM)
    ),
    "a-slot-holds-ranks-up-to-its-limit": Recipe(
        train=Train(method="lora", lora_rank=513), rollout=Rollout(adapter="slot", **VLLM)
    ),
    "a-server-reports-the-truncated-distribution": Recipe(
        train=Train(top_p=0.9), rollout=Rollout(mode="server", **VLLM)
    ),
    "an-engine-reports-temperature-1": Recipe(train=Train(top_p=0.9, temperature=0.7), rollout=Rollout(**VLLM)),
    "verl-has-no-train.schedule-linear": Recipe(
        train=Train(trainer="verl", schedule="linear"), rollout=Rollout(**VLLM)
    ),
    "verl-has-no-train.min_p": Recipe(train=Train(trainer="verl", min_p=0.1), rollout=Rollout(**VLLM)),
    "verl-stores-the-base-in-fp32": Recipe(
        train=Train(trainer="verl", method="lora", base_storage="bf16"), rollout=Rollout(**VLLM)
    ),
    "layers-need-a-scheme-that-can-leave-some-out": Recipe(quantize=Quantize(schemes=("awq",), layers=("mlp",))),
    "mixed-formats-need-a-scheme-that-can-hold-them": Recipe(
        quantize=Quantize(schemes=("gptq", "nf4"), layers=("mlp=fp8",))
    ),
    "rtn-file-needs-its-file": Recipe(quantize=Quantize(schemes=("rtn-file",))),
    "awq-has-no-rollouts": Recipe(quantize=Quantize(schemes=("awq",), calibration="rollouts")),
    "kv-fp8-of-a-scheme-that-is-made": Recipe(evaluate=Evaluate(kv_fp8=("gptq",), **VLLM)),
    "kv-fp8-needs-vllm": Recipe(evaluate=Evaluate(kv_fp8=("awq",))),
}
WARNED = {
    "temperature-needs-samples": Recipe(evaluate=Evaluate(temperature=0.7)),
    "deterministic-needs-vllm": Recipe(evaluate=Evaluate(deterministic=True)),
    "kv-scales-need-a-cell": Recipe(quantize=Quantize(schemes=("fp8",), kv_cache="fp8")),
    "unpacked-needs-vllm": Recipe(evaluate=Evaluate(unpacked=True)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_recipe_that_breaks_one_rule_is_refused_with_its_name_and_its_field(name):
    (rule,) = [rule for rule in rules.RULES if rule.name == name]
    with pytest.raises(BadInput) as refused:
        rules.check(BROKEN[name])
    assert (refused.value.rules, refused.value.causes[0].field) == ([name], rule.field)
    assert str(refused.value) == rule.sentence(BROKEN[name]) and "{" not in str(refused.value)


def test_all_tokens_of_a_completion_may_be_overlong():
    most = Train().max_completion_tokens
    rules.check(Recipe(train=Train(rewards=("soft_overlong",), soft_overlong_tokens=most)))


@pytest.mark.parametrize("name", WARNED)
def test_a_setting_without_effect_is_only_warned_of(name):
    rules.check(WARNED[name])
    (sentence,) = rules.warnings(WARNED[name])
    assert next(rule for rule in rules.RULES if rule.name == name).sentence(WARNED[name]) == sentence


def test_every_rule_is_broken_by_a_test_or_made_from_a_table_that_has_one():
    generated = re.compile(r"verl-has-no-|\w+-is-ignored-by-")
    by_hand = {rule.name for rule in rules.RULES if not generated.match(rule.name)}
    assert by_hand == {name for name in (BROKEN | WARNED) if not generated.match(name)}
    names = [rule.name for rule in rules.RULES]
    assert len(set(names)) == len(names)


def test_all_that_is_wrong_is_told_at_once():
    wrong = Recipe(train=Train(lora_rank=8, processes=2), rollout=Rollout(kv_cache="fp8"))
    with pytest.raises(BadInput, match=r"^3 things to correct:\n- train\.lora_rank is set") as refused:
        rules.check(wrong)
    expected = ["lora_rank-needs-an-adapter", "processes-need-parallel", "kv_cache-is-ignored-by-engine-transformers"]
    assert refused.value.rules == expected
    objections = Objections()
    objections.keep(rules.check, wrong)
    objections.keep(rules.check, wrong)  # each sentence once
    assert [error.rule for error in objections.errors] == expected


def test_a_field_is_a_key_of_a_recipe():
    keys = recipe.fields()
    assert {rule.field for rule in rules.RULES} <= keys.keys()


@pytest.mark.parametrize("name", recipe.names())
def test_no_shipped_recipe_breaks_a_rule(name):
    loaded = recipe.load(name)
    rules.check(loaded)
    assert rules.warnings(loaded) == []


def test_the_readme_has_the_table():
    begin, end = "<!-- rules: recipe/rules.py -->\n", "<!-- /rules -->"
    shown = README.read_text(encoding="utf-8").partition(begin)[2].partition(end)[0]
    assert shown.strip() == rules.markdown().strip()
