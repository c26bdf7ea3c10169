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


def run(
    trainer, job: Job, base: checkpoint.Checkpoint, kind: metrics.Kind, further_digests: Mapping[str, str] = {}
) -> Trained:
    """Train with TRL's trainer and write the outcome.

    Args:
        trainer: TRL's, made for the job.
        job: what is trained.
        base: what it starts from.
        kind: which metrics the trainer logs.
        further_digests: of other inputs, by what they are, which processes that train together compare.

    Raises:
        QrlError: trained weights are NaN or infinite, or the base under an adapter changed in memory.
    """
    from transformers import PrinterCallback

    if process.world_size() > 1:
        parallel.agree({**start(base, job), **further_digests})
    # Computed now, since an adapter names what it was trained over, whatever the folder holds at the end.
    base_digest = base.digest if job.settings.adapter else ""

    prepare.begin(trainer, job)
    model = trainer.accelerator.unwrap_model(trainer.model)
    prober = probe.callback(trainer, job)
    trainer.add_callback(prober)
    trainer.add_callback(_no_further_step())  # the last, so that the others see the training begin
    trainer.remove_callback(PrinterCallback)
    guard = Guard(model, job.settings.adapter)
    if process.rank() == 0:
        job.work.mkdir(parents=True, exist_ok=True)
        (job.work / arguments.FILE).write_text(trainer.args.to_json_string())

    resumed_from = latest(job.work)
    seconds = _train(trainer, resumed_from)

    state = sharded.gathered(trainer)
    guard.check(state)
    kept = None
    if process.rank() == 0:  # which has the whole state
        _check_finite(model, state)
        if not job.settings.adapter:
            kept = save.update(model, base, save.stored_in(job.settings, base), state).kept
        save.trained(model, base, job, state, base_digest=base_digest)
    trainer.accelerator.wait_for_everyone()

    return Trained(
        path=job.out,
        adapter=job.settings.adapter,
        history=metrics.history(trainer.state.log_history, kind),
        probes=probe.curve(trainer.state.log_history),
        completions=metrics.completions(job.work, job.settings, kind),
        resumed_from=step(resumed_from) if resumed_from else 0,
        seconds=seconds,
        stopped=prober.stopped,
        kept=kept,
    )


def _train(trainer, resumed_from: Path | None) -> float:
    """Take the steps that are left, and return their seconds."""
    register_numbered_cpus()
    start_s = time.perf_counter()
    try:
        trainer.train(resume_from_checkpoint=str(resumed_from) if resumed_from else None)
    except _AllSteps:
        trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
    return time.perf_counter() - start_s


def _check_finite(model, state: Mapping[str, torch.Tensor] | None) -> None:
    """Raise QrlError if a trained weight is NaN or infinite."""
    weights = model.named_parameters() if state is None else state.items()
    name = policy.first_nonfinite(weights)
    if name:
        raise QrlError(f"Training has left NaN or infinity in {name}: lower train.learning_rate. Nothing is kept.")


def start(base: checkpoint.Checkpoint, job: Job) -> dict[str, str]:
    """Return the digests of what a training begins with; processes that train together have the same."""
    sections = [section.model_dump_json() for section in (job.settings, job.rollout, job.watch)]
    questions = [f"{question.question}\0{question.answer}" for question in job.questions]
    settings = "\n".join((*sections, job.task, repr(job.template), str(job.seed), *questions))
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

    def keep_on_cpu(storage, location: str):
        return storage if location.startswith("cpu:") else None

    priority = 15  # between torch's own for the CPU, 10, and those for other devices, from 20
    torch.serialization.register_package(priority, lambda storage: None, keep_on_cpu)


def _broken(path: Path) -> str | None:
    """Return why a checkpoint cannot be resumed from: a kill while saving leaves files missing or truncated."""
    random_states = ["rng_state.pth"]
    if process.world_size() > 1:
        random_states = [f"rng_state_{rank}.pth" for rank in range(process.world_size())]
    try:
        json.loads((path / "trainer_state.json").read_text())
        weight_files = list(path.glob("*.safetensors"))
        if not weight_files:
            return "it holds no weights"
        for file in weight_files:
            if not header.read(file):
                return f"{file.name} holds no weights"

        # torch's files are zip archives, which have checksums.
        for name in (sharded.optimizer_file(), "scheduler.pt", *random_states):
            damaged_member = zipfile.ZipFile(path / name).testzip()
            if damaged_member is not None:
                return f"{name} holds a damaged {damaged_member}"
    except (OSError, ValueError, zipfile.BadZipFile, BadInput) as error:
        return str(error)
    return None


class Guard:
    """The base under an adapter, hashed before training and again after it."""

    def __init__(self, model, adapter: bool) -> None:
        """Hash the frozen weights, before training shards the model; without an adapter nothing is frozen."""
        self.model = model
        self.frozen_names = [name for name, weight in model.named_parameters() if not weight.requires_grad]
        self.digest_before = ""
        loads_weights = not process.sharded() or process.rank() == 0  # FSDP's first process alone
        if adapter and loads_weights:
            self.digest_before = self._digest(dict(model.named_parameters()) if process.sharded() else None)

    def check(self, state: Mapping[str, torch.Tensor] | None) -> None:
        """Raise QrlError if the frozen weights have changed; `state` has those that several processes hold in parts."""
        if self.digest_before and self.digest_before != self._digest(state):
            raise QrlError(
                "The base changed in memory while its adapter was trained, so the adapter fits no base that can be "
                "loaded. This is a bug in qrl or a library: report it; nothing is kept."
            )

    def _digest(self, state: Mapping[str, torch.Tensor] | None) -> str:
        if state is None:
            return frozen_digest(self.model)
        # FSDP may store them in another dtype.
        return parallel.digest((name, state[name].float()) for name in self.frozen_names)


def frozen_digest(model) -> str:
    """Return the sha256 of everything that is not trained, as stored in memory: codes, scales and unpacked weights."""
    tensors = [(name, weight.data) for name, weight in model.named_parameters() if not weight.requires_grad]
    for name, module in policy.packed(model):
        four_bit_state = getattr(module.weight, "quant_state", None)
        if four_bit_state is not None:
            tensors += [(f"{name}.{key}", value) for key, value in four_bit_state.as_dict(packed=True).items()]
            continue
        scales = getattr(module.weight, "SCB", None)  # LLM.int8(): with the weight, or with the module after a forward
        tensors.append((f"{name}.SCB", module.state.SCB if scales is None else scales))
    return parallel.digest(tensors)
