"""Supervised fine-tuning with TRL's trainer: the control that tells reinforcement learning from any other training.

A step reads the worked solutions of the questions that the same step of GRPO samples answers to.
"""

import math
from dataclasses import replace
from itertools import islice

from qrl import checkpoint, process
from qrl.engine import hf
from qrl.errors import BadInput
from qrl.recipe import Train
from qrl.tasks import prompt
from qrl.train import arguments, loop, policy
from qrl.train.job import Job, Trained
from qrl.train.monitor import metrics
from qrl.train.trl.grpo import question_order

_OF_OTHERS = ("qat", "method")


def check(base: checkpoint.Checkpoint, job: Job) -> None:
    """Check that this training is possible, before any weight is loaded.

    Raises:
        BadInput: the base is quantized, weights are to be quantized or an adapter trained, a watcher is to stop the
            training, several processes train, weights and optimizer do not fit into memory, a question has no worked
            solution, or a step's batch does not fit.
    """
    settings = job.settings
    if base.quantization:
        raise BadInput(f"{base.path} is stored in {base.quantization}: training starts from full-precision weights.")
    for name in _OF_OTHERS:
        if getattr(settings, name) != (default := type(settings).model_fields[name].default):
            what = f"train.algorithm = sft trains all weights in full precision, but train.{name}"
            raise BadInput(f"{what} = {getattr(settings, name)}: set it to {default}.")
    if others := set(job.watch.stop) - {"probe"}:
        reason = f"train.algorithm = sft has no rewards, which watch.stop = {', '.join(sorted(others))} reads"
        raise BadInput(f"{reason}: leave it out, or stop by the probe.")
    if process.world_size() > 1:
        raise BadInput("train.algorithm = sft trains in one process: start without torchrun or accelerate launch.")
    if unsolved := [question for question in job.questions if not question.solution.strip()]:
        what = f"{len(unsolved)} of {len(job.questions)} training questions have no worked solution"
        raise BadInput(f"{what}, which train.algorithm = sft trains on: the first is '{unsolved[0].question[:60]}'.")
    tensors = checkpoint.entries(base.path)
    policy.check(settings, tensors)
    policy.check_memory(settings, policy.parameters(base), job.device)
    arguments.check(_of_solutions(settings), len(job.questions))


def run(job: Job) -> Trained:
    """Train on worked solutions, or resume a killed try; raise BadInput if `check` refuses the job."""
    base = checkpoint.check(job.base)
    check(base, job)
    process.hush_transformers()
    return loop.run(_make_trainer(job), job, base, metrics.SFT)


def _make_trainer(job: Job):
    from trl import SFTConfig, SFTTrainer

    settings, tokens = _of_solutions(job.settings), hf.tokenizer(job.base)
    texts = [_tokenized(tokens, question, job.template) for question in job.questions]
    order = question_order(len(texts), settings.prompts_per_step, job.seed)
    own = {"train_sampling_strategy": "sequential", "dataset_kwargs": {"skip_prepare_dataset": True}}
    given = arguments.optimization(replace(job, settings=settings), settings.prompts_per_step)
    return SFTTrainer(
        model=policy.load(job.base, settings, job.device),
        args=arguments.on_one_gpu(SFTConfig(**given, **own, max_length=None)),
        train_dataset=arguments.dataset(
            [texts[place] for place in islice(order, settings.steps * settings.prompts_per_step)]
        ),
        processing_class=tokens,
        callbacks=[metrics.callback(settings, job.log, metrics.SFT)],
    )


def _of_solutions(settings: Train) -> Train:
    """Return the settings for one text per question, in passes of no more than GRPO's."""
    micro = math.gcd(settings.prompts_per_step, settings.micro_batch)
    return settings.model_copy(update={"generations": 1, "micro_batch": micro})


def _tokenized(tokens, question, template) -> dict[str, list[int]]:
    """Return a question's prompt and solution with the end token, as ids, and the labels: the solution's alone."""
    asked = prompt.render(tokens, question.question, template)
    solved = tokens(question.solution + tokens.eos_token, add_special_tokens=False)["input_ids"]
    return {"input_ids": asked + solved, "labels": [-100] * len(asked) + solved}
