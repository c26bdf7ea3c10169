"""On-policy distillation with TRL's trainer: the student samples, a full-precision teacher scores every token of it.

Where the student computes with Q(W) this is quantization-aware distillation. What is ours is the loss: both distributions
are cut to the teacher's likeliest tokens and normalized again over them, as NeMo-RL does, rather than taken over the whole
vocabulary (`train.distill_top_k` at least that large gives the plain KL).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qrl import checkpoint, process, tasks
from qrl.engine import hf
from qrl.errors import BadInput
from qrl.recipe import Train, Watch
from qrl.tasks import prompt
from qrl.train import arguments, grpo, policy, resume, save
from qrl.train.monitor import completions, live, probe
from qrl.train.qat import callback

if TYPE_CHECKING:
    from torch import Tensor

LOGGED = (
    "loss",
    "entropy",
    "grad_norm",
    "learning_rate",
    "completions/mean_length",
    "completions/clipped_ratio",
    "completions_per_s",
    "peak_memory_gib",
)
SHOWN = {
    "shown": "loss",
    "metrics": {name: live.METRICS[name] for name in LOGGED},
}  # of `live`: what is optimized, TRL's name → ours


def check(
    base: checkpoint.Checkpoint, teacher: checkpoint.Checkpoint, settings: Train, questions: int, watch: Watch = Watch()
) -> None:
    """Refuses what cannot be distilled, before any weight is loaded.

    Args:
        base: the student's.
        settings: the recipe's section.
        questions: how many there are to train on.
        watch: what is watched: watchers read GRPO's rewards, which a distillation has none of.

    Raises:
        BadInput: a quantized teacher or student, another vocabulary, an adapter or its settings, a batch that does not divide,
            too few questions, or watchers.
    """
    if watch.stop or watch.probe_every:
        raise BadInput(
            "train.teacher trains without watchers, which read GRPO's rewards: leave watch.stop out, and watch.probe_every at 0."
        )
    for found, role in ((base, "student's base"), (teacher, "teacher")):
        if found.quantization:
            raise BadInput(f"The {role} {found.path} is stored in {found.quantization}: give full-precision weights.")
    sizes = [checkpoint.config(found.path).get("vocab_size") for found in (base, teacher)]
    if sizes[0] != sizes[1]:
        raise BadInput(
            f"The teacher {teacher.path} has a vocabulary of {sizes[1]}, the student one of {sizes[0]}: choose a teacher of the same family."
        )
    if process.world_size() > 1:
        raise BadInput("train.teacher distils in one process: start the step without torchrun or accelerate launch.")
    if settings.adapter:
        raise BadInput(
            f"train.teacher distils into all weights, but train.method = {settings.method} trains an adapter: choose full."
        )
    policy.check(settings, checkpoint.entries(base.path))
    arguments.check(settings, questions)
    if settings.qat != "none":
        callback.check(settings, base.path)


def run(
    base: Path,
    teacher: Path,
    questions: Sequence[tasks.Question],
    settings: Train,
    *,
    template: str,
    seed: int,
    device: str,
    work: Path,
    out: Path,
    log: live.Log = lambda metrics, step: None,
) -> grpo.Trained:
    """Distils a teacher into a student, or goes on with a distillation that was killed.

    Args:
        base: full-precision checkpoint that the student begins as; never written to.
        teacher: full-precision checkpoint of the same vocabulary.
        questions: training questions; their answers are not looked at.
        settings: the recipe's section; a step samples `prompts_per_step` × `generations` completions.
        template: the prompt's, by name.
        seed: of data order and sampling.
        device: "cpu" or "cuda".
        work: folder of the trainer's checkpoints, the same for a run and its second try.
        out: folder to make; it appears whole, by rename.
        log: takes metrics by name and the optimizer step.

    Raises:
        BadInput: what `check` refuses.
    """
    found = checkpoint.check(base)
    check(found, checkpoint.check(teacher), settings, len(questions))
    process.hush_transformers()
    trainer = _trainer(
        base, teacher, questions, settings, template=template, seed=seed, device=device, work=work, log=log
    )
    if settings.qat != "none":
        callback.begin(trainer, questions, settings, base=base, template=template, work=work, log=log)
    grpo.note_arguments(trainer, work)
    last = resume.latest(work)
    began = time.perf_counter()
    trainer.train(resume_from_checkpoint=str(last) if last else None)
    seconds = time.perf_counter() - began
    model = trainer.accelerator.unwrap_model(trainer.model)
    dtype = found.dtype if settings.qat == "none" else "float32"  # of masters, whose codes rounding would change
    save.write(model, base, out, dtype=dtype, note=callback.note_scales(work))
    return grpo.Trained(
        path=out,
        adapter=False,
        history=live.history(trainer.state.log_history, **SHOWN),
        completions=completions.sampled(work, settings, rewarded=False),
        resumed_from=int(last.name.rpartition("-")[2]) if last else 0,
        seconds=seconds,
        stopped=None,
        probes=probe.curve(()),
    )


def _trainer(
    base: Path,
    teacher: Path,
    questions: Sequence[tasks.Question],
    settings: Train,
    *,
    template: str,
    seed: int,
    device: str,
    work: Path,
    log: live.Log,
):
    """TRL's trainer with everything of ours plugged in, ready to train."""
    from transformers import PrinterCallback
    from trl import DistillationConfig

    rows = [{"prompt": prompt.messages(each.question, template)} for each in questions]
    trainer = _trainer_class(settings)(
        model=policy.load(base, settings, device),
        teacher_model=policy.load(teacher, settings, device),
        args=DistillationConfig(**arguments.common(settings, seed=seed, device=device, work=work)),
        train_dataset=grpo.dataset([row for row in rows for _ in range(settings.generations)]),
        processing_class=hf.tokenizer(base),
        callbacks=[live.callback(settings, log, title="distillation", **SHOWN)],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def divergence(student: Tensor, teacher: Tensor, *, top_k: int, reverse: float) -> Tensor:
    """KL over the teacher's likeliest tokens, both distributions normalized again over them; nats a position.

    Args:
        student: (N, V) logits.
        teacher: (N, V) logits.
        top_k: tokens that are looked at, at most V.
        reverse: w in (1 − w) · KL(teacher ‖ student) + w · KL(student ‖ teacher).

    Returns:
        (N,).

    Source: NeMo-RL's on-policy distillation, zero_outside_topk = false.
    """
    from torch.nn.functional import kl_div

    kept, places = teacher.float().topk(min(top_k, teacher.shape[-1]), dim=-1)
    right = kept.log_softmax(-1)
    own = student.float().gather(-1, places).log_softmax(-1)
    forward_kl = kl_div(own, right, reduction="none", log_target=True).sum(-1)
    reverse_kl = kl_div(right, own, reduction="none", log_target=True).sum(-1)
    return (1 - reverse) * forward_kl + reverse * reverse_kl


def _trainer_class(settings: Train):
    import torch
    from trl import DistillationTrainer

    class TopK(DistillationTrainer):
        """TRL's sampling and bookkeeping, our loss."""

        def _compute_loss(self, unwrapped_student, inputs, num_items_in_batch):
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
            mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
            length = inputs["completion_ids"].size(1)
            valid = inputs["completion_mask"].bool()
            states = self._get_last_hidden_state(unwrapped_student, ids, mask, length)
            student = unwrapped_student.get_output_embeddings()(states[valid])
            teacher = self.accelerator.unwrap_model(self.teacher_model).eval()
            with torch.no_grad():
                target = teacher.get_output_embeddings()(self._get_last_hidden_state(teacher, ids, mask, length)[valid])
            each = divergence(
                student / self.temperature,
                target / self.temperature,
                top_k=settings.distill_top_k,
                reverse=settings.distill_reverse,
            )
            count = valid.sum()
            whole = student.detach().float().log_softmax(-1)
            entropy = -(whole.exp() * whole).sum()
            return (
                each.sum() / (count.clamp(min=1) if num_items_in_batch is None else num_items_in_batch),
                entropy,
                count,
            )

    return TopK
