"""The policy: the base model in memory, and the adapter over it.

An adapter's base stays frozen, so it may be stored in fewer bits than the trained weights: bf16, INT8, or NF4 with
double quantization (arXiv 2305.14314, sections 3 and 4). The reference policy is the same base with the adapter off.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from qrl import process
from qrl.checkpoint.header import Entry
from qrl.engine import attention, hf, pretrained
from qrl.errors import BadInput
from qrl.recipe import PACKED, Train
from qrl.tasks import turns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RECORD = "qrl_base.json"  # beside an adapter: what it was trained over
HEADS = ("lm_head", "embed_out", "output")  # output heads: TRL reads their weights without any adapter


def check(settings: Train, tensors: Mapping[str, Entry]) -> None:
    """Raise BadInput if FSDP cannot shard the base, or if a target of the adapter is no linear of the model."""
    if not settings.adapter:
        return
    if settings.packed and process.sharded():
        remedy = "launch without FSDP, so that each process has the whole base, or set train.base_storage = bf16"
        raise BadInput(
            f"train.base_storage = {settings.storage} packs the base into codes, but FSDP cannot shard them: {remedy}."
        )
    linears = _linears(tensors)
    for target in settings.lora_targets:
        leaf = target.rpartition(".")[2]
        offered = ", ".join(linear_names(tensors))
        if leaf in HEADS or "embed" in leaf:
            raise BadInput(
                f"train.lora_targets names '{target}', the output head or the embedding, but training computes with "
                f"their weights as they are, without an adapter: give {offered}, or train.method=full."
            )
        if not any(name == target or name.endswith(f".{target}") for name in linears):
            raise BadInput(f"train.lora_targets names '{target}', which is no linear of the model: give {offered}.")


def linear_names(tensors: Mapping[str, Entry]) -> list[str]:
    """Return the last parts of the names of the linears that an adapter can extend, such as q_proj, sorted."""
    return sorted({name.rpartition(".")[2] for name in _linears(tensors)})


def _linears(tensors: Mapping[str, Entry]) -> list[str]:
    """Return the modules with a weight matrix that an adapter can extend."""
    matrices = [name for name, entry in tensors.items() if name.endswith(".weight") and len(entry.shape) == 2]
    modules = [name.removesuffix(".weight") for name in matrices]
    leaves = {module: module.rpartition(".")[2] for module in modules}
    return [module for module, leaf in leaves.items() if leaf not in HEADS and "embed" not in leaf]


def load(base: Path, settings: Train, device: str):
    """Return the base stored as the recipe says, on the CPU, or on this process's GPU where bitsandbytes packs it.

    Full training and a base in fp32 get fp32 weights: at RL's learning rates, bf16 masters would lose most updates.

    Raises:
        BadInput: a weight is not finite, bitsandbytes packs none, or no file of the base names an end token.
    """
    storage, compute = settings.storage, getattr(torch, {"fp32": "float32", "bf16": "bfloat16"}[settings.compute])
    options = {}
    if storage in PACKED:
        place = f"cuda:{process.local_rank()}" if device == "cuda" else "cpu"
        options = {"quantization_config": pretrained.bitsandbytes(storage, compute), "device_map": {"": place}}
    model = pretrained.load(base, dtype=torch.float32 if storage == "fp32" else compute, **options)
    # TRL's trainers end an answer at these, and at the tokenizer's end token.
    model.generation_config.eos_token_id = hf.end_tokens(model.generation_config, base)
    if name := first_nonfinite(model.named_parameters()):
        raise BadInput(f"{base} holds NaN or infinity in {name}: give weights that are finite.")
    for _, module in packed(model):
        # Else the first forward pass on some CPUs repacks codes in place (README.md, traps that are closed).
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    if storage in PACKED and not any(packed(model)):
        raise BadInput(f"{base} has no linear that bitsandbytes packs: set train.base_storage = bf16.")
    if device == "cpu":
        attention.use_grouped(model)
    return model


def tokenizer(base: Path) -> PreTrainedTokenizerBase:
    """Return the base's tokenizer, with an end token for TRL's trainers, which count on one.

    Where the tokenizer names none, the token is the one that the chat template ends a turn with.
    """
    tokens = hf.tokenizer(base)
    if tokens.eos_token is None:
        tokens.eos_token = turns.closing_token(tokens)
        tokens.pad_token = tokens.pad_token or tokens.eos_token
    return tokens


def first_nonfinite(weights: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """Return the name of the first weight that holds NaN or infinity, if one does."""
    floats = ((name, weight) for name, weight in weights if weight.is_floating_point() and weight.numel())
    return next((name for name, weight in floats if not all(map(math.isfinite, torch.aminmax(weight.detach())))), None)


def compute_in_fp32(model) -> None:
    """Turn off rounding between layers; codes stay codes, and unpack to the same values."""
    for weight in model.parameters():
        if weight.is_floating_point():
            weight.data = weight.data.to(torch.float32)
    for _, module in packed(model):
        if hasattr(module, "compute_dtype"):
            module.compute_dtype = torch.float32


def adapter(settings: Train):
    """Return PEFT's configuration of the adapter, or None where all weights are trained."""
    if not settings.adapter:
        return None
    process.hush_gptqmodel()
    from peft import LoraConfig

    targets = list(settings.lora_targets) or "all-linear"
    size = {"r": settings.adapter_rank, "lora_alpha": settings.adapter_alpha}
    return LoraConfig(**size, target_modules=targets, task_type="CAUSAL_LM")


def widen(model) -> None:
    """Keep trained weights in fp32: TRL casts an adapter over a packed base to bf16, which loses small updates."""
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.to(torch.float32)


def free_casts(trainer) -> None:
    """Drop a weight's bf16 copy after its one use in a pass: full training saves 2 bytes per parameter."""
    from accelerate.utils import AutocastKwargs

    trainer.accelerator.autocast_handler = AutocastKwargs(cache_enabled=False)


def record(folder: Path, settings: Train, base_digest: str) -> None:
    """Write beside an adapter what it was trained over, so that `merge` chooses the right base."""
    note = {"base_storage": settings.storage, "compute": settings.compute, "base_digest": base_digest}
    (folder / RECORD).write_text(json.dumps(note, indent=1) + "\n")


def recorded(folder: Path) -> dict[str, str]:
    """Return what an adapter of ours was trained over, else nothing; raise BadInput if the record is damaged."""
    if not (folder / RECORD).is_file():
        return {}
    try:
        note = json.loads((folder / RECORD).read_text())
        return {key: note[key] for key in ("base_storage", "compute", "base_digest")}
    except (ValueError, KeyError, TypeError):
        remedy = "train again, or delete it and set merge.into"
        raise BadInput(f"{folder / RECORD} is damaged, but a record of `train` was expected: {remedy}.") from None


def packed(model) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules that hold bitsandbytes' codes, by name, without importing it for models that have none."""
    for name, module in model.named_modules():
        if type(module).__module__.startswith("bitsandbytes.nn"):
            yield name, module
