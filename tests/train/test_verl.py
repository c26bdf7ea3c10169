"""verl as the trainer: its translation, its questions, its rewards, its log, and how its processes end."""

import contextlib
import json
import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pandas as pd
import psutil
import pytest
import torch
import yaml
from safetensors.torch import save_file

from qrl import checkpoint, process, recipe, tasks, tiny
from qrl.errors import BadInput, QrlError
from qrl.recipe import Recipe, Rollout, Train, Watch, rules
from qrl.recipe.base import Section
from qrl.study import build
from qrl.tasks import prompt
from qrl.tracking import keys, places
from qrl.train import Job, policy
from qrl.train import merge as merging
from qrl.train.job import Machine
from qrl.train.verl import child, nodes, score, training, translate

VERL = {"train.trainer": "verl", "rollout.engine": "vllm"}
OTHER = {  # a value of each translated key that differs from the recipe's
    **{"train.steps": "7", "train.prompts_per_step": "5", "train.generations": "4", "train.learning_rate": "0.001"},
    **{
        "train.warmup_steps": "3",
        "train.temperature": "0.7",
        "train.top_p": "0.9",
        "train.max_completion_tokens": "33",
    },
    **{"train.epsilon": "0.3", "train.gradient_checkpointing": "true", "train.save_every": "3"},
    **{"train.keep_checkpoints": "5", "train.schedule": "cosine", "train.loss": "grpo", "train.scale_rewards": "group"},
    **{"train.importance_sampling_level": "sequence", "train.micro_batch": "4", "train.epsilon_high": "0.4"},
    **{"train.beta": "0.1", "train.method": "lora", "train.dtype": "bf16", "train.top_k": "9"},
    **{"train.rewards": "correct,format", "seed": "5", "train.parallel": "fsdp2", "train.processes": "2"},
    **{"rollout.gpu_memory_utilization": "0.4", "rollout.max_model_tokens": "99", "rollout.sleep": "off"},
    **{"rollout.is_correction": "sequence_mask", "rollout.is_correction_max": "3"},
    **{"rollout.kv_cache_gib": "2", "rollout.compile": "true"},
}
WITH = {  # what a key needs beside it
    **{f"train.lora_{name}": {"train.method": "lora"} for name in ("rank", "alpha", "targets")},
    "train.reward_weights": {"train.rewards": "correct,format"},
    "train.parallel": {"train.processes": "1"},
    "train.processes": {"train.parallel": "fsdp2", "train.processes": "1"},
}
OTHER |= {
    "train.lora_rank": "4",
    "train.lora_alpha": "9",
    "train.lora_targets": "q_proj",
    "train.reward_weights": "1,2",
}
COMPOSE = """
import json, sys
from pathlib import Path
import verl.trainer.config
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
folder = Path(sys.argv[1])
with initialize_config_dir(list(verl.trainer.config.__path__)[0], version_base=None):
    plain = compose("ppo_trainer")
with initialize_config_dir(str(folder), version_base=None):
    made = compose("recipe")
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config
validate_config(config=made, use_reference_policy=need_reference_policy(made), use_critic=need_critic(made))
actor = omega_conf_to_dataclass(made.actor_rollout_ref.actor)
omega_conf_to_dataclass(made.actor_rollout_ref.rollout)
wanted = json.loads((folder / "wanted.json").read_text())
missing = object()
unknown = [key for key in wanted if OmegaConf.select(plain, key, default=missing, throw_on_missing=False) is missing]
print("RESULT", json.dumps({
    "unknown": unknown,
    "lost": [key for key, value in wanted.items() if OmegaConf.select(made, key) != value],
    "strategies": [actor.engine.strategy, made.actor_rollout_ref.ref.strategy],
    "critic": need_critic(made), "reference": need_reference_policy(made), "dtype": actor.fsdp_config.mixed_precision,
}, default=dict))
"""
ADDED = {  # keys that verl reads and its configuration does not list, or lists without a value
    *(f"actor_rollout_ref.{part}.fsdp_config.mixed_precision.param_dtype" for part in ("actor", "ref")),
    "actor_rollout_ref.model.override_config.attn_implementation",
    translate.ADDRESS,
    training.LOG,
    "reward.custom_reward_function.reward_kwargs",
}
NULL = {  # of verl's own configuration, which `select` takes for missing
    *("trainer.total_training_steps", "trainer.max_actor_ckpt_to_keep", "trainer.rollout_data_dir", "data.seed"),
    *("actor_rollout_ref.rollout.name", "actor_rollout_ref.rollout.max_model_len"),
    *("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu", "reward.custom_reward_function.path"),
    *("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu", "actor_rollout_ref.actor.loss_scale_factor"),
    *("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "algorithm.rollout_correction.rollout_is"),
}


def settings(**overrides: str) -> Recipe:
    return recipe.load("tiny", VERL | {key.replace("__", "."): value for key, value in overrides.items()})


def job(tmp_path: Path, loaded: Recipe | None = None, n: int = 16) -> Job:
    loaded = loaded or settings()
    sections = {"settings": loaded.train, "rollout": loaded.rollout, "watch": loaded.watch}
    how = {"task": loaded.task, "template": prompt.of_recipe(loaded), "seed": loaded.seed, "device": "cuda"}
    questions = tasks.load("arithmetic", "train", n, 0)
    return Job(questions=questions, base=tiny.PATH, work=tmp_path, out=tmp_path / "model", **sections, **how)


def every_key() -> list[str]:
    sections = {"train": Train, "rollout": Rollout, "watch": Watch}
    inner = [f"{name}.{field}" for name, section in sections.items() for field in section.model_fields]
    top = [name for name, field in Recipe.model_fields.items() if not issubclass_(field.annotation)]
    return [*inner, *top, "chat.template_kwargs"]


def issubclass_(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def test_every_key_that_training_reads_is_in_exactly_one_table():
    tables = (translate.SAME, translate.CHOICES, translate.COMPUTED, translate.OURS, rules.VERL_REFUSES)
    listed = [key for table in tables for key in table]
    assert sorted(listed) == sorted(every_key())
    fields = {name: section.model_fields for name, section in {"train": Train, "rollout": Rollout}.items()}
    for key, value in rules.VERL_REFUSES_VALUES:
        assert key not in rules.VERL_REFUSES and key.partition(".")[2] in fields[key.partition(".")[0]], (key, value)


@pytest.mark.parametrize("key", [key for key in OTHER])
def test_a_translated_key_changes_verls_configuration(key, tmp_path):
    beside = WITH.get(key, {})
    before, after = (recipe.load("tiny", VERL | beside | more) for more in ({}, {key: OTHER[key]}))
    made = [translate.overrides(job(tmp_path, each, n=1), 50) for each in (before, after)]
    assert made[0] != made[1]


def test_the_keys_whose_translation_is_tested_are_all_of_them():
    translated = {*translate.SAME, *translate.CHOICES, *translate.COMPUTED}
    elsewhere = {"rollout.engine", "train.base_storage", "model", "task", "chat.template_kwargs"}
    assert translated - set(OTHER) == elsewhere


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [(key, "another", reason) for key, reason in rules.VERL_REFUSES.items()]
    + [(key, value, reason) for (key, value), reason in rules.VERL_REFUSES_VALUES.items()],
)
def test_a_key_or_value_without_a_counterpart_is_refused_by_name(key, value, reason):
    section, name = key.split(".")
    sections = {"train": Train(trainer="verl"), "rollout": Rollout(engine="vllm"), "watch": Watch()}
    given = (value,) if isinstance(getattr(sections[section], name), tuple) else value
    sections[section] = sections[section].model_copy(update={name: given})
    with pytest.raises(BadInput) as refused:
        rules.check(recipe.Recipe(**sections), rules.IN_VERL)
    assert str(refused.value).startswith(f"{key} = {value} does not go with train.trainer = verl, since {reason}: ")


def test_a_job_of_the_recipe_is_verls_configuration(tmp_path):
    loaded = settings(train__steps="9", train__epsilon_high="0.28", train__beta="0.01")
    asked = replace(prompt.of_recipe(loaded), kwargs={"enable_thinking": False})
    made = translate.overrides(replace(job(tmp_path, loaded, n=1), template=asked), 77)
    actor, total = "actor_rollout_ref.actor", loaded.train.prompts_per_step
    assert made["data.train_batch_size"] == made[f"{actor}.ppo_mini_batch_size"] == total
    assert made["trainer.total_training_steps"] == 9 and made["data.max_prompt_length"] == 77
    assert (made[f"{actor}.clip_ratio_low"], made[f"{actor}.clip_ratio_high"]) == (0.2, 0.28)
    assert made[f"{actor}.use_kl_loss"] and made[f"{actor}.kl_loss_coef"] == 0.01
    assert made[f"{actor}.loss_scale_factor"] == loaded.train.max_completion_tokens  # what dr_grpo divides by
    assert made["data.apply_chat_template_kwargs"] == {"enable_thinking": False}
    assert made["actor_rollout_ref.model.path"] == str(tiny.PATH)
    assert "actor_rollout_ref.model.lora_rank" not in made and "mlflow" not in made["trainer.logger"]
    assert yaml.safe_load(yaml.safe_dump(translate.nested(made)))["trainer"]["nnodes"] == 1


@pytest.mark.parametrize(
    "correction, expected",
    {
        "none": (None, 2.0, False),
        "token_truncate": ("token", 2.0, True),
        "sequence_mask": ("sequence", "1e-09_2.0", True),
    }.items(),
)
def test_the_importance_sampling_correction_is_verls(correction, expected, tmp_path):
    made = translate.overrides(job(tmp_path, settings(rollout__is_correction=correction), n=1), 50)
    key = "algorithm.rollout_correction.rollout_is"
    assert (made[key], made[f"{key}_threshold"], made["actor_rollout_ref.rollout.calculate_log_probs"]) == expected


def test_a_cache_of_fixed_size_and_graphs_without_compiling_are_options_of_verls_engine(tmp_path):
    made = translate.overrides(job(tmp_path, settings(rollout__kv_cache_gib="2", rollout__compile="false"), n=1), 50)
    engine = translate.nested(made)["actor_rollout_ref"]["rollout"]["engine_kwargs"]["vllm"]
    assert engine["kv_cache_memory_bytes"] == 2 * 2**30 and engine["optimization_level"] == "0"
    assert json.loads(engine["compilation_config"])["cudagraph_mode"] == "FULL_DECODE_ONLY"
    assert not [
        key
        for key in translate.overrides(job(tmp_path, settings(rollout__compile="true"), n=1), 50)
        if "engine_kwargs" in key
    ]


def test_an_adapter_is_verls_adapter(tmp_path):
    made = translate.overrides(job(tmp_path, settings(train__method="lora"), n=1), 50)
    model = "actor_rollout_ref.model"
    assert (made[f"{model}.lora_rank"], made[f"{model}.lora_alpha"]) == (16, 32)
    assert made[f"{model}.target_modules"] == "all-linear"
    assert made["actor_rollout_ref.rollout.load_format"] == "dummy" and made[f"{model}.lora.merge"]


@pytest.mark.parametrize(
    "overrides",
    [
        {"train.qat": "int4"},
        {"train.algorithm": "sft"},
        {"train.parallel": "ddp"},
        {"train.num_iterations": "2"},
        {"train.method": "qlora"},
        {"train.schedule": "linear"},
        {"train.loss": "bnpo"},
        {"train.rewards": "correct,leak"},
        {"rollout.engine": "transformers"},
        {"rollout.quantization": "fp8"},
        {"watch.stop": "entropy"},
        {"watch.probe_every": "5"},
    ],
    ids=lambda overrides: next(iter(overrides)),
)
def test_what_verl_lacks_is_refused_in_a_recipe(overrides):
    loaded = recipe.load("tiny", VERL | overrides)
    with pytest.raises(BadInput, match=next(iter(overrides))):
        rules.check(loaded)


def test_an_adapter_in_bf16_is_refused():
    loaded = settings(train__method="lora", train__dtype="bf16")
    with pytest.raises(BadInput, match=r"train\.base_storage"):
        rules.check(loaded)


def test_the_defaults_pass_and_a_base_in_fp32_does_not(tmp_path, monkeypatch):
    base, made = checkpoint.check(tiny.PATH), job(tmp_path)
    monkeypatch.setattr(training.grpo.rollout, "check_job", lambda job, machine: None)  # there is no engine here
    training.check(made, Machine("cpu"))
    with pytest.raises(BadInput, match="float32"):
        monkeypatch.setattr(training.checkpoint, "check", lambda path: replace(base, dtype="float32"))
        training.check(made, Machine("cpu"))


def test_questions_are_rendered_by_verl_as_by_us(tmp_path):
    from transformers import AutoTokenizer

    made, tokens = job(tmp_path), AutoTokenizer.from_pretrained(tiny.PATH)
    longest = training.write_questions(made)
    rows = pd.read_parquet(tmp_path / translate.QUESTIONS)
    ours = [prompt.render(tokens, item.question, made.template) for item in made.questions]
    theirs = [  # as verl's agent loop renders a row
        tokens.apply_chat_template(list(chat), add_generation_prompt=True, tokenize=True, return_dict=False)
        for chat in rows["prompt"]
    ]
    assert theirs == ours and longest == max(map(len, ours))
    assert [row["ground_truth"] for row in rows["reward_model"]] == [item.answer for item in made.questions]
    assert set(rows["data_source"]) == {"arithmetic"}


def test_the_reward_is_called_as_verl_calls_it(tmp_path):
    weighted = settings(train__rewards="correct,format", train__reward_weights="1,0.5")
    given = translate.overrides(job(tmp_path, weighted, n=1), 50)["reward.custom_reward_function.reward_kwargs"]
    (question,) = tasks.load("arithmetic", "train", 1, 0)
    row = {"data_source": "arithmetic", "ground_truth": question.answer, "extra_info": {"question": question.question}}
    right = score.compute_score(solution_str=question.solution, **row, **given)
    assert right == {"score": 1.5, "correct": 1.0, "format": 1.0}
    assert score.compute_score(solution_str="#### 99999", **row, **given)["score"] == 0.5
    assert score.compute_score(solution_str="none", **row, **given)["score"] == 0
    assert translate.REWARD == "pkg://qrl.train.verl.score"


def test_metrics_have_our_names_and_a_resumed_log_keeps_the_later_try(tmp_path):
    made = job(tmp_path)
    row = {"critic/score/mean": 0.5, "rollout_corr/k3_kl": 0.02, "actor/grad_norm": None, "timing_s/step": 2.0}
    named = training.named(row, made)
    total = made.settings.prompts_per_step * made.settings.generations
    assert named == {"train/reward": 0.5, "rollout/kl_k3": 0.02, "train/completions_per_s": total / 2}
    for start, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        lines = [json.dumps({"step": step, "data": {"critic/score/mean": float(start)}}) for step in steps]
        (tmp_path / f"metrics-{start:07}.jsonl").write_text("\n".join(lines) + '\n{"step": 9, "da')
    history = training.history(made)
    assert history["step"].tolist() == [1, 2, 3, 4] and history["reward"].tolist() == [0, 0, 2, 2]


def test_sampled_completions_are_read_from_verls_files(tmp_path):
    (tmp_path / translate.ROLLOUTS).mkdir()
    for step in (2, 10):
        lines = [json.dumps({"input": "q", "output": f"{step}.{i}", "score": 1.0}) for i in range(20)]
        (tmp_path / translate.ROLLOUTS / f"{step}.jsonl").write_text("\n".join(lines) + "\n")
    frame = training.completions(job(tmp_path))
    assert frame["step"].drop_duplicates().tolist() == [2, 10]
    assert len(frame) == 2 * Train().completions_logged and list(frame) == ["step", "prompt", "completion", "reward"]


def test_the_environment_and_the_key_are_verls_and_other_keys_stay(monkeypatch):
    monkeypatch.delenv(build.PLACE, raising=False)
    assert build.environment_for("train", places.trained_by(settings())).name == "verl"
    assert places.trained_by(recipe.load("tiny")) == "transformers"
    of = {
        name: keys.trained(recipe.load("tiny", each), "d", "cuda") for name, each in {"trl": {}, "verl": VERL}.items()
    }
    assert of["trl"] != of["verl"] and "train.trainer" not in keys.PARTS[of["trl"]]
    assert keys.PARTS[of["verl"]]["train.trainer"] == "verl"


def test_the_environment_holds_what_verl_imports_and_does_not_declare():
    assert "\norjson==" in (process.ROOT / ".github" / "supply" / "verl.lock").read_text()


@pytest.mark.slow
@pytest.mark.process
def test_a_failure_is_a_sentence_and_no_process_is_left(tmp_path, monkeypatch):
    sleeping = ["sleep", f"{600 + os.getpid() / 1e7:.7f}"]  # no other test's
    program = f"import subprocess\nsubprocess.Popen({sleeping}, start_new_session=True)\n"
    (tmp_path / "failing.py").write_text(program + "raise ValueError('too little memory')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(QrlError, match="ValueError: too little memory"), child.running(["failing"], tmp_path):
        pass
    time.sleep(0.1)
    assert not [each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == sleeping]
    assert (tmp_path / "failing.log").is_file()


MERGER = """
import argparse, json, shutil
from pathlib import Path
parser = argparse.ArgumentParser()
parser.add_argument("command", choices=["merge"])
parser.add_argument("--backend", choices=["fsdp"], required=True)
for name in ("--local_dir", "--target_dir"):
    parser.add_argument(name, type=Path, required=True)
given = parser.parse_args()
if (given.local_dir / "broken").exists():
    raise RuntimeError("shard 1 of 2 is missing")
given.target_dir.mkdir()
shutil.copyfile(given.local_dir / "model.safetensors", given.target_dir / "model.safetensors")
(given.target_dir / "config.json").write_text(json.dumps({"model_type": "verls own"}))
(given.target_dir / "tokenizer.json").write_text("verl's own")
if (given.local_dir / "adapter.safetensors").exists():
    (adapter := given.target_dir / "lora_adapter").mkdir()
    shutil.copyfile(given.local_dir / "adapter.safetensors", adapter / "adapter_model.safetensors")
    config = {"r": 0, "lora_alpha": 0, "peft_type": "LORA", "task_type": None, "target_modules": ["v_proj", "q_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
"""  # in place of verl's, which reads shards


@pytest.fixture
def merger(tmp_path, monkeypatch):
    """Return the folder of a checkpoint of step 4, of which a stand-in for verl's merger makes weights."""
    (package := tmp_path / "path" / "verl").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "model_merger.py").write_text(MERGER)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    work = tmp_path / "work"
    (actor := work / translate.CHECKPOINTS / "global_step_4" / "actor").mkdir(parents=True)
    (work / translate.CHECKPOINTS / "latest_checkpointed_iteration.txt").write_text("4")
    weights = {name: tensor * 2 for name, tensor in checkpoint.tensors(tiny.PATH)}
    save_file(weights, actor / "model.safetensors", metadata={"format": "pt"})
    (work / "merged").mkdir()
    (work / "merged" / "model-00001-of-00002.safetensors").write_bytes(b"of a merge that was killed")
    return actor


@pytest.mark.process
def test_verls_last_checkpoint_becomes_a_checkpoint_beside_the_bases_own_files(merger, tmp_path):
    base, made = checkpoint.check(tiny.PATH), replace(job(tmp_path / "work", n=1), out=tmp_path / "model")
    training.merge(base, base.digest, made)
    assert checkpoint.check(made.out).dtype == base.dtype and checkpoint.digest(made.out) != base.digest
    before, after = dict(checkpoint.tensors(tiny.PATH)), dict(checkpoint.tensors(made.out))
    assert before.keys() == after.keys() and all(torch.equal(after[name], 2 * before[name]) for name in before)
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (made.out / file).read_bytes() == (tiny.PATH / file).read_bytes()


@pytest.mark.slow
@pytest.mark.process
def test_an_adapter_of_verls_is_an_adapter_that_merges_into_the_base(merger, tmp_path):
    loaded = settings(train__method="lora", train__dtype="fp32", train__lora_targets="q_proj,v_proj")
    base = checkpoint.check(tiny.PATH)
    model, weights = policy.load(tiny.PATH, loaded.train, "cpu"), {}
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "v_proj")):
            prefix = f"base_model.model.{name}.lora_"
            weights[f"{prefix}A.weight"] = torch.ones(16, module.in_features) / module.in_features
            weights[f"{prefix}B.weight"] = torch.ones(module.out_features, 16) / 2**10
    save_file(weights, merger / "adapter.safetensors", metadata={"format": "pt"})
    made = replace(job(tmp_path / "work", loaded, n=1), out=tmp_path / "adapter")
    training.merge(base, base.digest, made)
    config = json.loads((made.out / "adapter_config.json").read_text())
    wanted = {"r": 16, "lora_alpha": 32, "task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"]}
    assert {key: config[key] for key in wanted} == wanted
    assert policy.recorded(made.out) == {"base_storage": "fp32", "compute": "fp32", "base_digest": base.digest}
    assert not (made.out / "model.safetensors").exists()
    whole = merging.run(tiny.PATH, made.out, tmp_path / "whole", [[5, 6, 7]], max_kl=1.0, into="auto", device="cpu")
    before, after = dict(checkpoint.tensors(tiny.PATH)), dict(checkpoint.tensors(whole.path))
    name = next(name for name in before if name.endswith("q_proj.weight"))
    update = 2 * 16 / 2**10 / before[name].shape[1]  # alpha / r times B A
    assert torch.allclose(after[name].float(), before[name].float() + update, atol=1e-3)
    assert not torch.equal(after[name], before[name])


@pytest.mark.slow
@pytest.mark.process
def test_a_merge_that_fails_is_a_sentence_and_leaves_no_model(merger, tmp_path):
    (merger / "broken").touch()
    made = replace(job(tmp_path / "work", n=1), out=tmp_path / "model")
    with pytest.raises(QrlError, match=r"verl\.model_merger ended with exit code 1: RuntimeError: shard 1 of 2"):
        training.merge(checkpoint.check(tiny.PATH), "", made)
    assert not made.out.exists()


TRAINER = """
import argparse, json
from pathlib import Path
import yaml
parser = argparse.ArgumentParser()
parser.add_argument("--config-path", type=Path, required=True)
parser.add_argument("--config-name", choices=["recipe"], required=True)
folder = parser.parse_args().config_path
made = yaml.safe_load((folder / "recipe.yaml").read_text())
log = Path(made["ray_kwargs"]["ray_init"]["runtime_env"]["env_vars"]["VERL_FILE_LOGGER_PATH"])
with log.open("w") as file:
    for step in range(3, made["trainer"]["total_training_steps"] + 1):
        file.write(json.dumps({"step": step, "data": {"critic/score/mean": step / 8}}) + "\\n")
(folder / "CHECKPOINTS" / "latest_checkpointed_iteration.txt").write_text("4")
""".replace("CHECKPOINTS", translate.CHECKPOINTS)  # in place of verl's; the checkpoint of step 4 is `merger`'s


def interrupted(tmp_path: Path, monkeypatch, trainer: str) -> Path:
    """Return the work folder of a training that was interrupted after step 2, with a stand-in for verl's trainer."""
    package = tmp_path / "path" / "verl"
    (package / "trainer").mkdir()
    (package / "trainer" / "__init__.py").touch()
    (package / "trainer" / "main_ppo.py").write_text(trainer)
    monkeypatch.syspath_prepend(str(package.parent))
    (tmp_path / "work" / translate.CHECKPOINTS / "latest_checkpointed_iteration.txt").write_text("2")
    return tmp_path / "work"


@pytest.mark.slow
@pytest.mark.process
def test_a_resumed_training_shows_its_progress_and_where_verl_writes(merger, tmp_path, monkeypatch, capsys):
    work = interrupted(tmp_path, monkeypatch, TRAINER)
    logged = []
    made = replace(job(work, settings(train__steps="4")), out=tmp_path / "model", log=lambda *row: logged.append(row))
    trained = training.run(made)
    assert trained.resumed_from == 2 and checkpoint.check(trained.path)
    assert [(step, row["train/reward"]) for row, step in logged] == [(3, 3 / 8), (4, 0.5)]
    told = capsys.readouterr().err
    assert f"verl writes to {work}/verl.trainer.main_ppo.log" in told
    assert "2/4" in told and "4/4" in told and "reward=0.5" in told


WAITING = """
import time
print("(EngineCore pid=1) ERROR 11-27 07:32:18 [core.py:1] Invocation of collective_rpc method failed")
said = "(EngineCore pid=1) ERROR 11-27 07:32:18 [core.py:1] AttributeError: no mapper"
print(f"\\x1b[36m(Server pid=2)\\x1b[0m {said}")
print("vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.")
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.process
def test_a_training_that_waits_for_a_failed_engine_ends_with_its_error(merger, tmp_path, monkeypatch):
    work = interrupted(tmp_path, monkeypatch, WAITING)
    monkeypatch.setattr(training, "_PATIENCE_S", 1.0)
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    monkeypatch.setattr(child, "_GRACE_S", 5)
    made = replace(job(work, settings(train__steps="4")), out=tmp_path / "model")
    with pytest.raises(QrlError, match=r"still waits for a vLLM engine that failed: AttributeError: no mapper"):
        training.run(made)
    assert not made.out.exists()


def launched(monkeypatch, world: int, here: int, rank: int = 0) -> None:
    """Set what torchrun does in a process of a training on several machines."""
    values = {"RANK": rank, "LOCAL_RANK": rank % here, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": here}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize("world, here", [(None, None), (4, 2), (4, 4), (2, 1)])
def test_several_gpus_and_nodes_are_verls(world, here, tmp_path, monkeypatch):
    if world:
        launched(monkeypatch, world, here)
    loaded = settings(train__parallel="fsdp2", train__processes="2", train__micro_batch="64")
    made = translate.overrides(job(tmp_path, loaded, n=1), 50)
    gpus = world or 2
    assert (made["trainer.nnodes"], made["trainer.n_gpus_per_node"]) == (gpus // (here or gpus), here or gpus)
    assert made["actor_rollout_ref.actor.strategy"] == "fsdp2" and made[translate.ADDRESS] == "local"
    share = loaded.train.prompts_per_step * loaded.train.generations // gpus
    assert made["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"] == min(64, share)


@pytest.mark.parametrize(
    ("overrides", "gpus", "sentence"),
    [
        ({}, 1, ""),
        ({}, 2, "divides the weights over 2 GPUs, but train.parallel = none"),
        ({"parallel": "fsdp2", "micro_batch": "16"}, 2, ""),
        (
            {"parallel": "fsdp2", "prompts_per_step": "3", "generations": "2"},
            4,
            "4 GPUs do not divide the 6 completions",
        ),
        (
            {"parallel": "fsdp2"},
            2,
            "train.micro_batch = 32 does not divide the 48 completions of a step in each of 2 GPUs",
        ),
    ],
)
def test_gpus_that_do_not_divide_a_step_are_refused(overrides, gpus, sentence):
    train = settings(**{f"train__{key}": value for key, value in overrides.items()}).train
    with pytest.raises(BadInput) if sentence else contextlib.nullcontext() as refused:
        translate.check_gpus(train, gpus)
    assert sentence in str(refused.value if sentence else "")


def test_nodes_with_different_numbers_of_gpus_and_one_that_is_missing_are_sentences(monkeypatch):
    launched(monkeypatch, 3, 2)
    with pytest.raises(BadInput, match="3 processes, but 2 on this node"):
        translate.check_gpus(settings(train__parallel="fsdp2").train, 3)
    nodes.check_joined([2, 2], 2, 2)
    with pytest.raises(QrlError, match="1 of 2 nodes joined Ray in 300 s"):
        nodes.check_joined([2], 2, 2)
    with pytest.raises(BadInput, match="nodes have 1, 2 GPUs"):
        nodes.check_joined([2, 1], 2, 2)


def test_a_process_that_holds_no_node_returns_at_once(tmp_path, monkeypatch):
    launched(monkeypatch, 4, 2, rank=3)
    nodes.join(tmp_path)
    launched(monkeypatch, 2, 2)
    with nodes.cluster(tmp_path) as (address, variables):  # a single machine
        assert (address, variables) == ("local", {})


@pytest.mark.process
@pytest.mark.skipif("QRL_VERL_PYTHON" not in os.environ, reason="QRL_VERL_PYTHON names no Python with verl 0.9.1")
@pytest.mark.parametrize("method, parallel", [("full", "none"), ("lora", "none"), ("full", "fsdp2")])
def test_verl_itself_accepts_the_configuration(method, parallel, tmp_path):
    several = {} if parallel == "none" else {"train__parallel": parallel, "train__processes": "2"}
    made = job(tmp_path, settings(train__method=method, train__dtype="fp32", train__beta="0.01", **several))
    wanted = translate.overrides(made, training.write_questions(made)) | {training.LOG: "log.jsonl"}
    training.write_configuration(tmp_path, wanted)
    (tmp_path / "wanted.json").write_text(json.dumps(wanted))
    words = [os.environ["QRL_VERL_PYTHON"], "-c", COMPOSE, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.rpartition("RESULT ")[2])
    assert set(found["unknown"]) <= ADDED | NULL and not found["lost"]
    assert set(found["strategies"]) == {wanted["actor_rollout_ref.actor.strategy"]}
    assert found["reference"] and not found["critic"] and found["dtype"]["param_dtype"] == "fp32"
