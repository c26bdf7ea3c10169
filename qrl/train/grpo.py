"""GRPO with TRL's trainer: prompts in, a full-precision checkpoint or an adapter out.

The recipe, the rewards, the live metrics and resuming are qrl's. The trainer reports nowhere else: TRL's own MLflow
callback would take over and end the project's run, and drop parameters in batches.
"""

from qrl import checkpoint, process
from qrl.engine import hf
from qrl.errors import BadInput
from qrl.tasks import prompt
from qrl.train import arguments, loop, policy, reward, rollout, sharded
from qrl.train.job import Job, Trained
from qrl.train.monitor import metrics
from qrl.train.qat import prepare
from qrl.train.trl.grpo import grpo_trainer


def check(base: checkpoint.Checkpoint, job: Job) -> None:
    """Check that this training is possible, before any weight is loaded; `rollout.check` checks who samples.

    Raises:
        BadInput: the base is quantized, FSDP runs on a CPU or is too old, adapter settings fit neither method nor
            model, weights and optimizer do not fit into memory, the batch does not divide, a reward of the user's
            fails, or training would stop for what is not measured.
    """
    if base.quantization:
        raise BadInput(
            f"{base.path} is stored in {base.quantization}, but training starts from full-precision weights: give the "
            "checkpoint that it was made from. Training quantizes the base itself where train.base_storage says so."
        )
    sharded.check(job.settings, job.device)
    tensors = checkpoint.entries(base.path)
    policy.check(job.settings, tensors)
    if job.settings.trainer == "trl":  # verl divides and offloads in its own way
        policy.check_memory(job.settings, policy.parameters(base), job.device)
    _check_stop(job)
    arguments.check(job.settings, len(job.questions))
    reward.check(job.settings, job.questions)
    prepare.check(job.settings, base.path, job.group_size)


def _check_stop(job: Job) -> None:
    gap_is_measured = job.rollout.engine == rollout.VLLM and job.rollout.is_correction != "none"
    resamples = job.settings.max_resamples
    measured = {
        "kl": (job.settings.beta, "set train.beta above 0"),
        "probe": (job.watch.probe_every, "set watch.probe_every to a number of steps"),
        "resample": (resamples, "set train.max_resamples above 0"),
        "rollout": (gap_is_measured, "set rollout.engine = vllm and rollout.is_correction to anything but none"),
    }
    for watcher, (is_measured, remedy) in measured.items():
        if watcher in job.watch.stop and not is_measured:
            raise BadInput(f"watch.stop = {watcher} needs a measure that training lacks: {remedy}, or leave it out.")


def run(job: Job) -> Trained:
    """Train a checkpoint with GRPO, or resume a training that was killed.

    Raises:
        BadInput: `check` or `rollout.check` refuses the job.
        QrlError: the base under an adapter changed in memory.
    """
    base = checkpoint.check(job.base)
    check(base, job)
    rollout.check(job.rollout, job.device, job.settings)
    process.hush_transformers()
    return loop.run(make_trainer(job), job, base, metrics.GRPO)


def make_trainer(job: Job):
    """Return TRL's trainer with the policy, rewards, metrics and rollouts of a job."""
    settings, questions = job.settings, job.questions
    rows = [
        {"prompt": prompt.messages(item.question, job.template), "answer": item.answer, "question": item.question}
        for item in questions
    ]
    tokens = hf.tokenizer(job.base)
    trainer = grpo_trainer(job.rollout, settings.max_resamples, settings.qat, job.group_size)(
        model=policy.load(job.base, settings, job.device),
        reward_funcs=reward.functions(job.task, settings.rewards, settings, tokens),
        args=arguments.make(job),
        train_dataset=arguments.dataset(rows),
        processing_class=tokens,
        callbacks=[metrics.callback(settings, job.log)],
        peft_config=policy.adapter(settings),
    )
    policy.widen(trainer.model)
    policy.free_casts(trainer)
    if process.sharded():
        sharded.prepare(trainer, settings)
    return trainer
