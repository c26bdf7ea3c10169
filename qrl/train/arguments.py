"""The recipe as TRL's trainer takes it, and the arithmetic of a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qrl import process
from qrl.errors import BadInput
from qrl.recipe import Train

SCHEDULES = {"constant": "constant_with_warmup"}  # ours → theirs, where they differ


def check(settings: Train, questions: int) -> None:
    """Refuses a batch that does not divide, before any weight is loaded.

    Raises:
        BadInput: completions that do not divide by processes or micro-batches, too few questions, or weights without rewards.
    """
    total, world = settings.prompts_per_step * settings.generations, process.world_size()
    product = f"train.prompts_per_step {settings.prompts_per_step} × train.generations {settings.generations}"
    if total % world:
        raise BadInput(
            f"{world} processes do not divide the {total} completions of a step ({product}): choose a multiple of {world}."
        )
    share = total // world
    if settings.micro_batch < share and share % settings.micro_batch:
        raise BadInput(
            f"train.micro_batch = {settings.micro_batch} does not divide the {share} completions of a step "
            f"{f'in each of {world} processes ' if world > 1 else ''}({product}): choose a divisor."
        )
    if questions < settings.prompts_per_step:
        raise BadInput(
            f"There are {questions} training questions, but a step asks train.prompts_per_step = "
            f"{settings.prompts_per_step} different ones: give more questions, or lower it."
        )
    if settings.reward_weights and len(settings.reward_weights) != len(settings.rewards):
        raise BadInput(
            f"train.reward_weights has {len(settings.reward_weights)} numbers for {len(settings.rewards)} rewards "
            f"({', '.join(settings.rewards)}): give one each, or none."
        )
    if settings.save_every % settings.num_iterations:
        raise BadInput(
            f"train.save_every = {settings.save_every} is no multiple of train.num_iterations = {settings.num_iterations}: a training "
            "cannot go on from the middle of a batch of completions; choose a multiple."
        )


def make(settings: Train, *, seed: int, device: str, work: Path, **more):
    """GRPO's configuration; `more` is the rollout engine's part of it."""
    from trl import GRPOConfig

    if (
        process.sharded() and settings.beta and not settings.adapter
    ):  # TRL would spread the reference over the GPUs before FSDP does
        more["model_init_kwargs"] = {"device_map": None}
    return GRPOConfig(
        **common(settings, seed=seed, device=device, work=work),
        num_generations=settings.generations,
        num_iterations=settings.num_iterations,
        loss_type=settings.loss,
        importance_sampling_level=settings.importance_sampling_level,
        epsilon=settings.epsilon,
        epsilon_high=settings.epsilon_high,
        scale_rewards=settings.scale_rewards,
        reward_weights=list(settings.reward_weights) or None,
        beta=settings.beta,
        ddp_find_unused_parameters=False,  # there are none, and looking for them costs a pass over the graph
        **more,
    )


def common(settings: Train, *, seed: int, device: str, work: Path) -> dict[str, Any]:
    """What every trainer of TRL's that samples is told; several processes share the completions of a step."""
    share = settings.prompts_per_step * settings.generations // process.world_size()
    micro = min(settings.micro_batch, share)
    return {
        "output_dir": str(work),
        "max_steps": settings.steps,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": share // micro,
        "max_completion_length": settings.max_completion_tokens,
        "temperature": settings.temperature,
        "learning_rate": settings.learning_rate,
        "warmup_steps": settings.warmup_steps,
        "lr_scheduler_type": SCHEDULES.get(settings.schedule, settings.schedule),
        "bf16": settings.compute == "bf16",
        "gradient_checkpointing": settings.gradient_checkpointing,
        "save_steps": settings.save_every,
        "save_total_limit": 2,
        "logging_steps": 1,
        "log_completions": True,
        "num_completions_to_print": 0,
        "report_to": "none",
        "disable_tqdm": True,
        "seed": seed,
        "data_seed": seed,
        "use_cpu": device == "cpu",
        "dataloader_pin_memory": device == "cuda",
        "push_to_hub": False,
    }
