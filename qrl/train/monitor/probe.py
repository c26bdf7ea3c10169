"""A small probe of held-out accuracy during training: greedy answers of the present policy, graded as in evaluation."""

from collections.abc import Sequence

import pandas as pd
import torch

from qrl import process, stats, tasks
from qrl.engine import hf
from qrl.tasks import prompt
from qrl.train import trl_private
from qrl.train.job import Alarm, Job
from qrl.train.monitor.watchers import Watchers
from qrl.train.rollout import VLLM


def outcomes(trainer, job: Job) -> list[int]:
    """Return 0 or 1 per probe question, in order; several processes share the questions, and each returns them all."""
    from accelerate.utils import gather_object

    rank, world, count = process.rank(), process.world_size(), len(job.probed)
    places = [place % count for place in range(rank, -(-count // world) * world, world)]  # equally many per process
    questions, tokens = [job.probed[place] for place in places], hf.tokenizer(job.base)
    prompts = [prompt.render(tokens, question.question, job.template) for question in questions]
    answers = (_engines_answers if job.rollout.engine == VLLM else _own_answers)(trainer, job, tokens, prompts)
    gold = [question.answer for question in questions]
    verdicts = tasks.grade_many(job.task, [answer.text for answer in answers], gold)
    graded = gather_object([(place, int(verdict.strict)) for place, verdict in zip(places, verdicts, strict=True)])
    return [outcome for _, outcome in sorted(dict(graded).items())]


def _engines_answers(trainer, job: Job, tokens, prompts: list[list[int]]) -> list[hf.Completion]:
    """Return the answers of the rollout engine, which has the memory and the speed for long ones."""
    ends = set(hf.end_tokens(trainer.accelerator.unwrap_model(trainer.model).generation_config, job.base))
    special = set(tokens.all_special_ids)
    return [hf.completion(tokens, ids, ends, special) for ids in trainer.vllm_generation.greedy(prompts)]


def _own_answers(trainer, job: Job, tokens, prompts: list[list[int]]) -> list[hf.Completion]:
    """Return the answers of the model in training, decoded by transformers."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from transformers import GenerationConfig
    from trl.models import unwrap_model_for_generation

    with (
        unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as model,
        torch.no_grad(),
        trl_private.unsharded(trainer),
    ):
        policy = model.module if isinstance(model, FullyShardedDataParallel) else model
        config, training = policy.generation_config, policy.training
        policy.generation_config = GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=tokens.pad_token_id)
        policy.eval()
        try:
            longest = job.settings.max_completion_tokens
            return hf.generate(model, tokens, prompts, max_new_tokens=longest, batch_size=128)
        finally:
            policy.generation_config = config
            policy.train(training)


def curve(log_history: Sequence[dict]) -> pd.DataFrame:
    """Return held-out accuracy over steps: step, accuracy, its 95 % interval low and high, and n."""
    rows = []
    for row in (row for row in log_history if "probe" in row):
        accuracy = stats.accuracy(sum(row["probe"]), len(row["probe"]))
        rows.append((row["step"], accuracy.estimate, accuracy.low, accuracy.high, len(row["probe"])))
    return pd.DataFrame(rows, columns=["step", "accuracy", "low", "high", "n"])


def callback(trainer, job: Job):
    """Return a callback that runs probes and watchers, and stops training where the recipe says so."""
    from transformers import TrainerCallback

    every = job.watch.probe_every

    class Watching(TrainerCallback):
        stopped: Alarm | None = None

        def on_train_begin(self, args, state, control, **_):
            self.watchers = Watchers(job.watch, job.rollout, job.settings.qat)
            for row in state.log_history:  # of the interrupted training; its warnings were given
                self.watchers.see(row)
            if every and state.global_step == 0:
                self.probe(state, control)

        def on_log(self, args, state, control, logs=None, **_):
            if "reward" in (logs or {}):
                self.warn(self.watchers.see(state.log_history[-1]), control)

        def on_step_end(self, args, state, control, **_):
            if every and state.global_step % every == 0:
                self.probe(state, control)

        def probe(self, state, control):
            row = {"step": state.global_step, "probe": outcomes(trainer, job)}
            state.log_history.append(row)
            accuracy = stats.accuracy(sum(row["probe"]), len(row["probe"]))
            logged = {"accuracy": accuracy.estimate, "accuracy_stderr": accuracy.stderr, "n": len(row["probe"])}
            job.log({f"probe/{name}": value for name, value in logged.items()}, state.global_step)
            self.warn(self.watchers.see(row), control)

        def warn(self, alarms, control):
            for alarm in alarms:
                job.log({f"watch/{alarm.watcher}": 1.0}, alarm.step)
                job.warn(alarm)
            if stopping := self.watchers.stop(alarms):
                self.stopped = stopping
                control.should_training_stop = True
                control.should_save = False  # a second try reaches this step again, and stops again

    return Watching()
