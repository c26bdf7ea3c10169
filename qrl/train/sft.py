"""Supervised fine-tuning with TRL's trainer: the control that tells reinforcement learning from any other training.

A step reads the worked solutions of the questions that the same step of GRPO samples answers to.
"""

import math
from dataclasses import replace
from itertools import islice

from qrl import checkpoint, process
from qrl.errors import BadInput
from qrl.recipe import Train
from qrl.tasks import prompt
from qrl.train import arguments, footprint, loop, policy, rollout
from qrl.train.job import Job, Machine, Trained
from qrl.train.monitor import metrics
from qrl.train.trl.grpo import question_order


def check(job: Job, machine: Machine) -> None:
    """Check that this training is possible, before any weight is loaded.

    Raises:
        BadInput: the base is quantized, several processes train, weights and optimizer do not fit into memory, a
            question has no worked solution, or a step's batch does not fit.
    """
    settings, base = job.settings, checkpoint.check(job.base)
    if base.quantization:
        raise BadInput(f"{base.path} is stored in {base.quantization}: training starts from full-precision weights.")
    rollout.check(job.rollout, machine.device, settings)
    if process.world_size() > 1:
        raise BadInput("train.algorithm = sft trains in one process: start without torchrun or accelerate launch.")
    unsolved = [question for question in job.questions if not question.solution.strip()]
    if unsolved:
        raise BadInput(
            f"{len(unsolved)} of {len(job.questions)} training questions have no worked solution, which "
            f"train.algorithm = sft trains on: the first is '{unsolved[0].question[:60]}'."
        )
    policy.check(settings, checkpoint.entries(base.path))
    parameters = footprint.parameters(base)
    footprint.check_total(settings, parameters, machine.device)
    arguments.check(_of_solutions(settings), len(job.questions))
    if machine.device == "cuda":
        rollout.check_memory(job.rollout, settings, parameters)


def run(job: Job) -> Trained:
    """Train on worked solutions, or resume a killed try; `check` accepts the job."""
    process.hush_transformers()
    return loop.run(_make_trainer(job), job, checkpoint.check(job.base), metrics.SFT)


def _make_trainer(job: Job):
    from trl import SFTConfig, SFTTrainer

    settings, tokens = _of_solutions(job.settings), policy.tokenizer(job.base)
    texts = [_tokenized(tokens, question, job.template) for question in job.questions]
    order = question_order(len(texts), settings.prompts_per_step, job.seed)
    optimization = arguments.optimization(replace(job, settings=settings), settings.prompts_per_step)
    config = SFTConfig(
        **optimization,
        train_sampling_strategy="sequential",
        dataset_kwargs={"skip_prepare_dataset": True},
        max_length=None,
    )
    rows = [texts[index] for index in islice(order, settings.steps * settings.prompts_per_step)]
    return SFTTrainer(
        model=policy.load(job.base, settings, job.device),
        args=arguments.on_one_gpu(config),
        train_dataset=arguments.dataset(rows),
        processing_class=tokens,
        callbacks=[metrics.callback(settings, job.log, metrics.SFT)],
    )


def _of_solutions(settings: Train) -> Train:
    """Return the settings for one text per question, in passes of no more than GRPO's."""
    micro = math.gcd(settings.prompts_per_step, settings.micro_batch)
    return settings.model_copy(update={"generations": 1, "micro_batch": micro})


def _tokenized(tokens, question, template) -> dict[str, list[int]]:
    """Return prompt, solution and the end of the turn as ids, and the labels: those after the prompt alone."""
    prompt_ids = prompt.render(tokens, question.question, template)
    tags = prompt.thinking_tags(tokens, template)
    solution_ids = prompt.solution_ids(tokens, question.solution, tags)
    no_loss = [-100] * len(prompt_ids)
    return {"input_ids": prompt_ids + solution_ids, "labels": no_loss + solution_ids}
