"""What a training is given, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qrl.formats import groups
from qrl.formats.kept import Kept
from qrl.recipe import Rollout, Train, Watch

if TYPE_CHECKING:
    import pandas as pd

    from qrl import tasks
    from qrl.tasks import prompt

Log = Callable[[dict[str, float], int], None]  # metrics by name, and the optimizer step


@dataclass(frozen=True)
class Alarm:
    """The one warning of a watcher."""

    watcher: str  # entropy, signal, kl, truncation, probe, rollout or resample; format and gap before the first step
    step: int
    sentence: str


@dataclass(frozen=True)
class Machine:
    """What trains: this machine, or nodes of a cluster."""

    device: str  # "cpu" or "cuda"
    gpus: int | None = None  # that a cluster gives to a training; None: those of this machine
    processes: int = 1  # that a cluster starts


@dataclass(frozen=True)
class Job:
    """One training: its data, its settings, its folders, and where its metrics and warnings go."""

    base: Path  # full-precision checkpoint folder; never written to
    questions: Sequence[tasks.Question]  # to train on; a step draws `prompts_per_step` of them
    settings: Train
    task: str  # the task that grades; distillation does not grade
    template: str | prompt.Template  # the prompt: its name, or its texts and variables of the chat template
    seed: int  # of data order and sampling
    device: str  # "cpu" or "cuda"
    work: Path  # folder of the trainer's checkpoints: the same for a run and its second try, and for all processes
    out: Path  # folder to make; it appears whole, by rename
    rollout: Rollout = Rollout()
    watch: Watch = Watch()
    teacher: Path | None = None  # full-precision checkpoint folder of the model that scores in a distillation
    group_size: int = groups.USUAL  # of train.qat in integers with groups: inputs that share a scale
    # For held-out accuracy during training, where `watch.probe_every` is set.
    probe_questions: Sequence[tasks.Question] = ()
    log: Log = lambda metrics, step: None
    warn: Callable[[Alarm], None] = lambda alarm: None  # called once per watcher

    def longest(self) -> int:
        """Return the tokens of the longest prompt plus `train.max_completion_tokens`."""
        from qrl.engine import hf
        from qrl.tasks import lengths

        questions = (*self.questions, *self.probe_questions)
        prompt_tokens = lengths.longest_prompt(hf.tokenizer(self.base), questions, self.template)
        return prompt_tokens + self.settings.max_completion_tokens


@dataclass(frozen=True)
class Trained:
    """What a training left behind."""

    path: Path  # a checkpoint, or an adapter for `merge`
    adapter: bool
    history: pd.DataFrame  # a row per step, from `metrics.history`
    probes: pd.DataFrame  # a row per probe, from `probe.curve`
    completions: pd.DataFrame  # sampled completions: step, prompt, completion, reward
    resumed_from: int  # step of the checkpoint that training resumed from; 0 for a fresh start
    seconds: float  # of this process
    stopped: Alarm | None  # the watcher that ended the training early
    kept: Kept | None = None  # what the stored weights keep of the update, where all weights were trained
