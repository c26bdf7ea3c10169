"""A recipe as verl's configuration: each key is mapped, applied by qrl itself, or refused by `recipe/rules.py`.

verl's names are those of verl 0.9.1, dotted as in its own configuration files.
"""

import json
from collections.abc import Mapping
from typing import Any

from qrl import process
from qrl.engine import hf, vllm
from qrl.errors import BadInput
from qrl.recipe import Rollout, Train, Watch
from qrl.recipe.base import compiles
from qrl.tasks import prompt
from qrl.train import arguments, parallel
from qrl.train.job import Job
from qrl.train.verl import score

NAME = "verl"  # of `train.trainer`, and of the package
REWARD = f"pkg://{score.__name__}"  # what verl's reward workers import
CHECKPOINTS, ROLLOUTS, QUESTIONS = "verl", "rollouts", "questions.parquet"  # in the work folder
ADDRESS = "ray_kwargs.ray_init.address"
ACTOR, SAMPLER, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
_NO_DUAL_CLIP = 1e9  # verl also bounds the ratio of bad completions, at 3 by default; GRPO and TRL do not
_NO_LOWER_BOUND = "1e-09"  # verl's masks need a bound above 0; its ratios end at exp(-20)

SAME: Mapping[str, tuple[str, ...]] = {  # our key → verl's keys, which get the same value
    "train.steps": ("trainer.total_training_steps", "trainer.total_epochs"),  # an epoch has a step at least
    "train.prompts_per_step": ("data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size"),
    "train.generations": (f"{SAMPLER}.n",),
    "train.learning_rate": (f"{ACTOR}.optim.lr",),
    "train.warmup_steps": (f"{ACTOR}.optim.lr_warmup_steps",),
    "train.temperature": (f"{SAMPLER}.temperature",),
    "train.top_p": (f"{SAMPLER}.top_p",),
    "train.max_completion_tokens": ("data.max_response_length", f"{ACTOR}.loss_scale_factor"),
    "train.epsilon": (f"{ACTOR}.clip_ratio", f"{ACTOR}.clip_ratio_low"),
    "train.gradient_checkpointing": (f"{MODEL}.enable_gradient_checkpointing",),
    "train.save_every": ("trainer.save_freq",),
    "train.keep_checkpoints": ("trainer.max_actor_ckpt_to_keep",),
    "rollout.gpu_memory_utilization": (f"{SAMPLER}.gpu_memory_utilization",),
    "rollout.max_model_tokens": (f"{SAMPLER}.max_model_len",),
}
CHOICES: Mapping[str, tuple[str, Mapping[str, Any]]] = {  # our key → verl's, and our value → verl's
    "train.parallel": (f"{ACTOR}.strategy", {"none": "fsdp", "fsdp2": "fsdp2"}),  # the reference's follows it
    "train.schedule": (f"{ACTOR}.optim.lr_scheduler_type", {"constant": "constant", "cosine": "cosine"}),
    "train.loss": (  # each is TRL's average: `loss_scale_factor` above is the length that dr_grpo divides by
        f"{ACTOR}.loss_agg_mode",
        {"dr_grpo": "seq-mean-token-sum-norm", "grpo": "seq-mean-token-mean", "dapo": "token-mean"},
    ),
    "train.importance_sampling_level": (f"{ACTOR}.policy_loss.loss_mode", {"token": "vanilla", "sequence": "gspo"}),
    "train.scale_rewards": ("algorithm.norm_adv_by_std_in_grpo", {"none": False, "group": True}),
    "rollout.engine": (f"{SAMPLER}.name", {"vllm": "vllm"}),
    "rollout.sleep": (f"{SAMPLER}.free_cache_engine", {"auto": True, "on": True, "off": False}),
}
COMPUTED = (  # from several keys, in `overrides`
    *("train.processes", "train.micro_batch", "train.epsilon_high", "train.beta", "train.method", "train.lora_rank"),
    *("train.lora_alpha", "train.lora_targets", "train.base_storage", "train.dtype", "train.top_k", "train.rewards"),
    *("train.reward_weights", "rollout.is_correction", "rollout.is_correction_max", "rollout.kv_cache_gib"),
    *("rollout.compile", "model", "task", "seed", "chat.template_kwargs"),
)
# Applied by qrl: it draws the questions, renders the prompts, reads verl's log, and names versions.
OURS = (
    *("train.questions", "train.selection", "train.max_ngram_share", "train.completions_logged", "train.trainer"),
    *("rollout.max_engine_kl", "rollout.max_gap_growth", "data", "prompt", "device", "registered_name"),
)


def check_gpus(train: Train, gpus: int) -> None:
    """Check that a number of GPUs, of all nodes together, can share a step's completions as verl asserts.

    Raises:
        BadInput: several train without fsdp2, nodes differ, or the GPUs or the micro-batch do not divide the step.
    """
    if process.world_size() != process.nodes() * process.local_world_size():
        raise BadInput(
            f"The training has {process.world_size()} processes, but {process.local_world_size()} on this node: verl "
            "needs the same number of GPUs on every node."
        )
    if gpus > 1 and train.parallel == "none":
        raise BadInput(
            f"train.trainer = verl divides the weights over {gpus} GPUs, but train.parallel = none: set "
            "train.parallel = fsdp2, or train on one GPU of one node."
        )
    arguments.check_batch(train, gpus, "GPUs")


def _settings(*sections: Train | Rollout | Watch):
    """Yield each field's key, value and default."""
    for section in sections:
        for name, field in type(section).model_fields.items():
            yield f"{type(section).__name__.lower()}.{name}", getattr(section, name), field.default


def overrides(job: Job, prompt_tokens: int) -> dict[str, Any]:
    """Return verl's configuration of a job: what differs from verl's own, by dotted key.

    Args:
        job: a job that `recipe/rules.py` accepts.
        prompt_tokens: the longest rendered prompt, in tokens; verl refuses longer ones.
    """
    train, rollout = job.settings, job.rollout
    recipe_values = {key: value for key, value, _ in _settings(train, rollout)}
    translated = {}
    for our_key, their_keys in SAME.items():
        for their_key in their_keys:
            translated[their_key] = recipe_values[our_key]
    for our_key, (their_key, their_values) in CHOICES.items():
        translated[their_key] = their_values[recipe_values[our_key]]
    return (
        translated | _fixed(job) | _data(job, prompt_tokens) | _policy(job) | _sampling(train, rollout) | _reward(job)
    )


def _fixed(job: Job) -> dict[str, Any]:
    seeds = ("data.seed", f"{SAMPLER}.seed", f"{ACTOR}.data_loader_seed", f"{ACTOR}.fsdp_config.seed")
    return {
        **dict.fromkeys(seeds, job.seed),
        "algorithm.adv_estimator": "grpo",
        "trainer.nnodes": process.nodes(),
        "trainer.n_gpus_per_node": parallel.processes(job.settings, job.device) // process.nodes(),
        f"{SAMPLER}.tensor_model_parallel_size": 1,
        "trainer.default_local_dir": str(job.work / CHECKPOINTS),
        "trainer.rollout_data_dir": str(job.work / ROLLOUTS),
        "trainer.resume_mode": "auto",
        "trainer.logger": ["console", "file"],  # its MLflow logger would log under its names, and end our run
        "trainer.project_name": "qrl",
        "trainer.experiment_name": "train",
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        ADDRESS: "local",  # of a training on one node; never a cluster of somebody else's
    }


def _data(job: Job, prompt_tokens: int) -> dict[str, Any]:
    file = str(job.work / QUESTIONS)
    return {
        "data.train_files": file,
        "data.val_files": file,  # verl requires some, but none is used
        "data.val_max_samples": 1,
        "data.max_prompt_length": prompt_tokens,
        "data.truncation": "error",
        "data.apply_chat_template_kwargs": dict(prompt.resolve(job.template).kwargs),
    }


def _policy(job: Job) -> dict[str, Any]:
    """Return model, precision, loss and optimizer, as TRL has them where verl's defaults differ."""
    train = job.settings
    gpus = parallel.processes(train, job.device)
    micro_batch = min(train.micro_batch, train.prompts_per_step * train.generations // gpus)
    fsdp_configs = (f"{ACTOR}.fsdp_config", "actor_rollout_ref.ref.fsdp_config")
    options = {
        **{f"{config}.mixed_precision.param_dtype": train.compute for config in fsdp_configs},
        **{f"{config}.model_dtype": train.storage for config in fsdp_configs},
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": micro_batch,
        f"{SAMPLER}.log_prob_micro_batch_size_per_gpu": micro_batch,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": micro_batch,
        f"{ACTOR}.clip_ratio_high": train.epsilon if train.epsilon_high is None else train.epsilon_high,
        f"{ACTOR}.clip_ratio_c": _NO_DUAL_CLIP,
        f"{ACTOR}.use_kl_loss": train.beta > 0,
        f"{ACTOR}.kl_loss_coef": train.beta,
        f"{ACTOR}.kl_loss_type": "low_var_kl",  # the estimator k3, as TRL's
        f"{ACTOR}.optim.weight_decay": 0.0,
        # Without padding removal, since verl's default needs flash-attn, which this environment lacks.
        f"{MODEL}.use_remove_padding": False,
        f"{MODEL}.override_config.attn_implementation": "sdpa",
        f"{SAMPLER}.load_format": "dummy",  # all weights are sent before the first answer
    }
    if train.adapter:
        options[f"{MODEL}.lora_rank"] = train.adapter_rank
        options[f"{MODEL}.lora_alpha"] = train.adapter_alpha
        options[f"{MODEL}.target_modules"] = list(train.lora_targets) or "all-linear"
        # Sent merged: verl 0.9.1 has vLLM load an adapter by a method that vLLM renamed in 0.29, and waits without end.
        options[f"{MODEL}.lora.merge"] = True
    return options


def _sampling(train: Train, rollout: Rollout) -> dict[str, Any]:
    """Return vLLM's own options, how tokens are drawn, and the importance-sampling correction of engine to trainer."""
    level, _, kind = rollout.is_correction.partition("_")  # such as token_truncate or sequence_mask
    threshold = rollout.is_correction_max
    if kind == "mask":  # verl's masks have two bounds, in one text
        threshold = f"{_NO_LOWER_BOUND}_{rollout.is_correction_max}"
    engine_options = {}
    if rollout.kv_cache_gib is not None:
        engine_options |= vllm.memory_options(rollout.gpu_memory_utilization, rollout.kv_cache_gib)
    if not compiles(rollout.compile, train.most_tokens):
        graphs = vllm.graphs_alone(train.prompts_per_step * train.generations)
        engine_options |= {key: json.dumps(value) for key, value in graphs.items()}
    return {
        **{f"{SAMPLER}.engine_kwargs.vllm.{key}": value for key, value in engine_options.items()},
        f"{SAMPLER}.top_k": train.top_k or -1,
        f"{SAMPLER}.calculate_log_probs": level != "none",
        "algorithm.rollout_correction.rollout_is": None if level == "none" else level,
        "algorithm.rollout_correction.rollout_is_threshold": threshold,
    }


def _reward(job: Job) -> dict[str, Any]:
    function = "reward.custom_reward_function"
    tags = prompt.thinking_tags(hf.tokenizer(job.base), job.template)
    return {
        f"{MODEL}.path": str(job.base),
        f"{function}.path": REWARD,
        f"{function}.name": "compute_score",
        f"{function}.reward_kwargs": {
            "task": job.task,
            "rewards": list(job.settings.rewards),
            "weights": list(job.settings.weights_of_rewards),
            "thinking_tags": [list(pair) for pair in tags.pairs],
            "thinking_begun": tags.begun,
        },
    }


def check_tags(tokens: Any, template: prompt.Template | str) -> None:
    """Raise BadInput if the model marks its thinking by special tokens, which verl drops before a reward reads it."""
    special_tags = prompt.thinking_tags(tokens, template).tokens(tokens.all_special_tokens)
    if special_tags:
        raise BadInput(
            f"The model marks its thinking by the special token {special_tags[0]}, which verl drops before a reward "
            "reads the text, so drafts could not be told from the answer: set train.trainer = trl."
        )


def nested(dotted: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted keys as a tree, as a configuration file holds them."""
    tree: dict[str, Any] = {}
    for key, value in dotted.items():
        *path, last = key.split(".")
        branch = tree
        for part in path:
            branch = branch.setdefault(part, {})
        branch[last] = value
    return tree
