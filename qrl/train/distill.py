"""On-policy distillation with TRL's trainer: the student samples, a full-precision teacher scores each of its tokens.

Transformers samples or vLLM, which is sent the student's weights, or Q(W), as in GRPO. The loss reads no probability of
the engine's, so the gap between the two is not measured here.

With quantized linears this is quantization-aware distillation. The loss is ours; `train.distill_top_k` of at least the
vocabulary gives the plain KL.
"""

import functools
from pathlib import Path

from torch import Tensor
from torch.nn.functional import kl_div

from qrl import checkpoint, process
from qrl.engine import hf
from qrl.errors import BadInput
from qrl.tasks import prompt
from qrl.train import arguments, loop, policy, trl_private
from qrl.train.job import Job, Trained
from qrl.train.monitor import metrics
from qrl.train.qat import prepare


def check(base: checkpoint.Checkpoint, teacher: checkpoint.Checkpoint, job: Job) -> None:
    """Check that this distillation is possible, before any weight is loaded; `base` is the student's.

    Raises:
        BadInput: teacher or student is quantized, their vocabularies differ, an adapter or watchers are configured,
            several processes train, the batch does not divide, or there are too few questions.
    """
    settings = job.settings
    for key in ("mask_truncated", "max_resamples"):
        if getattr(settings, key):
            raise BadInput(f"train.{key} has no effect where train.teacher distils, without rewards: leave it out.")
    if job.watch.stop or job.watch.probe_every:
        reason = "train.teacher trains without watchers, which read GRPO's rewards"
        raise BadInput(f"{reason}: leave watch.stop out, and watch.probe_every at 0.")
    for model, role in ((base, "student's base"), (teacher, "teacher")):
        if model.quantization:
            raise BadInput(f"The {role} {model.path} is stored in {model.quantization}: give full-precision weights.")
    own, other = (checkpoint.config(model.path).get("vocab_size") for model in (base, teacher))
    if own != other:
        raise BadInput(
            f"The teacher {teacher.path} has a vocabulary of {other}, but the student one of {own}: choose a teacher "
            "of the same model family."
        )
    if process.world_size() > 1:
        raise BadInput("train.teacher distils in one process: start the step without torchrun or accelerate launch.")
    if settings.adapter:
        reason = f"train.teacher distils into all weights, but train.method = {settings.method} trains an adapter"
        raise BadInput(f"{reason}: set train.method = full.")
    policy.check(settings, checkpoint.entries(base.path))
    arguments.check(settings, len(job.questions))
    prepare.check(settings, base.path)


def run(job: Job, teacher: Path) -> Trained:
    """Distil a teacher into a job's base, or resume a killed try; raise BadInput if `check` refuses the job."""
    base = checkpoint.check(job.base)
    check(base, checkpoint.check(teacher), job)
    process.hush_transformers()
    return loop.run(_make_trainer(job, teacher), job, base, metrics.DISTILLATION)


def _make_trainer(job: Job, teacher: Path):
    from trl import DistillationConfig

    settings = job.settings
    loss = functools.partial(divergence, top_k=settings.distill_top_k, reverse=settings.distill_reverse)
    rows = [{"prompt": prompt.messages(question.question, job.template)} for question in job.questions]
    return trl_private.distillation_trainer(loss, job.rollout, settings.qat)(
        model=policy.load(job.base, settings, job.device),
        teacher_model=policy.load(teacher, settings, job.device),
        args=DistillationConfig(**arguments.common(job)),
        train_dataset=arguments.dataset([row for row in rows for _ in range(settings.generations)]),
        processing_class=hf.tokenizer(job.base),
        callbacks=[metrics.callback(settings, job.log, metrics.DISTILLATION)],
    )


def divergence(student: Tensor, teacher: Tensor, *, top_k: int, reverse: float) -> Tensor:
    """Return the KL over the teacher's likeliest tokens, both distributions normalized again over them.

    Args:
        student: (N, V) logits.
        teacher: (N, V) logits.
        top_k: number of the teacher's likeliest tokens; at most V count.
        reverse: w in (1 − w) · KL(teacher ‖ student) + w · KL(student ‖ teacher).

    Returns:
        (N,), nats per position.

    Source: NeMo-RL's on-policy distillation, zero_outside_topk = false.
    """
    kept, places = teacher.float().topk(min(top_k, teacher.shape[-1]), dim=-1)
    target = kept.log_softmax(-1)
    own = student.float().gather(-1, places).log_softmax(-1)
    forward_kl = kl_div(own, target, reduction="none", log_target=True).sum(-1)
    reverse_kl = kl_div(target, own, reduction="none", log_target=True).sum(-1)
    return (1 - reverse) * forward_kl + reverse * reverse_kl
