"""How rollouts are sampled: truncated distributions, masked completions, groups that are sampled again."""

import inspect
import json
import shutil
from types import SimpleNamespace

import pandas as pd
import pytest

from qrl import checkpoint, tasks, tiny
from qrl.errors import BadInput
from qrl.recipe import Rollout, Train, rules
from qrl.tasks import prompt
from qrl.train import Job, arguments, grpo, rollout
from qrl.train.monitor import watchers
from qrl.train.rollout import vllm_engine
from qrl.train.trl import vllm_link

pytestmark = pytest.mark.process

QUESTIONS = tasks.load("arithmetic", "train", 32, 0)
SMALL = {"prompts_per_step": 4, "generations": 2, "micro_batch": 8, "max_completion_tokens": 64, "save_every": 1}
CHANGED = {"top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}


def job(folder, settings, **changes):
    data = {"base": tiny.PATH, "questions": QUESTIONS, "task": "arithmetic", "template": "plain", "seed": 0}
    folders = {"work": folder / "work", "out": folder / "model"}
    return Job(**{"settings": settings, "device": "cpu"} | data | folders | changes)


def test_sampling_reaches_trl_and_the_defaults_are_its_own(tmp_path):
    from trl import GRPOConfig

    names = [*CHANGED, "mask_truncated_completions"]
    plain, usual = (
        arguments.grpo_config(job(tmp_path, Train(**SMALL))),
        GRPOConfig(output_dir=str(tmp_path), use_cpu=True),
    )
    assert [getattr(plain, name) for name in names] == [getattr(usual, name) for name in names]
    settings = Train(mask_truncated=True, **CHANGED, **SMALL)
    trainer = grpo.make_trainer(job(tmp_path, settings))
    assert {name: getattr(trainer.generation_config, name) for name in CHANGED} == CHANGED
    assert trainer.mask_truncated_completions


def test_distillation_samples_as_told(tmp_path):
    made = arguments.common(job(tmp_path, Train(**CHANGED, **SMALL)))
    assert {name: made[name] for name in CHANGED} == CHANGED


@pytest.mark.parametrize("key", ["mask_truncated", "max_resamples"])
def test_a_distillation_refuses_what_only_rewards_give_sense(key):
    settings = Train(teacher="t", **{key: 1}, **SMALL)
    with pytest.raises(BadInput, match=f"train.{key} has no effect") as refused:
        rules.check_training(settings)
    assert refused.value.rules == [f"distillation-has-no-{key}"]


def test_a_distillation_is_no_supervised_fine_tuning():
    with pytest.raises(BadInput, match=r"train\.algorithm = sft .* train\.teacher distils: leave one out"):
        rules.check_training(Train(teacher="t", algorithm="sft", **SMALL))


@pytest.mark.parametrize("key", CHANGED)
def test_the_gap_of_a_truncated_distribution_is_refused_where_vllm_cannot_tell_the_whole_one(key):
    train, server = Train(**{key: CHANGED[key]}), {"mode": "server", "server": "http://127.0.0.1:1"}
    for settings, other in ((server, train), ({}, Train(temperature=0.8, **{key: CHANGED[key]}))):
        with pytest.raises(BadInput, match=rf"train\.{key} = .*rollout\.is_correction = none"):
            rules.check_training(other, Rollout(engine="vllm", **settings))
    for settings in (Rollout(engine="vllm"), Rollout(engine="vllm", is_correction="none")):
        rules.check_training(train, settings)
        with pytest.raises(BadInput, match="needs a GPU"):  # the next thing that is checked
            rollout.check(settings, "cpu", train)
    rules.check_training(train)
    rollout.check(Rollout(), "cpu", train)  # transformers' rollouts compare with no engine


@pytest.mark.parametrize("key", [None, *CHANGED])
def test_an_engine_that_truncates_is_asked_for_the_whole_distributions_log_probabilities(key, monkeypatch):
    made = {}
    monkeypatch.setattr(vllm_engine, "create", lambda *given, **how: made.update(how))
    link = vllm_link.Link()
    link.mode, link.model, link.max_num_seqs = "colocate", SimpleNamespace(name_or_path="base"), 8
    link.accelerator = SimpleNamespace(process_index=0, num_processes=1, wait_for_everyone=lambda: None)
    link.trainer = SimpleNamespace(args=SimpleNamespace(seed=0))
    monkeypatch.setattr(vllm_engine, "sleeps", lambda *_: False)
    monkeypatch.setattr("accelerate.utils.set_seed", lambda *_, **__: None)
    usual = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}  # as TRL's trainer holds them
    for name, value in (usual | ({key: CHANGED[key]} if key else {})).items():
        setattr(link, name, value)
    link._init_vllm()
    assert made["raw_logprobs"] is bool(key)


def test_a_colocated_engine_is_given_the_same_sampling(monkeypatch):
    given = {}

    def generate(engine, prompts, *, temperature, max_tokens, more, adapter):
        given.update(more, temperature=temperature)
        return [[1]], [[-0.5]]

    monkeypatch.setattr(vllm_engine, "generate", generate)
    link = vllm_link.Link()
    link.enable_sleep_mode, link.llm, link.accelerator = False, None, SimpleNamespace(process_index=0)
    link.temperature, link.max_completion_length, link.generation_kwargs, link._latest_rollout = 1.0, 8, {}, (-1, 0)
    link.trainer = SimpleNamespace(args=SimpleNamespace(seed=0), state=SimpleNamespace(global_step=0))
    for name, value in (CHANGED | {"logprobs": 0}).items():
        setattr(link, name, value)
    link._sample([[1]])
    assert given == CHANGED | {"temperature": 1.0, "logprobs": 0}
    link.min_p = None  # TRL's default
    link._sample([[1]])
    assert given["min_p"] == 0.0


RESAMPLED = Train(steps=4, max_resamples=3, learning_rate=1e-4, **SMALL)


@pytest.fixture(scope="module")
def resampled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resampled")
    return folder, grpo.run(job(folder, RESAMPLED))


@pytest.mark.slow
def test_flat_groups_are_replaced_by_other_questions_with_their_own_answers(resampled):
    folder, done = resampled
    history = done.history
    assert history["resampled_groups"].sum() > 0
    groups = RESAMPLED.prompts_per_step
    assert (history["flat_groups"] == (history["frac_reward_zero_std"] * groups).round()).all()
    assert history["flat_groups"].sum() < history["resampled_groups"].sum()
    wanted = {prompt.messages(item.question, "plain")[0]["content"]: item.answer for item in QUESTIONS}
    for step, file in enumerate(sorted((folder / "work" / "completions").glob("*.parquet"))):
        table = pd.read_parquet(file)
        texts, asked = table["completion"].map(text), table["prompt"].map(text)
        rewards = [
            float(tasks.grade("arithmetic", *pair).strict) for pair in zip(texts, asked.map(wanted), strict=True)
        ]
        assert table["correct"].tolist() == rewards
        assert sorted(asked.value_counts()) == [RESAMPLED.generations] * groups  # whole groups, each of one question
        spread = table.assign(asked=asked).groupby("asked")["correct"].nunique()
        assert (spread == 1).sum() == history["flat_groups"][step]


def text(value) -> str:
    value = json.loads(value) if isinstance(value, str) else value
    return value[-1]["content"]


@pytest.mark.slow
def test_a_resumed_training_samples_the_same_groups_again(resampled, tmp_path):
    folder, done = resampled
    shutil.copytree(folder / "work", tmp_path / "work")
    shutil.rmtree(tmp_path / "work" / "checkpoint-4")
    again = grpo.run(job(tmp_path, RESAMPLED))
    assert again.resumed_from == 3
    assert checkpoint.digest(again.path) == checkpoint.digest(done.path)
    assert again.history["resampled_groups"].tolist() == done.history["resampled_groups"].tolist()


def test_rounds_end_when_no_question_is_left(tmp_path):
    settings = Train(steps=1, max_resamples=50, **SMALL | {"generations": 2})
    flat = job(tmp_path, settings, questions=QUESTIONS[:7], task=constant(tmp_path))
    history = grpo.run(flat).history
    assert history["resampled_groups"].tolist() == [3] and history["flat_groups"].tolist() == [4]


def constant(folder) -> str:
    """Return a task whose grader calls everything right."""
    (folder / "constant.py").write_text("def load(split, n, seed): ...\ndef grade(completion, answer): return True\n")
    return str(folder / "constant.py")


def test_the_bound_is_told_once_and_may_end_the_training():
    watching = watchers.Watchers(watchers.Watch(stop=("resample",)))
    row = {"reward": 0.5, "resampled_groups": 3.0}
    assert watching.see({"step": 1, "flat_groups": 0.0} | row) == []
    (alarm,) = watching.see({"step": 2, "flat_groups": 2.0} | row)
    assert alarm.watcher == "resample" and "in step 2 the completions of 2 groups" in alarm.sentence
    assert watching.stop([alarm]) == alarm and watching.see({"step": 3, "flat_groups": 2.0} | row) == []


def test_resampling_needs_one_process_and_its_watcher_needs_resampling(monkeypatch):
    with pytest.raises(BadInput, match=r"watch\.stop = resample .*train\.max_resamples"):
        rules.check_training(Train(**SMALL), watch=watchers.Watch(stop=("resample",)))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(BadInput, match="max_resamples = 3 works in one process, not 2"):
        arguments.check(RESAMPLED, 32)


def test_trl_hands_over_what_resampling_replaces():
    from trl import GRPOTrainer

    score = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    assert "self._generate(prompts)" in score and "self._calculate_rewards(inputs, prompts," in score
    assert list(inspect.signature(GRPOTrainer._generate).parameters) == ["self", "prompts"]
    returned = "return prompt_ids, completion_ids, tool_mask, completions, logprobs, extra_fields, images, tool_images"
    assert returned in inspect.getsource(GRPOTrainer._generate), "adapt the positions in qrl.train.trl.grpo"


def test_masked_completions_give_no_loss(tmp_path):
    settings = Train(steps=1, mask_truncated=True, **SMALL | {"max_completion_tokens": 4})
    history = grpo.run(job(tmp_path, settings)).history
    assert history["truncation_rate"].tolist() == [1.0] and history["grad_norm"].tolist() == [0.0]


def test_throughput_counts_everything_that_was_sampled_since_it_was_last_asked(monkeypatch):
    link = vllm_link.Link()
    link.mode, link._llm_weights_sleeping, link.accelerator = "colocate", False, SimpleNamespace(num_processes=2)
    monkeypatch.setattr(link, "_sample", lambda prompts: (prompts, [[1, 2, 3]] * len(prompts), None, None))
    link._reset()
    link.generate([[0]] * 4, None, 2)
    link.generate([[0]] * 2, None, 2)  # groups sampled again
    link.seconds = {"sync": 1.0, "generate": 3.0}
    assert link.speed() == {"sync_s": 1.0, "generate_s": 3.0, "completions_per_s": 3.0, "tokens_per_s": 9.0}
    assert link.counts == {"completions": 0, "tokens": 0}
