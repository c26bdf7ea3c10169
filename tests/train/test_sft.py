"""Supervised fine-tuning as GRPO's control: the same questions in the same steps, the plain loss, resumable."""

import shutil
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from qrl import checkpoint, tasks, tiny
from qrl.engine import hf
from qrl.errors import BadInput
from qrl.recipe import Train, Watch, rules
from qrl.tasks import prompt
from qrl.train import Job, grpo, sft
from qrl.train.job import Machine

QUESTIONS = tasks.load("arithmetic", "train", 16, 0)
FAST = Train(
    algorithm="sft", steps=3, prompts_per_step=6, generations=2, micro_batch=4, save_every=1, max_completion_tokens=8
)

WHOLE = FAST.model_copy(update={"micro_batch": 6})  # a step in one pass instead of three


def job(folder, settings=FAST, **changes):
    data = {"base": tiny.PATH, "questions": QUESTIONS, "task": "arithmetic", "template": "plain", "seed": 3}
    folders = {"work": folder / "work", "out": folder / "model"}
    return Job(**{"settings": settings, "device": "cpu"} | data | folders | changes)


@pytest.mark.process
def test_each_step_reads_the_solutions_of_the_questions_that_grpo_would_ask(tmp_path):
    settings = FAST.model_copy(update={"algorithm": "grpo", "micro_batch": 12, "completions_logged": 12})
    sampled = grpo.run(job(tmp_path / "grpo", settings)).completions
    trainer = sft._make_trainer(job(tmp_path / "sft", WHOLE))
    tokens, batches = hf.tokenizer(tiny.PATH), iter(trainer.get_train_dataloader())
    for step in range(1, FAST.steps + 1):  # more than an epoch: 16 questions are two steps of 6
        batch, asked = next(batches), set(sampled.loc[sampled["step"] == step, "prompt"])
        expected = {prompt.training_text(tokens, each, "plain") for each in QUESTIONS if each.question in asked}
        masks = batch["attention_mask"].bool()
        read = {tokens.decode(ids[mask]) for ids, mask in zip(batch["input_ids"], masks, strict=True)}
        assert len(expected) == FAST.prompts_per_step and read == expected


def test_no_token_of_a_prompt_is_in_the_loss():
    tokens = hf.tokenizer(tiny.PATH)
    text = sft._tokenized(tokens, QUESTIONS[0], "plain")
    count = len(prompt.render(tokens, QUESTIONS[0].question, "plain"))
    assert text["labels"] == [-100] * count + text["input_ids"][count:]


@pytest.mark.slow
@pytest.mark.process
def test_the_loss_is_the_mean_over_the_solutions_tokens_and_a_killed_training_goes_on_bit_for_bit(tmp_path):
    seen = []
    whole = sft.run(job(tmp_path, log=lambda metrics, step: seen.append((step, metrics))))
    trainer = sft._make_trainer(job(tmp_path / "unused", WHOLE))
    batch = next(iter(trainer.get_train_dataloader()))
    model = AutoModelForCausalLM.from_pretrained(tiny.PATH, dtype=torch.float32)
    with torch.no_grad():
        logits = model(batch["input_ids"].to("cpu"), attention_mask=batch["attention_mask"].to("cpu")).logits[:, :-1]
    targets = batch["labels"].to("cpu")[:, 1:]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    assert whole.history["loss"].iloc[0] == pytest.approx(expected.item(), abs=1e-4)  # the log has four digits
    assert [step for step, _ in seen] == [1, 2, 3] and "train/loss" in seen[0][1] and "train/reward" not in seen[0][1]
    shutil.copytree(tmp_path / "work", tmp_path / "again" / "work")
    shutil.rmtree(tmp_path / "again" / "work" / "checkpoint-3")
    again = sft.run(job(tmp_path / "again"))
    assert (whole.resumed_from, again.resumed_from) == (0, 2)
    assert checkpoint.digest(again.path) == checkpoint.digest(whole.path) != checkpoint.digest(tiny.PATH)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"settings": FAST.model_copy(update={"qat": "int8"})}, r"train\.qat = int8: set it to none"),
        ({"settings": FAST.model_copy(update={"method": "lora"})}, r"train\.method = lora: set it to full"),
        ({"watch": Watch(stop=("entropy", "probe"))}, r"watch\.stop = entropy"),
        ({"questions": [replace(each, solution=" ") for each in QUESTIONS[:6]]}, "6 of 6 training questions have no"),
        ({"settings": FAST.model_copy(update={"prompts_per_step": 17})}, "16 training questions"),
    ],
)
def test_what_does_not_fit_is_a_sentence_before_training(changes, says, tmp_path):
    with pytest.raises(BadInput, match=says):
        started = job(tmp_path, **changes)
        rules.check_training(started.settings, started.rollout, started.watch)
        sft.check(started, Machine("cpu"))
