"""GRPO with TRL's trainer: prompts in, a full-precision checkpoint or an adapter out.

What is ours: the recipe, the rewards, live metrics through a `log` that is handed in, and resuming. The trainer reports
to nothing else: TRL's own MLflow callback would take and end the project's run, and drop parameters in batches.

Several processes (`torchrun`, `accelerate launch`) run this same code; the first of them logs and writes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qrl import checkpoint, process, tasks
from qrl.engine import hf
from qrl.errors import BadInput
from qrl.recipe import Rollout, Train, Watch
from qrl.tasks import prompt
from qrl.train import arguments, guard, policy, resume, reward, save, sharded
from qrl.train.monitor import completions, live, probe
from qrl.train.monitor.watchers import Alarm
from qrl.train.qat import callback
from qrl.train.rollout import trainer as rollouts

if TYPE_CHECKING:
    import pandas as pd

ARGUMENTS = "arguments.json"  # the trainer's whole configuration, kept in the work folder


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a training left behind."""

    path: Path  # a checkpoint, or an adapter that `merge` folds in
    adapter: bool
    history: pd.DataFrame  # a row per step, as `live.history` gives it
    probes: pd.DataFrame  # a row per look at held-out accuracy, as `probe.curve` gives it
    completions: pd.DataFrame  # sampled completions: step, prompt, completion, reward
    resumed_from: int  # step of the checkpoint that it went on from; 0 is a fresh start
    seconds: float  # of this process
    stopped: Alarm | None  # the watcher that ended it early, and what it said


def check(
    base: checkpoint.Checkpoint,
    settings: Train,
    questions: int,
    device: str,
    watch: Watch = Watch(),
    rollout: Rollout = rollouts.DEFAULT,
) -> None:
    """Refuses what cannot be trained, before any weight is loaded.

    Args:
        base: what training starts from.
        settings: the recipe's section.
        questions: how many there are to train on.
        device: "cpu" or "cuda".
        watch: what training would be stopped for, and whether it is probed.
        rollout: what samples, and whether its gap to the trained model is measured.

    Raises:
        BadInput: a quantized base, adapter settings that fit neither method nor model, a reference that has no room, a batch that
            does not divide, or a stop for what is never measured.
    """
    if base.quantization:
        raise BadInput(
            f"{base.path} is stored in {base.quantization}: training starts from full-precision weights, and packs them itself "
            "where train.base_storage says so. Give the checkpoint that it was made from."
        )
    if process.sharded() and device == "cpu":
        raise BadInput(
            "FSDP shards a model over GPUs, but this run's device is the CPU: launch without --use_fsdp, or run on GPUs."
        )
    tensors = checkpoint.entries(base.path)
    policy.check(settings, tensors)
    policy.check_reference(settings, tensors, device)
    _check_stop(watch, settings, rollout)
    arguments.check(settings, questions)
    if settings.qat != "none":
        callback.check(settings, base.path)


def _check_stop(watch: Watch, settings: Train, rollout: Rollout) -> None:
    """Refuses to stop for what is never measured."""
    if "kl" in watch.stop and not settings.beta:
        raise BadInput(
            "watch.stop = kl needs a reference to measure the KL from: set train.beta above 0, or leave kl out."
        )
    if "probe" in watch.stop and not watch.probe_every:
        raise BadInput(
            "watch.stop = probe needs a probe: set watch.probe_every to a number of steps, or leave probe out."
        )
    if "rollout" in watch.stop and (rollout.engine != rollouts.VLLM or rollout.is_correction == "none"):
        raise BadInput(
            "watch.stop = rollout needs an engine whose gap to the trained model is measured: set rollout.engine = vllm with a "
            "rollout.is_correction, or leave rollout out."
        )


def run(
    base: Path,
    questions: Sequence[tasks.Question],
    settings: Train,
    *,
    task: str,
    template: str,
    seed: int,
    device: str,
    work: Path,
    out: Path,
    rollout: Rollout = rollouts.DEFAULT,
    log: live.Log = lambda metrics, step: None,
    watch: Watch = Watch(),
    probed: Sequence[tasks.Question] = (),
    warn: probe.Warn = lambda alarm: None,
) -> Trained:
    """Trains a checkpoint with GRPO, or goes on with a training that was killed.

    Args:
        base: full-precision checkpoint folder; never written to.
        questions: training questions; `prompts_per_step` are drawn for each of `steps`.
        settings: the recipe's section.
        task: whose grader rewards.
        template: the prompt's, by name.
        seed: of data order and sampling.
        device: "cpu" or "cuda".
        work: folder of the trainer's checkpoints, the same for a run and its second try, and for all processes.
        out: folder to make; it appears whole, by rename.
        rollout: the recipe's section on what samples.
        log: takes metrics by name and the optimizer step, while training.
        watch: what is warned of, and stopped for.
        probed: questions that held-out accuracy is watched on, where `watch.probe_every` says so.
        warn: takes an alarm of a watcher, once each.

    Raises:
        BadInput: what `check` refuses.
        QrlError: the base under an adapter changed in memory.
    """
    found = checkpoint.check(base)
    check(found, settings, len(questions), device, watch, rollout)
    rollouts.check(rollout, device, settings)
    process.hush_transformers()
    rows = [{"prompt": prompt.messages(q.question, template), "answer": q.answer} for q in questions]
    trainer = _trainer(base, rows, settings, task=task, seed=seed, device=device, work=work, rollout=rollout, log=log)
    if settings.qat != "none":
        callback.begin(trainer, questions, settings, base=base, template=template, work=work, log=log)

    def ask() -> list[int]:
        longest = settings.max_completion_tokens
        return probe.outcomes(trainer, hf.tokenizer(base), probed, task=task, template=template, max_new_tokens=longest)

    watching = probe.callback(watch, rollout, ask, log, warn)
    trainer.add_callback(watching)
    note_arguments(trainer, work)
    last, seconds = _train(trainer, found, settings, work, out)
    return Trained(
        path=out,
        adapter=settings.adapter,
        history=live.history(trainer.state.log_history),
        probes=probe.curve(trainer.state.log_history),
        completions=completions.sampled(work, settings),
        resumed_from=int(last.name.rpartition("-")[2]) if last else 0,
        seconds=seconds,
        stopped=watching.stopped,
    )


def _train(trainer, base: checkpoint.Checkpoint, settings: Train, work: Path, out: Path) -> tuple[Path | None, float]:
    """Trains, from the newest whole checkpoint if there is one, and writes; that checkpoint, and the seconds of training."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    base_of_adapter = guard.Guard(model, settings.adapter)
    last = resume.latest(work)
    resume.read_to_cpus()
    began = time.perf_counter()
    trainer.train(resume_from_checkpoint=str(last) if last else None)
    seconds = time.perf_counter() - began
    state = trainer.accelerator.get_state_dict(trainer.model) if trainer.is_fsdp_enabled else None
    base_of_adapter.check(state)
    _write(trainer, model, state, base, settings, out)
    return last, seconds


def _trainer(
    base: Path,
    rows: list[dict],
    settings: Train,
    *,
    task: str,
    seed: int,
    device: str,
    work: Path,
    rollout: Rollout,
    log: live.Log,
):
    """TRL's trainer with everything of ours plugged in, ready to train."""
    from transformers import PrinterCallback

    trainer = rollouts.trainer_class(rollout)(
        model=policy.load(base, settings, device),
        reward_funcs=reward.functions(task, settings.rewards),
        args=arguments.make(settings, seed=seed, device=device, work=work, **rollouts.arguments(rollout)),
        train_dataset=dataset(rows),
        processing_class=hf.tokenizer(base),
        callbacks=[live.callback(settings, log)],
        peft_config=policy.adapter(settings),
    )
    trainer.remove_callback(PrinterCallback)
    policy.widen(trainer.model)
    _keep_no_casts(trainer)
    if process.sharded():
        sharded.prepare(trainer, settings.adapter)
    return trainer


def _keep_no_casts(trainer) -> None:
    """Lets weights that bf16 arithmetic rounds be rounded at each use and dropped: autocast keeps them all until a forward pass ends.

    A pass uses each weight once, so nothing is computed twice; where all weights are trained it is 2 bytes a parameter less.
    """
    from accelerate.utils import AutocastKwargs

    trainer.accelerator.autocast_handler = AutocastKwargs(cache_enabled=False)


def dataset(rows: list[dict]):
    """Rows as TRL takes them, under a fingerprint of our own: hashing them pickles classes of pyarrow, which can fail."""
    from datasets import Dataset
    from datasets.table import InMemoryTable

    columns = {name: [row[name] for row in rows] for name in rows[0]}
    digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    return Dataset(InMemoryTable.from_pydict(columns), fingerprint=digest[:16])


def note_arguments(trainer, work: Path) -> None:
    """Keeps the trainer's whole configuration in its work folder."""
    if process.rank() == 0:
        work.mkdir(parents=True, exist_ok=True)
        (work / ARGUMENTS).write_text(trainer.args.to_json_string())


def _write(trainer, model, state: dict | None, base: checkpoint.Checkpoint, settings: Train, out: Path) -> None:
    """The trained weights, written by the first process; `state` has them where several hold parts of the model."""
    if process.rank() == 0:
        if settings.adapter:
            save.write(
                model, base.path, out, dtype=None, state=state, note=lambda at: policy.record(at, settings, base.digest)
            )
        elif settings.qat != "none":  # codes of the masters are codes of Q(W) only while nothing rounds them
            save.write(
                model,
                base.path,
                out,
                dtype="float32",
                state=state,
                note=callback.note_scales(Path(trainer.args.output_dir)),
            )
        else:
            save.write(model, base.path, out, dtype=base.dtype, state=state)
    trainer.accelerator.wait_for_everyone()
