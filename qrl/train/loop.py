"""The training loop, whatever the loss: train from the newest whole checkpoint, check what is frozen, write, report."""

import functools
import hashlib
import json
import time
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch

from qrl import checkpoint, process
from qrl.checkpoint import header
from qrl.errors import BadInput, QrlError
from qrl.train import arguments, parallel, policy, save, sharded
from qrl.train.job import Job, Trained
from qrl.train.monitor import metrics, probe
from qrl.train.qat import prepare


def run(trainer, job: Job, base: checkpoint.Checkpoint, kind: metrics.Kind, more: Mapping[str, str] = {}) -> Trained:
    """Train with TRL's trainer and write the outcome.

    Args:
        more: digests of further inputs, by what they are, which processes that train together compare.

    Raises:
        QrlError: trained weights are NaN or infinite, or the base under an adapter changed in memory.
    """
    from transformers import PrinterCallback

    if process.world_size() > 1:
        parallel.agree({**start(base, job), **more})
    elif job.settings.adapter:
        _ = base.digest  # which the adapter will name, whatever the folder holds by then
    prepare.begin(trainer, job)
    model = trainer.accelerator.unwrap_model(trainer.model)
    watching = probe.callback(trainer, job)
    trainer.add_callback(watching)
    trainer.add_callback(_no_further_step())  # after the others, whose training begins too
    frozen = Guard(model, job.settings.adapter)
    trainer.remove_callback(PrinterCallback)
    if process.rank() == 0:
        job.work.mkdir(parents=True, exist_ok=True)
        (job.work / arguments.FILE).write_text(trainer.args.to_json_string())
    last = latest(job.work)
    register_numbered_cpus()
    began = time.perf_counter()
    try:
        trainer.train(resume_from_checkpoint=str(last) if last else None)
    except _AllSteps:
        trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
    seconds = time.perf_counter() - began
    state = sharded.gathered(trainer)
    frozen.check(state)
    kept = None
    if process.rank() == 0:  # which has the whole state
        if name := policy.first_nonfinite(model.named_parameters() if state is None else state.items()):
            raise QrlError(f"Training has left NaN or infinity in {name}: lower train.learning_rate. Nothing is kept.")
        if not job.settings.adapter:
            kept = save.update(model, base, save.stored_in(job.settings, base), state).kept
        save.trained(model, base, job, state)
    trainer.accelerator.wait_for_everyone()
    return Trained(
        path=job.out,
        adapter=job.settings.adapter,
        history=metrics.history(trainer.state.log_history, kind),
        probes=probe.curve(trainer.state.log_history),
        completions=metrics.completions(job.work, job.settings, kind),
        resumed_from=step(last) if last else 0,
        seconds=seconds,
        stopped=watching.stopped,
        kept=kept,
    )


def start(base: checkpoint.Checkpoint, job: Job) -> dict[str, str]:
    """Return the digests of what a training begins with; processes that train together have the same."""
    sections = (section.model_dump_json() for section in (job.settings, job.rollout, job.watch))
    asked = (f"{question.question}\0{question.answer}" for question in job.questions)
    settings = "\n".join((*sections, job.task, repr(job.template), str(job.seed), *asked))
    return {"settings or questions": hashlib.sha256(settings.encode()).hexdigest(), "base weights": base.digest}


class _AllSteps(Exception):
    """The checkpoint that training resumes from is that of its last step."""


def _no_further_step():
    """Return a callback that ends a training which resumes after its last step: transformers would take another one."""
    from transformers import TrainerCallback

    class NoFurtherStep(TrainerCallback):
        def on_train_begin(self, args, state, control, **_):
            if state.global_step >= state.max_steps:
                raise _AllSteps

    return NoFurtherStep()


def latest(work: Path) -> Path | None:
    """Return the newest `checkpoint-N` that a killed training left whole, if there is one; warn of broken ones."""
    for path in sorted(work.glob("checkpoint-*"), key=step, reverse=True):
        reason = _broken(path)
        if reason is None:
            return path
        warnings.warn(f"{path.name} is broken ({reason}): the checkpoint before it is used.", stacklevel=2)
    return None


def step(checkpoint: Path) -> int:
    """Return the optimizer step of a `checkpoint-N`."""
    return int(checkpoint.name.rpartition("-")[2])


@functools.cache
def register_numbered_cpus() -> None:
    """Let torch load a checkpoint to "cpu:0", which several processes on a CPU ask for; torch knows only "cpu"."""
    torch.serialization.register_package(
        15, lambda storage: None, lambda storage, place: storage if place.startswith("cpu:") else None
    )


def _broken(path: Path) -> str | None:
    """Return why a checkpoint cannot be resumed from: a kill while saving leaves files missing or truncated."""
    world = process.world_size()
    states = [f"rng_state_{rank}.pth" for rank in range(world)] if world > 1 else ["rng_state.pth"]
    try:
        json.loads((path / "trainer_state.json").read_text())
        weights = list(path.glob("*.safetensors"))
        for file in weights:
            if not header.read(file):
                return f"{file.name} holds no weights"
        for name in (*sharded.optimizer_files(step(path)), "scheduler.pt", *states):
            if (bad := zipfile.ZipFile(path / name).testzip()) is not None:
                return f"{name} holds a damaged {bad}"
    except (OSError, ValueError, zipfile.BadZipFile, BadInput) as error:
        return str(error)
    return None if weights else "it holds no weights"


class Guard:
    """The base under an adapter, hashed before training and again after it."""

    def __init__(self, model, adapter: bool) -> None:
        """Hash the frozen weights, before training shards the model; without an adapter nothing is frozen."""
        self.model = model
        self.names = [name for name, weight in model.named_parameters() if not weight.requires_grad]
        hashed = adapter and not (process.sharded() and process.rank())  # FSDP's first process alone loads the weights
        self.before = self._digest(dict(model.named_parameters()) if process.sharded() else None) if hashed else ""

    def check(self, state: Mapping[str, torch.Tensor] | None) -> None:
        """Raise QrlError if the frozen weights have changed; `state` has those that several processes hold in parts."""
        if self.before and self.before != self._digest(state):
            raise QrlError(
                "The base changed in memory while its adapter was trained, so the adapter fits no base that can be "
                "loaded. This is a bug in qrl or a library: report it; nothing is kept."
            )

    def _digest(self, state: Mapping[str, torch.Tensor] | None) -> str:
        if state is None:
            return frozen_digest(self.model)
        # FSDP may store them in another dtype.
        return parallel.digest((name, state[name].float()) for name in self.names)


def frozen_digest(model) -> str:
    """Return the sha256 of everything that is not trained, as stored in memory: codes, scales and unpacked weights."""
    tensors = [(name, weight.data) for name, weight in model.named_parameters() if not weight.requires_grad]
    for name, module in policy.packed(model):
        if (state := getattr(module.weight, "quant_state", None)) is not None:
            tensors += [(f"{name}.{key}", value) for key, value in state.as_dict(packed=True).items()]
        else:
            scales = getattr(module.weight, "SCB", None)
            tensors.append((f"{name}.SCB", module.state.SCB if scales is None else scales))
    return parallel.digest(tensors)
