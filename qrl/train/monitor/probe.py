"""A small held-out probe while training: greedy answers of the policy as it stands, graded as everywhere.

Its questions come from the training split and are no prompts of the training; the final evaluation asks the held-out split. It
draws no random number, so a training with a probe trains the same weights as one without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from qrl import process, stats, tasks
from qrl.engine import hf
from qrl.recipe import Rollout, Watch
from qrl.tasks import prompt
from qrl.train.monitor import live
from qrl.train.monitor.watchers import Alarm, Watchers

if TYPE_CHECKING:
    import pandas as pd

Warn = Callable[[Alarm], None]


def outcomes(
    trainer, tokens, questions: Sequence[tasks.Question], *, task: str, template: str, max_new_tokens: int
) -> list[int]:
    """0 or 1 a question, in order; several processes share the questions, and all know all outcomes.

    Args:
        trainer: TRL's, whose policy answers.
        tokens: its tokenizer.
    """
    import torch
    from accelerate.utils import gather_object
    from torch.distributed.fsdp import FullyShardedDataParallel
    from transformers import GenerationConfig
    from trl.models import unwrap_model_for_generation

    rank, world = process.rank(), process.world_size()
    places = [
        place % len(questions) for place in range(rank, -(-len(questions) // world) * world, world)
    ]  # as many for each process
    mine = [questions[place] for place in places]
    whole = trainer._dist.summon_full_params(
        trainer.model_wrapped, recurse=False
    )  # of what FSDP wraps in no layer of its own
    with unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as model, torch.no_grad(), whole:
        policy = model.module if isinstance(model, FullyShardedDataParallel) else model
        was, training = policy.generation_config, policy.training
        policy.generation_config = GenerationConfig(eos_token_id=was.eos_token_id, pad_token_id=tokens.pad_token_id)
        policy.eval()
        try:
            asked = [prompt.render(tokens, question.question, template) for question in mine]
            said = hf.generate(model, tokens, asked, max_new_tokens=max_new_tokens, batch_size=128)
        finally:
            policy.generation_config = was
            policy.train(training)
    verdicts = tasks.grade_many(task, [each.text for each in said], [question.answer for question in mine])
    found = gather_object([(place, int(verdict.strict)) for place, verdict in zip(places, verdicts, strict=True)])
    return [outcome for _, outcome in sorted(dict(found).items())]


def curve(log_history: Sequence[dict]) -> pd.DataFrame:
    """Held-out accuracy over steps, from the rows that a trainer kept: step, accuracy, its 95 % interval low and high, and n."""
    import pandas as pd

    rows = []
    for row in (row for row in log_history if "probe" in row):
        found = stats.accuracy(sum(row["probe"]), len(row["probe"]))
        rows.append((row["step"], found.estimate, found.low, found.high, len(row["probe"])))
    return pd.DataFrame(rows, columns=["step", "accuracy", "low", "high", "n"])


def callback(watch: Watch, rollout: Rollout, ask: Callable[[], list[int]], log: live.Log, warn: Warn):
    """A callback that shows the watchers every row, asks the probe when it is due, and stops training if the recipe says so.

    Args:
        watch: what is watched, and stopped for.
        rollout: how far the engine that samples may be.
        ask: gives the probe's outcomes; not called where `watch.probe_every` is 0.
    """
    from transformers import TrainerCallback

    class Watching(TrainerCallback):
        stopped: Alarm | None = None

        def on_train_begin(self, args, state, control, **_):
            self.watchers = Watchers(watch, rollout)
            for row in state.log_history:  # of the training that this one goes on from, whose warnings are told
                self.watchers.see(row)
            if watch.probe_every and state.global_step == 0:
                self.probe(state, control)

        def on_log(self, args, state, control, logs=None, **_):
            if "reward" in (logs or {}):
                self.tell(self.watchers.see(state.log_history[-1]), state, control)

        def on_step_end(self, args, state, control, **_):
            if watch.probe_every and state.global_step % watch.probe_every == 0:
                self.probe(state, control)

        def probe(self, state, control):
            row = {"step": state.global_step, "probe": ask()}
            state.log_history.append(row)
            found = stats.accuracy(sum(row["probe"]), len(row["probe"]))
            log(
                {"probe/accuracy": found.estimate, "probe/accuracy_stderr": found.stderr, "probe/n": len(row["probe"])},
                state.global_step,
            )
            self.tell(self.watchers.see(row), state, control)

        def tell(self, alarms, state, control):
            for alarm in alarms:
                log({f"watch/{alarm.watcher}": 1.0}, alarm.step)
                warn(alarm)
            if stopping := self.watchers.stop(alarms):
                self.stopped = stopping
                control.should_training_stop = True
                control.should_save = False  # a second try comes to this step again, and stops again

    return Watching()
