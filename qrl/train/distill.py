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
from qrl.recipe import Train
from qrl.tasks import prompt
from qrl.train import arguments, loop, policy, sharded
from qrl.train.job import Job, Trained
from qrl.train.monitor import metrics
from qrl.train.qat import prepare
from qrl.train.teacher import Likeliest, Teacher, local, server
from qrl.train.trl.distillation import distillation_trainer


def check(base: checkpoint.Checkpoint, teacher: checkpoint.Checkpoint, job: Job) -> None:
    """Check that this distillation is possible, before any weight is loaded; `base` is the student's.

    Raises:
        BadInput: teacher or student is quantized, their vocabularies or tokens' ids differ, an adapter, watchers or
            supervised fine-tuning are configured, weights and optimizer do not fit into memory, FSDP runs on a CPU or
            is too old, the batch does not divide, there are too few questions, or the teacher's server does not score
            as the recipe says.
    """
    settings = job.settings
    if settings.algorithm == "sft":
        raise BadInput("train.algorithm = sft trains on worked solutions, but train.teacher distils: leave one out.")
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
    if base.digest != teacher.digest:
        _check_tokens(base, teacher)
    if settings.adapter:
        reason = f"train.teacher distils into all weights, but train.method = {settings.method} trains an adapter"
        raise BadInput(f"{reason}: set train.method = full.")
    sharded.check(settings, job.device)
    tensors = checkpoint.entries(base.path)
    policy.check(settings, tensors)
    policy.check_memory(settings, policy.parameters(base), job.device, policy.parameters(teacher))
    arguments.check(settings, len(job.questions))
    prepare.check(settings, base.path, job.group_size)
    if settings.teacher_placement == "server":
        server.check(teacher, job)


def startup_warnings(base: checkpoint.Checkpoint, teacher: checkpoint.Checkpoint, settings: Train) -> dict[str, str]:
    """Return what is known of a distillation before its first step, as sentences by the name of their warning."""
    if base.digest != teacher.digest or settings.qat != "none":
        return {}
    return {
        "teacher": "The teacher is the student's own base, so a student in full precision begins where it should end, "
        "and learns nothing. A control may do that; otherwise set train.qat, or give another teacher."
    }


def _check_tokens(base: checkpoint.Checkpoint, teacher: checkpoint.Checkpoint) -> None:
    """Raise BadInput where a token of both vocabularies has two ids; tokens that only one has may differ."""
    own, other = (_used_tokens(model.path) for model in (base, teacher))
    if moved := sorted(token for token in own.keys() & other.keys() if own[token] != other[token]):
        ids = f"{moved[0]!r} is token {other[moved[0]]} there and {own[moved[0]]} in the student's"
        raise BadInput(
            f"The teacher {teacher.path} gives {len(moved)} tokens other ids ({ids}), but distillation compares ids: "
            "choose a teacher of the same model family."
        )


def _used_tokens(folder: Path) -> dict[str, int]:
    """Return the ids of tokens that texts hold: Llama 3.1 moved some that Llama 3 only reserves."""
    tokens = hf.tokenizer(folder)
    special = {str(each) for each in tokens.added_tokens_decoder.values() if each.special}
    unused = {each for each in special - set(tokens.all_special_tokens) if each not in str(tokens.chat_template)}
    return {token: number for token, number in tokens.get_vocab().items() if token not in unused}


def run(job: Job, teacher: Path) -> Trained:
    """Distil a teacher into a job's base, or resume a killed try; raise BadInput if `check` refuses the job."""
    base, checked = checkpoint.check(job.base), checkpoint.check(teacher)
    check(base, checked, job)
    process.hush_transformers()
    return loop.run(make_trainer(job, teacher), job, base, metrics.DISTILLATION, {"teacher": checked.digest})


def make_trainer(job: Job, teacher: Path):
    """Return TRL's trainer with the student, the teacher, the loss and the rollouts of a job."""
    from trl import DistillationConfig

    settings = job.settings
    # Starts the group of processes, over which a teacher is sharded.
    args = arguments.on_one_gpu(DistillationConfig(**arguments.common(job)))
    loss = functools.partial(divergence, reverse=settings.distill_reverse, temperature=settings.temperature)
    rows = [{"prompt": prompt.messages(question.question, job.template)} for question in job.questions]
    scoring = _teacher(checkpoint.check(teacher), job)
    trainer = distillation_trainer(loss, scoring, job.rollout, settings.qat, job.group_size)(
        model=policy.load(job.base, settings, job.device),
        args=args,
        train_dataset=arguments.dataset([row for row in rows for _ in range(settings.generations)]),
        processing_class=hf.tokenizer(job.base),
        callbacks=[metrics.callback(settings, job.log, metrics.DISTILLATION)],
    )
    if process.sharded():
        policy.free_casts(trainer)
        sharded.prepare(trainer, settings)
    return trainer


def _teacher(teacher: checkpoint.Checkpoint, job: Job) -> Teacher:
    """Return what scores, as `train.teacher_placement` says; the first process checks a server's model."""
    if job.settings.teacher_placement != "server":
        return local.Local(teacher.path, job.settings, job.device)
    found = server.of(teacher, job.settings)
    if process.rank() == 0:
        server.compare(teacher, found, functools.partial(divergence, reverse=0.0))
    return found


def divergence(student: Tensor, teacher: Likeliest, *, reverse: float, temperature: float = 1.0) -> Tensor:
    """Return the KL over the teacher's likeliest tokens, both distributions normalized again over them.

    Args:
        student: (N, V) logits.
        teacher: scores and tokens, (N, K); K = V gives the plain KL.
        reverse: w in (1 − w) · KL(teacher ‖ student) + w · KL(student ‖ teacher).
        temperature: divides the student's logits; the teacher's scores are over it already.

    Returns:
        (N,), nats per position.

    Source: NeMo-RL's on-policy distillation, zero_outside_topk = false.
    """
    target = teacher.scores.log_softmax(-1)
    # Gathered first: (N, V) in fp32, and its gradient, would be written and read for K of V columns.
    own = (student.gather(-1, teacher.tokens).float() / temperature).log_softmax(-1)
    forward_kl = kl_div(own, target, reduction="none", log_target=True).sum(-1)
    reverse_kl = kl_div(target, own, reduction="none", log_target=True).sum(-1)
    return (1 - reverse) * forward_kl + reverse * reverse_kl
