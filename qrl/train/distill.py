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
from qrl.train import arguments, footprint, loop, policy, rollout, sharded
from qrl.train.job import Job, Machine, Trained
from qrl.train.monitor import metrics
from qrl.train.qat import prepare
from qrl.train.teacher import Likeliest, Teacher, local, server
from qrl.train.trl.distillation import distillation_trainer


def check(job: Job, machine: Machine) -> None:
    """Check that this distillation is possible, before any weight is loaded.

    Raises:
        BadInput: teacher or student is quantized, their vocabularies or tokens' ids differ, nothing here samples as the
            recipe says, weights and optimizer do not fit into memory, FSDP runs on a CPU or is too old, the batch does
            not divide, there are too few questions, or the teacher's server does not score as the recipe says.
    """
    settings = job.settings
    base, teacher = checkpoint.check(job.base), _teacher_of(job)
    for model, role in ((base, "student's base"), (teacher, "teacher")):
        if model.quantization:
            raise BadInput(f"The {role} {model.path} is stored in {model.quantization}: give full-precision weights.")
    _check_vocabularies(base, teacher)
    rollout.check_job(job, machine)
    sharded.check(settings, machine.device)
    policy.check(settings, checkpoint.entries(base.path))
    parameters, teacher_parameters = footprint.parameters(base), footprint.parameters(teacher)
    footprint.check_total(settings, parameters, machine.device, teacher_parameters)
    arguments.check(settings, len(job.questions))
    prepare.check(settings, base.path, job.group_size)
    if settings.teacher_placement == "server":
        server.check(teacher, job)
    if machine.device == "cuda":
        rollout.check_memory(job.rollout, settings, parameters, teacher_parameters)


def _teacher_of(job: Job) -> checkpoint.Checkpoint:
    if job.teacher is None:
        raise ValueError("a distillation needs the folder of its teacher: `Job.teacher`")
    return checkpoint.check(job.teacher)


def startup_warnings(base: checkpoint.Checkpoint, teacher: checkpoint.Checkpoint, settings: Train) -> dict[str, str]:
    """Return what is known of a distillation before its first step, as sentences by the name of their warning."""
    if base.digest != teacher.digest or settings.qat != "none":
        return {}
    return {
        "teacher": "The teacher is the student's own base, so a student in full precision begins where it should end, "
        "and learns nothing. A control may do that; otherwise set train.qat, or give another teacher."
    }


def _check_vocabularies(base: checkpoint.Checkpoint, teacher: checkpoint.Checkpoint) -> None:
    """Raise BadInput where sizes differ, or a token of both has two ids; tokens that only one has may differ."""
    student_size = checkpoint.config(base.path).get("vocab_size")
    teacher_size = checkpoint.config(teacher.path).get("vocab_size")
    if student_size != teacher_size:
        raise BadInput(
            f"The teacher {teacher.path} has a vocabulary of {teacher_size}, but the student one of {student_size}: "
            "choose a teacher of the same model family."
        )
    if base.digest == teacher.digest:
        return
    student_ids, teacher_ids = _used_tokens(base.path), _used_tokens(teacher.path)
    shared = student_ids.keys() & teacher_ids.keys()
    moved = sorted(token for token in shared if student_ids[token] != teacher_ids[token])
    if moved:
        token = moved[0]
        ids = f"{token!r} is token {teacher_ids[token]} there and {student_ids[token]} in the student's"
        raise BadInput(
            f"The teacher {teacher.path} gives {len(moved)} tokens other ids ({ids}), but distillation compares ids: "
            "choose a teacher of the same model family."
        )


def _used_tokens(folder: Path) -> dict[str, int]:
    """Return the ids of tokens that texts hold: Llama 3.1 moved some that Llama 3 only reserves."""
    tokens = hf.tokenizer(folder)
    special = {str(token) for token in tokens.added_tokens_decoder.values() if token.special}
    reserved = special - set(tokens.all_special_tokens)
    unused = {token for token in reserved if token not in str(tokens.chat_template)}
    return {token: number for token, number in tokens.get_vocab().items() if token not in unused}


def run(job: Job) -> Trained:
    """Distil a job's teacher into its base, or resume a killed try; `check` accepts the job."""
    base, teacher = checkpoint.check(job.base), _teacher_of(job)
    process.hush_transformers()
    digests = {"teacher": teacher.digest} if process.world_size() > 1 else {}  # which reads all of its weights
    return loop.run(make_trainer(job, teacher.path), job, base, metrics.DISTILLATION, digests)


def make_trainer(job: Job, teacher: Path):
    """Return TRL's trainer with the student, the teacher, the loss and the rollouts of a job."""
    from trl import DistillationConfig

    settings = job.settings
    # Starts the group of processes, over which a teacher is sharded.
    args = arguments.on_one_gpu(DistillationConfig(**arguments.common(job)))
    loss = functools.partial(divergence, reverse=settings.distill_reverse, temperature=settings.temperature)
    rows = [{"prompt": prompt.messages(question.question, job.template)} for question in job.questions]
    scoring = _teacher(checkpoint.check(teacher), job)
    trainer = distillation_trainer(loss, scoring, job.rollout, settings, job.group_size)(
        model=policy.load(job.base, settings, job.device),
        args=args,
        train_dataset=arguments.dataset([row for row in rows for _ in range(settings.generations)]),
        processing_class=policy.tokenizer(job.base),
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
    scoring_server = server.connect(teacher, job.settings)
    if process.rank() == 0:
        server.check_same_model(teacher, scoring_server, functools.partial(divergence, reverse=0.0))
    return scoring_server


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
    scores = (student.gather(-1, teacher.tokens).float() / temperature).log_softmax(-1)
    forward_kl = kl_div(scores, target, reduction="none", log_target=True).sum(-1)
    reverse_kl = kl_div(target, scores, reduction="none", log_target=True).sum(-1)
    return (1 - reverse) * forward_kl + reverse * reverse_kl
