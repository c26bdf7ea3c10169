"""The recipe as arguments of TRL's trainers: batch arithmetic, configuration, data set."""

import hashlib
import json
from typing import Any

from qrl import process
from qrl.errors import BadInput
from qrl.recipe import Train
from qrl.tasks import prompt
from qrl.train import rollout
from qrl.train.job import Job

FILE = "arguments.json"  # the trainer's whole configuration, in the work folder
SCHEDULES = {"constant": "constant_with_warmup"}  # our name → transformers' name, where they differ
SAMPLING = ("top_p", "top_k", "repetition_penalty")  # beside temperature and min_p
SAME = ("num_iterations", "importance_sampling_level", "epsilon", "epsilon_high", "scale_rewards", "beta")  # GRPO alone


def check(settings: Train, questions: int) -> None:
    """Raise BadInput if a step's batch does not fit processes or questions; loads no weight."""
    processes = process.world_size()
    check_batch(settings, processes)
    if questions < settings.prompts_per_step:
        raise BadInput(
            f"There are {questions} training questions, but a step draws train.prompts_per_step = "
            f"{settings.prompts_per_step} different ones: give more questions, or lower it."
        )
    if settings.max_resamples and processes > 1:
        raise BadInput(
            f"train.max_resamples = {settings.max_resamples} works in one process, not {processes}: leave it out, or "
            "start the step without torchrun or accelerate launch."
        )


def check_batch(settings: Train, processes: int, unit: str = "processes") -> None:
    """Raise BadInput if processes, or GPUs, do not divide the completions of a step, or the micro-batch their share."""
    total = settings.prompts_per_step * settings.generations
    product = f"train.prompts_per_step {settings.prompts_per_step} × train.generations {settings.generations}"
    if total % processes:
        raise BadInput(
            f"{processes} {unit} do not divide the {total} completions of a step ({product}): choose a divisor of "
            f"{total}."
        )
    share, micro_batch = total // processes, settings.micro_batch
    if micro_batch < share and share % micro_batch:
        place = f"in each of {processes} {unit} " if processes > 1 else ""
        divisor = next(size for size in range(micro_batch, 0, -1) if share % size == 0)
        raise BadInput(
            f"train.micro_batch = {micro_batch} does not divide the {share} completions of a step {place}({product}): "
            f"choose a divisor, such as {divisor}."
        )


def grpo_config(job: Job, **further_arguments):
    """Return GRPO's configuration, with further arguments of it."""
    from trl import GRPOConfig

    settings = job.settings
    further_arguments = rollout.arguments(job.rollout) | further_arguments
    if settings.beta and not settings.adapter:
        # Else TRL spreads the reference over all GPUs.
        further_arguments["model_init_kwargs"] = {"device_map": None}
    return on_one_gpu(
        GRPOConfig(
            **common(job),
            **{name: getattr(settings, name) for name in SAME},
            num_generations=settings.generations,
            loss_type=settings.loss,
            mask_truncated_completions=settings.mask_truncated,
            reward_weights=list(settings.reward_weights) or None,
            **further_arguments,
        )
    )


def on_one_gpu(config):
    """Return a trainer's configuration for one GPU: a process would use all that it sees, which TRL refuses."""
    config._n_gpu = min(config.n_gpu, 1)
    return config


def common(job: Job) -> dict[str, Any]:
    """Return the arguments that GRPO and distillation share; several processes divide the completions of a step."""
    settings = job.settings
    return optimization(job, settings.prompts_per_step * settings.generations) | {
        **{name: getattr(settings, name) for name in ("temperature", *SAMPLING)},
        "min_p": settings.min_p or None,
        "max_completion_length": settings.max_completion_tokens,
        "log_completions": True,
        "num_completions_to_print": 0,
        "chat_template_kwargs": dict(prompt.resolve(job.template).kwargs) or None,
        "ddp_find_unused_parameters": False,  # there are none, and looking for them costs a pass over the graph
    }


def optimization(job: Job, texts: int) -> dict[str, Any]:
    """Return the arguments that every trainer takes; `texts` are those of a step, in all processes together."""
    settings, share = job.settings, texts // process.world_size()
    micro = min(settings.micro_batch, share)
    return {
        **{name: getattr(settings, name) for name in ("learning_rate", "warmup_steps", "gradient_checkpointing")},
        "output_dir": str(job.work),
        "max_steps": settings.steps,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": share // micro,
        "lr_scheduler_type": SCHEDULES.get(settings.schedule, settings.schedule),
        "bf16": settings.compute == "bf16",
        "save_steps": settings.save_every,
        "save_total_limit": settings.keep_checkpoints,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,  # else transformers reports a loss of NaN as 0
        "report_to": "none",
        "disable_tqdm": True,
        "seed": job.seed,
        "data_seed": job.seed,
        "use_cpu": job.device == "cpu",
        "dataloader_pin_memory": job.device == "cuda",
        "push_to_hub": False,
    }


def dataset(rows: list[dict]):
    """Return rows as a data set with our own fingerprint: hashing by `datasets` pickles pyarrow, which can fail."""
    from datasets import Dataset
    from datasets.table import InMemoryTable

    columns = {name: [row[name] for row in rows] for name in rows[0]}
    digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    return Dataset(InMemoryTable.from_pydict(columns), fingerprint=digest[:16])
