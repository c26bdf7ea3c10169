"""A small probe of held-out accuracy during training: greedy answers of the present policy, graded as in evaluation.

The reward is measured on training questions, by the reward functions of the recipe, so it can rise while the model gets
worse. The probe is independent of both. It changes nothing that training computes: no random number is drawn, and the
model's state is restored.
"""

import math
from collections.abc import Sequence

import pandas as pd
import torch

from qrl import process, stats, tasks
from qrl.engine import hf
from qrl.tasks import prompt
from qrl.train.job import Alarm, Job
from qrl.train.monitor.watchers import Watchers
from qrl.train.rollout import VLLM
from qrl.train.trl.grpo import unsharded


def outcomes(trainer, job: Job) -> list[int]:
    """Return 0 or 1 per probe question, in order; several processes share the questions, and each returns them all."""
    from accelerate.utils import gather_object

    # Every process answers equally many questions: the first ones are answered twice where they do not divide evenly.
    world_size = process.world_size()
    per_process = math.ceil(len(job.probe_questions) / world_size)
    indices = [
        index % len(job.probe_questions) for index in range(process.rank(), per_process * world_size, world_size)
    ]

    questions = [job.probe_questions[index] for index in indices]
    tokens = hf.tokenizer(job.base)
    prompts = [prompt.render(tokens, question.question, job.template) for question in questions]
    if job.rollout.engine == VLLM:
        answers = _answers_of_engine(trainer, job, tokens, prompts)
    else:
        answers = _answers_of_model(trainer, job, tokens, prompts)
    gold = [question.answer for question in questions]
    tags = prompt.thinking_tags(tokens, job.template)
    texts = [tags.text(answer.text, answer.raw, tokens.all_special_tokens) for answer in answers]
    verdicts = tasks.grade_many(job.task, texts, gold, tags=tags)

    graded = [(index, int(verdict.strict)) for index, verdict in zip(indices, verdicts, strict=True)]
    outcome_of = dict(gather_object(graded))
    return [outcome_of[index] for index in range(len(job.probe_questions))]


def _answers_of_engine(trainer, job: Job, tokens, prompts: list[list[int]]) -> list[hf.Completion]:
    """Return the answers of the rollout engine, which has the memory and the speed for long ones."""
    ends = set(hf.end_tokens(None, job.base, tokens))
    special = set(tokens.all_special_ids)
    return [hf.completion(tokens, ids, ends, special) for ids in trainer.vllm_generation.greedy(prompts)]


def _answers_of_model(trainer, job: Job, tokens, prompts: list[list[int]]) -> list[hf.Completion]:
    """Return the answers of the model in training, decoded by transformers."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from transformers import GenerationConfig
    from trl.models import unwrap_model_for_generation

    with (
        unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as model,
        torch.no_grad(),
        unsharded(trainer),
    ):
        policy = model.module if isinstance(model, FullyShardedDataParallel) else model
        config = policy.generation_config
        was_training = policy.training
        policy.generation_config = GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=tokens.pad_token_id)
        policy.eval()
        try:
            longest = job.settings.max_completion_tokens
            return hf.generate(model, tokens, prompts, max_new_tokens=longest, batch_size=128)
        finally:
            policy.generation_config = config
            policy.train(was_training)


def curve(log_history: Sequence[dict]) -> pd.DataFrame:
    """Return held-out accuracy over steps: step, accuracy, its 95 % interval low and high, and n."""
    rows = []
    for row in log_history:
        if "probe" not in row:
            continue
        accuracy = stats.accuracy(sum(row["probe"]), len(row["probe"]))
        rows.append((row["step"], accuracy.estimate, accuracy.low, accuracy.high, len(row["probe"])))
    return pd.DataFrame(rows, columns=["step", "accuracy", "low", "high", "n"])


def callback(trainer, job: Job):
    """Return a callback that runs probes and watchers, and stops training where the recipe says so."""
    from transformers import TrainerCallback

    interval = job.watch.probe_every  # in steps; 0: no probes

    class Watching(TrainerCallback):
        stopped: Alarm | None = None

        def on_train_begin(self, args, state, control, **_):
            self.watchers = Watchers(job.watch, job.rollout, job.settings.qat)
            for row in state.log_history:  # of the interrupted training; its warnings were given
                self.watchers.see(row)
            if interval and state.global_step == 0:
                self.probe(state, control)

        def on_log(self, args, state, control, logs=None, **_):
            if "reward" in (logs or {}):
                self.warn(self.watchers.see(state.log_history[-1]), control)

        def on_step_end(self, args, state, control, **_):
            if interval and state.global_step % interval == 0:
                self.probe(state, control)

        def probe(self, state, control):
            row = {"step": state.global_step, "probe": outcomes(trainer, job)}
            state.log_history.append(row)
            accuracy = stats.accuracy(sum(row["probe"]), len(row["probe"]))
            metrics = {
                "probe/accuracy": accuracy.estimate,
                "probe/accuracy_stderr": accuracy.stderr,
                "probe/n": len(row["probe"]),
            }
            job.log(metrics, state.global_step)
            self.warn(self.watchers.see(row), control)

        def warn(self, alarms, control):
            for alarm in alarms:
                job.log({f"watch/{alarm.watcher}": 1.0}, alarm.step)
                job.warn(alarm)
            stopping_alarm = self.watchers.stop(alarms)
            if stopping_alarm:
                self.stopped = stopping_alarm
                control.should_training_stop = True
                control.should_save = False  # a second try reaches this step again, and stops again

    return Watching()
