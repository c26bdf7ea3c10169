"""The bytes of a training: what it holds in memory, what it needs at its peak, and what it writes to the disk.

One model for all who ask: the checks before a weight is loaded, the room that a colocated engine has, the forecast of a
study. Weights, gradients and moments are exact. Activations are an estimate, so that no check refuses by them.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path

from qrl import checkpoint, process
from qrl.errors import BadInput
from qrl.recipe import Train

WEIGHTS, GRADIENTS, MOMENTS, REFERENCE, TEACHER = (
    "weights",
    "gradients",
    "AdamW's moments",
    "the reference",
    "the teacher",
)  # the parts of `resident`
STORED = {"fp32": 4, "bf16": 2, "int8": 1, "nf4": 0.5}  # bytes of a weight, at least: without the scales of codes
_MASTER = 4  # bytes of a trained weight, and of its gradient, in fp32
_MOMENTS = 2 * _MASTER  # bytes of AdamW's mean and variance of a gradient
_ACTIVATIONS = 17  # values kept per token, layer and hidden unit for the backward pass (arXiv 2205.05198, without s²)
_LOGITS = 3  # copies of the logits: their values, the softmax, the gradient


@dataclass(frozen=True)
class Shape:
    """A model's sizes, from config.json and the headers of its weights."""

    parameters: int
    layers: int
    hidden: int
    vocabulary: int
    cached: int  # values per token and layer in the key-value cache
    positions: int | None  # longest text in tokens; None where config.json does not say, or scales them

    @classmethod
    def of(cls, path: Path) -> "Shape":
        """Return the sizes of a checkpoint; those that config.json does not name count as 0."""
        config = checkpoint.config(path)
        hidden = config.get("hidden_size") or 0
        heads = config.get("num_attention_heads") or 1
        head_size = config.get("head_dim") or hidden // heads
        key_value_heads = config.get("num_key_value_heads") or heads
        return cls(
            parameters=sum(entry.numel for entry in checkpoint.entries(path).values()),
            layers=config.get("num_hidden_layers") or 0,
            hidden=hidden,
            vocabulary=config.get("vocab_size") or 0,
            cached=2 * key_value_heads * head_size,
            positions=checkpoint.positions(path),
        )


def parameters(model: checkpoint.Checkpoint) -> int:
    """Return how many parameters a checkpoint's model has; some store a tied head twice."""
    is_tied = checkpoint.config(model.path).get("tie_word_embeddings")
    entries = checkpoint.entries(model.path)
    return sum(entry.numel for name, entry in entries.items() if not (is_tied and name == "lm_head.weight"))


def resident(settings: Train, parameters: int, teacher: int = 0) -> dict[str, float]:
    """Return the least bytes that training holds in the memory of each process, by what they are.

    Activations and the KV cache are not counted, nor is an adapter, which is small; FSDP's processes share the rest.
    Where accelerate's own settings may keep a part of it in the host's memory, only the teacher is counted.

    Args:
        parameters: of the model.
        teacher: parameters of a distillation's teacher; its linears are stored as they are computed.
    """
    bytes_of: dict[str, float] = {}
    is_offloaded = os.environ.get("FSDP_OFFLOAD_PARAMS", "false").lower() == "true"
    if not is_offloaded:
        held = parameters / (process.world_size() if process.sharded() else 1)
        bytes_of |= _of_adapter(settings, held) if settings.adapter else _of_all_weights(settings, held)
    if teacher:
        shares = {"process": 1, "sharded": process.world_size(), "server": math.inf}[settings.teacher_placement]
        bytes_of[TEACHER] = STORED[settings.compute] * teacher / shares
    return bytes_of


def _of_adapter(settings: Train, parameters: float) -> dict[str, float]:
    return {WEIGHTS: STORED[settings.storage] * parameters}


def _of_all_weights(settings: Train, parameters: float) -> dict[str, float]:
    bytes_of = {WEIGHTS: _MASTER * parameters, GRADIENTS: _MASTER * parameters, MOMENTS: _MOMENTS * parameters}
    # Only GRPO has a reference. An adapter's is the base with the adapter off.
    if settings.beta and not settings.teacher and settings.algorithm != "sft":
        bytes_of[REFERENCE] = _MASTER * parameters
    return bytes_of


def check_total(settings: Train, parameters: int, device: str, teacher: int = 0) -> None:
    """Raise BadInput if what full training holds, a reference and a teacher too, exceeds the device's whole memory.

    Args:
        parameters: of the model.
        teacher: parameters of a distillation's teacher.
    """
    if settings.adapter:
        return
    bytes_of = resident(settings, parameters, teacher)
    scoring = bytes_of.pop(TEACHER, 0)
    reference = bytes_of.pop(REFERENCE, 0)
    training = sum(bytes_of.values())
    total = device_bytes(device)
    if training > total:
        remedies = ["take a smaller model"]
        if not settings.teacher and settings.algorithm != "sft":
            remedies.append("train.method = lora or qlora")
        if device == "cuda" and settings.algorithm != "sft":
            remedies.append("train.parallel = fsdp2 on more GPUs")
        raise BadInput(
            f"train.method = full keeps master weights, gradients and AdamW's two moments in fp32: {_gib(training)} "
            f"for this model, but this {device} has {_gib(total)}: {' or '.join(remedies)}."
        )
    if training + scoring > total:
        raise BadInput(
            f"The teacher needs {_gib(scoring)} beside the {_gib(training)} of full training, but this {device} has "
            f"{_gib(total)}: take a smaller one, or set train.teacher_placement = server."
        )
    if training + reference > total:
        raise BadInput(
            f"train.beta = {settings.beta:g} with train.method = full keeps a second copy of the weights as the "
            f"reference: {_gib(training + reference)} with the optimizer, but this {device} has {_gib(total)}: set "
            "train.beta = 0, or train.method = lora or qlora, where the reference is the base with the adapter off."
        )


def needed(settings: Train, shape: Shape, prompt_tokens: float) -> tuple[float, float]:
    """Return the bytes that training needs for weights and optimizer, and an estimate of its peak.

    Args:
        settings: of the training, in one process.
        shape: of the model.
        prompt_tokens: length of a prompt.

    Source: activations as in Korthikanti et al., arXiv 2205.05198, table 2, less what fused attention saves.
    """
    weights = sum(resident(settings, shape.parameters).values())
    width = STORED[settings.compute]
    text_tokens = prompt_tokens + settings.max_completion_tokens
    completions = settings.prompts_per_step * settings.generations
    micro_batch = min(settings.micro_batch, completions)

    layers: float = shape.layers
    if settings.gradient_checkpointing:  # the inputs of all layers are kept, and one layer's activations
        layers = 1 + 2 * shape.layers / _ACTIVATIONS
    activations = micro_batch * text_tokens * shape.hidden * _ACTIVATIONS * layers * width
    logits = micro_batch * settings.max_completion_tokens * shape.vocabulary * _LOGITS * 4
    cache = completions * text_tokens * shape.layers * shape.cached * width
    return weights, weights + max(activations + logits, cache)  # an update and sampling are never at once


def stored(base: checkpoint.Checkpoint, dtype: str) -> int:
    """Return the size of a model like the base on the disk, stored in this dtype: auto, the base's, or fp32."""
    return base.bytes if dtype == "auto" else max(base.bytes, _MASTER * parameters(base))


def written(settings: Train, base: checkpoint.Checkpoint) -> int:
    """Return the space that full training takes at most: its checkpoints, and the trained model.

    A checkpoint has the weights and AdamW's moments. An adapter's own is small.
    """
    if settings.adapter:
        return 0
    # The oldest is deleted once the newest is whole.
    checkpoints = min(settings.keep_checkpoints + 1, -(-settings.steps // settings.save_every))
    checkpoint_bytes = (_MASTER + _MOMENTS) * parameters(base)
    return checkpoints * checkpoint_bytes + stored(base, settings.store_dtype)


def device_bytes(device: str) -> int:
    """Return the whole memory of a device: this process's GPU, or the machine."""
    if device == "cuda":
        import torch

        return torch.cuda.get_device_properties(process.local_rank()).total_memory
    import psutil

    return psutil.virtual_memory().total


def _gib(size: float) -> str:
    return f"{size / 2**30:.0f} GiB"
