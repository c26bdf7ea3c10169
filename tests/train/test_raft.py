"""Rejection sampling: the right completions alone are trained on, by the loss of fine-tuning, and it learns."""

import json
import shutil

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM

from qrl import checkpoint, stats, tasks, tiny
from qrl.engine import hf
from qrl.errors import BadInput
from qrl.recipe import Recipe, Train, Watch, rules
from qrl.tasks import prompt
from qrl.train import Job, grpo, raft, trainers
from qrl.train.job import Machine
from tests.train import pair

QUESTIONS = tasks.load("arithmetic", "train", 64, 0)
ANSWERS = {each.question: each.answer for each in QUESTIONS}
FAST = Train(
    algorithm="raft",
    steps=3,
    prompts_per_step=6,
    generations=4,
    micro_batch=8,  # three passes a step
    temperature=1.3,  # of sampling; the loss is of the policy itself
    max_completion_tokens=64,
    learning_rate=4e-5,
    save_every=1,
    completions_logged=24,
)


def job(folder, settings=FAST, **changes):
    data = {"base": tiny.PATH, "questions": QUESTIONS, "task": "arithmetic", "template": "plain", "seed": 3}
    folders = {"work": folder / "work", "out": folder / "model"}
    return Job(**{"settings": settings, "device": "cpu"} | data | folders | changes)


def right(sampled: pd.DataFrame) -> pd.Series:
    """Return which completions the grader takes, graded here again."""
    gold = [ANSWERS[question] for question in sampled["prompt"]]
    verdicts = tasks.grade_many("arithmetic", sampled["completion"].tolist(), gold)
    return pd.Series([verdict.strict for verdict in verdicts], index=sampled.index)


def mean_loss(batch: dict[str, torch.Tensor], rows: torch.Tensor) -> float:
    """Return the base's mean −log p over the tokens of some completions of a batch, one completion at a time."""
    model = AutoModelForCausalLM.from_pretrained(tiny.PATH, dtype=torch.float32)
    loss, count = 0.0, 0
    for row in rows.nonzero().flatten():
        begin = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()]
        answer = batch["completion_ids"][row][batch["completion_mask"][row].bool()]
        with torch.no_grad():
            logits = model(torch.cat([begin, answer])[None]).logits[0, len(begin) - 1 : -1]
        loss += torch.nn.functional.cross_entropy(logits, answer, reduction="sum").item()
        count += len(answer)
    return loss / count


def first_step(folder, settings=FAST) -> tuple[dict[str, torch.Tensor], torch.Tensor, dict]:
    """Train for a step, and return its batch, the completions that are right by the grader, and the log's row."""
    trainer = raft.make_trainer(job(folder, settings.model_copy(update={"steps": 1, "save_every": 2})))
    batches, sample = [], trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda rows: batches.append((rows, sample(rows))) or batches[-1][1]
    trainer.train()
    ((rows, batch),) = batches
    tokens = hf.tokenizer(tiny.PATH)
    texts = [
        tokens.decode(ids[mask.bool()], skip_special_tokens=True)
        for ids, mask in zip(batch["completion_ids"], batch["completion_mask"], strict=True)
    ]
    verdicts = tasks.grade_many("arithmetic", texts, [row["answer"] for row in rows])
    row = next(row for row in trainer.state.log_history if "reward" in row)
    return batch, torch.tensor([verdict.strict for verdict in verdicts]), row


@pytest.mark.slow
@pytest.mark.process
def test_the_loss_is_that_of_fine_tuning_on_the_right_completions(tmp_path):
    batch, is_right, row = first_step(tmp_path)
    assert 0 < is_right.sum() < 24 and torch.equal(batch["kept"], is_right)
    expected = mean_loss(batch, is_right)
    assert row["loss"] == pytest.approx(expected, rel=1e-3)  # three passes, sampled at another temperature
    assert mean_loss(batch, torch.ones(24, dtype=bool)) > 1.5 * expected  # wrong ones would be seen


@pytest.mark.slow
@pytest.mark.process
def test_the_right_completions_alone_are_trained_on_and_a_killed_training_goes_on_bit_for_bit(tmp_path):
    logged = {}
    whole = raft.run(job(tmp_path, log=lambda metrics, step: logged.setdefault(step, {}).update(metrics)))
    sampled = whole.completions
    is_right = right(sampled)
    by_step = is_right.groupby(sampled["step"])
    assert by_step.size().tolist() == [24] * 3 and 0 < is_right.mean() < 1
    assert whole.history["kept_completions"].tolist() == by_step.sum().tolist()
    questions = sampled[is_right].groupby("step")["prompt"].nunique()
    assert whole.history["kept_questions"].tolist() == questions.tolist()
    assert whole.history["reward"].tolist() == pytest.approx((by_step.sum() / 24).tolist())

    names = {"reward", "loss", "entropy", "grad_norm", "completion_tokens", "truncation_rate", "kept_completions"}
    names |= {"kept_questions", "completions_per_s", "peak_memory_gib", "reward_correct"}
    assert sorted(logged) == [1, 2, 3] and {f"train/{name}" for name in names} <= logged[1].keys()

    shutil.copytree(tmp_path / "work", tmp_path / "again" / "work")
    shutil.rmtree(tmp_path / "again" / "work" / "checkpoint-3")
    again = raft.run(job(tmp_path / "again"))
    assert (whole.resumed_from, again.resumed_from) == (0, 2)
    assert checkpoint.digest(again.path) == checkpoint.digest(whole.path) != checkpoint.digest(tiny.PATH)


@pytest.mark.slow
@pytest.mark.process
def test_a_cut_completion_is_not_kept_where_the_loss_masks_it_nor_one_below_the_least_reward(tmp_path):
    settings = FAST.model_copy(update={"steps": 1, "rewards": ("correct", "format"), "mask_truncated": True})
    cut = settings.model_copy(update={"max_completion_tokens": 24})
    assert cut.least_kept_reward == 2
    done = raft.run(job(tmp_path / "cut", cut))
    shares = done.history.iloc[0]
    assert 0 < shares["truncation_rate"] < 1 and 0 <= shares["kept_completions"] <= 24 * (1 - shares["truncation_rate"])

    lenient = settings.model_copy(update={"mask_truncated": False, "min_kept_reward": 1.0})
    formed = raft.run(job(tmp_path / "formed", lenient))
    well_formed = formed.completions["reward"] >= 1
    assert formed.history["kept_completions"].tolist() == [well_formed.sum()]
    assert well_formed.sum() > right(formed.completions).sum()


@pytest.mark.slow
@pytest.mark.process
def test_where_nothing_is_kept_no_weight_changes_and_the_signal_watcher_ends_the_training(tmp_path):
    warnings = []
    watch = Watch(window=2, stop=("signal",))
    started = job(tmp_path, FAST.model_copy(update={"min_kept_reward": 1.5}), watch=watch, warn=warnings.append)
    done = raft.run(started)
    assert done.history["kept_completions"].tolist() == [0, 0] and done.stopped.watcher == "signal"
    assert [alarm.sentence for alarm in warnings if "no completion earned enough" in alarm.sentence]
    assert checkpoint.digest(done.path) == checkpoint.digest(tiny.PATH)


def test_groups_that_are_all_right_have_a_gradient_and_raise_no_alarm():
    from qrl.train.monitor.watchers import Watchers

    watchers = Watchers(Watch(window=2))
    row = {"reward": 1.0, "frac_reward_zero_std": 1.0, "kept_completions": 24, "entropy": 0.3}
    assert not [alarm for step in range(1, 6) for alarm in watchers.see(row | {"step": step})]


@pytest.mark.slow
@pytest.mark.process
def test_several_passes_over_a_round_and_an_adapter_train_too(tmp_path):
    more = {"steps": 2, "num_iterations": 2, "save_every": 2, "method": "lora", "learning_rate": 1e-3}
    done = raft.run(job(tmp_path, FAST.model_copy(update=more)))
    by_step = done.completions.groupby("step")["completion"].agg(list)
    assert done.adapter and by_step[1] == by_step[2]  # one round
    state = json.loads((tmp_path / "work" / "checkpoint-2" / "trainer_state.json").read_text())
    first, second = (row["loss"] for row in state["log_history"] if "loss" in row)
    assert second < first  # the second pass reads what the first one has learnt


@pytest.mark.slow
@pytest.mark.process
def test_accuracy_rises_on_held_out_questions(tmp_path):
    settings = FAST.model_copy(
        update={"steps": 16, "temperature": 1.0, "max_completion_tokens": 80, "save_every": 16, "micro_batch": 24}
    )
    done = raft.run(job(tmp_path, settings, questions=tasks.load("arithmetic", "train", 512, 0)))
    heldout = tasks.load("arithmetic", "heldout", 200, 0)
    outcomes = []
    for folder in (done.path, tiny.PATH):
        model, tokens = hf.load(folder, "cpu", torch.float32)
        prompts = [prompt.render(tokens, each.question, "plain") for each in heldout]
        answers = hf.generate(model, tokens, prompts, max_new_tokens=80, batch_size=100)
        texts = [answer.text for answer in answers]
        verdicts = tasks.grade_many("arithmetic", texts, [each.answer for each in heldout])
        outcomes.append([int(verdict.strict) for verdict in verdicts])
    assert stats.contrast(outcomes, (1, -1)).low > 0


CHILD = """
import sys
from pathlib import Path
import torch
from qrl.process import rank
from tests.train.test_raft import FAST, first_step, mean_loss
if __name__ == "__main__":
    folder = Path(sys.argv[1])
    batch, is_right, row = first_step(folder, FAST.model_copy(update={"micro_batch": 6}))
    assert torch.equal(batch["kept"], is_right)
    tokens = int(batch["completion_mask"][is_right].sum())
    loss = mean_loss(batch, is_right) * tokens
    torch.save({"loss": loss, "tokens": tokens, "right": int(is_right.sum()), "row": row}, folder / f"{rank()}.pt")
"""


@pytest.mark.slow
@pytest.mark.process
@pair.flaky
def test_two_processes_divide_the_completions_and_average_over_all_kept_tokens(tmp_path):
    pair.check(pair.run(tmp_path, CHILD, tmp_path))
    parts = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    row = parts[0]["row"]
    assert row["kept_completions"] == sum(part["right"] for part in parts)
    assert row["loss"] == pytest.approx(
        sum(part["loss"] for part in parts) / sum(part["tokens"] for part in parts), rel=1e-3
    )


@pytest.mark.parametrize(
    ("train", "least"),
    [
        ({}, 1.0),
        ({"rewards": ("correct", "leak", "soft_overlong")}, 1.0),
        ({"rewards": ("correct", "format", "leak"), "reward_weights": (1.0, 0.2, 4.0)}, 1.2),
        ({"rewards": ("flexible",), "reward_weights": (0.5,)}, 0.5),
        ({"rewards": ("mine.py:short",), "min_kept_reward": 0.0}, 0.0),
    ],
)
def test_a_completion_is_kept_that_earns_what_a_right_answer_earns(train, least):
    assert Train(algorithm="raft", **train).least_kept_reward == pytest.approx(least)


def test_a_recipe_names_its_trainer_and_what_it_trains():
    settings = Train(algorithm="raft", prompts_per_step=12)
    assert (trainers.name(settings), settings.variant, settings.title) == ("raft", "raft", "RAFT")
    assert settings.batch == "the right ones of 12 × 8 completions"


def test_what_machine_and_data_do_not_allow_is_a_sentence_before_training(tmp_path):
    with pytest.raises(BadInput, match="64 training questions"):
        grpo.check(job(tmp_path, FAST.model_copy(update={"prompts_per_step": 66})), Machine("cpu"))
    with pytest.raises(BadInput, match=r"train\.min_kept_reward to the smallest summed reward") as refused:
        rules.check(Recipe(train=Train(algorithm="raft", rewards=("mine.py:short",))))
    assert refused.value.rule == "raft-knows-no-right-answer-of-own-rewards"
