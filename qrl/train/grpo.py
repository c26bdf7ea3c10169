"""GRPO with TRL's trainer: prompts in, a full-precision checkpoint or an adapter out.

The recipe, the rewards, the live metrics and resuming are qrl's. The trainer reports nowhere else: TRL's own MLflow
callback would take over and end the project's run, and drop parameters in batches.
"""

from collections.abc import Callable

from qrl import checkpoint, process
from qrl.errors import BadInput
from qrl.tasks import prompt
from qrl.train import arguments, footprint, loop, policy, reward, rollout, sharded
from qrl.train.job import Job, Machine, Trained
from qrl.train.monitor import metrics
from qrl.train.qat import prepare
from qrl.train.trl.grpo import grpo_trainer


def check(job: Job, machine: Machine) -> None:
    """Check that this training is possible, before any weight is loaded.

    Raises:
        BadInput: the base is quantized, nothing here samples as the recipe says, FSDP runs on a CPU or is too old, the
            adapter does not fit the model, weights and optimizer do not fit into memory, the batch does not divide, or
            a reward of the user's fails.
    """
    base = checkpoint.check(job.base)
    parameters = footprint.parameters(base)
    check_job(base, job, machine)
    footprint.check_total(job.settings, parameters, machine.device)
    if machine.device == "cuda":
        rollout.check_memory(job.rollout, job.settings, parameters)


def check_job(base: checkpoint.Checkpoint, job: Job, machine: Machine) -> None:
    """Check all but memory, which verl divides and offloads in its own way; raise BadInput as `check`."""
    if base.quantization:
        raise BadInput(
            f"{base.path} is stored in {base.quantization}, but training starts from full-precision weights: give the "
            "checkpoint that it was made from. Training quantizes the base itself where train.base_storage says so."
        )
    rollout.check_job(job, machine)
    sharded.check(job.settings, machine.device)
    policy.check(job.settings, checkpoint.entries(base.path))
    arguments.check(job.settings, len(job.questions))
    reward.check(job.settings, job.questions)
    prepare.check(job.settings, base.path, job.group_size)


def run(job: Job) -> Trained:
    """Train a checkpoint with GRPO, or resume a training that was killed.

    Args:
        job: one that `check` accepts.

    Raises:
        QrlError: the base under an adapter changed in memory.
    """
    process.hush_transformers()
    return loop.run(make_trainer(job), job, checkpoint.check(job.base), metrics.GRPO)


def make_trainer(job: Job, kind: metrics.Kind = metrics.GRPO, specialize: Callable[[type], type] = lambda base: base):
    """Return TRL's trainer with the policy, rewards, metrics and rollouts of a job.

    Args:
        job: one that `check` accepts.
        kind: which metrics are logged.
        specialize: returns the trainer's subclass that is made.
    """
    settings, questions = job.settings, job.questions
    rows = [
        {"prompt": prompt.messages(item.question, job.template), "answer": item.answer, "question": item.question}
        for item in questions
    ]
    tokens = policy.tokenizer(job.base)
    tags = prompt.thinking_tags(tokens, job.template)
    trainer = specialize(grpo_trainer(job.rollout, settings, job.group_size))(
        model=policy.load(job.base, settings, job.device),
        reward_funcs=reward.functions(job.task, settings.rewards, settings, tokens, tags),
        args=arguments.grpo_config(job),
        train_dataset=arguments.dataset(rows),
        processing_class=tokens,
        callbacks=[metrics.callback(settings, job.log, kind)],
        peft_config=policy.adapter(settings),
    )
    policy.widen(trainer.model)
    policy.free_casts(trainer)
    if process.sharded():
        sharded.prepare(trainer, settings)
    return trainer
