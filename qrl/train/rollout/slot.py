"""An adapter in one of vLLM's LoRA slots: A and B are sent, and the engine keeps the base that it was sent once.

vLLM then multiplies by the base and by the adapter, as training does, instead of by one merged matrix: less is sent,
and nothing is rounded to bfloat16 in between. vLLM's public interface reads an adapter from a folder; here the tensors
go from memory to memory, through vLLM's manager of adapters (`load`). Written for vLLM 0.31.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from qrl.errors import QrlError
from qrl.recipe import Rollout, Train
from qrl.train.rollout import sync, vllm_engine

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.lora.request import LoRARequest

NAME = "slot"  # of `rollout.adapter`
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # sizes of a slot that vLLM has
_ID = 1  # of the only adapter


def unfit(settings: Rollout, train: Train) -> str:
    """Return why the recipe's adapter cannot be in a slot, and what to set; empty if it can, or need not."""
    if settings.adapter != NAME:
        return ""
    if not train.adapter:
        return "sends an adapter, but train.method = full trains all weights: set train.method = lora or qlora"
    if settings.mode == "server":
        return (
            "needs an engine in the training process, since a server is sent merged weights: set rollout.mode = "
            "colocate"
        )
    if settings.quantization != "none":
        return (
            f"keeps the engine's base in full precision, but rollout.quantization = {settings.quantization} "
            "requantizes merged weights at every sync: set rollout.quantization = none"
        )
    if train.adapter_rank > RANKS[-1]:
        return f"holds ranks up to {RANKS[-1]}, but train.lora_rank = {train.adapter_rank}: lower it"
    return ""


def options(model: nn.Module) -> dict[str, Any]:
    """Return vLLM's options for an engine with one slot, only in the linears that the model's adapter extends."""
    rank_of = {name: len(matrix_a) for name, matrix_a, _ in sync.named_adapter(model)}
    largest_rank = max(rank_of.values())
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(size for size in RANKS if size >= largest_rank),
        "lora_target_modules": sorted({name.rpartition(".")[2] for name in rank_of}),
    }


def request() -> LoRARequest:
    """Return what names the adapter in the slot to vLLM, which finds it loaded and reads no file."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", _ID, "in memory")


def load(engine: LLM, adapter: Iterator[tuple[str, torch.Tensor, torch.Tensor]]) -> None:
    """Replace the adapter in the slot, and drop the engine's prefix cache.

    Args:
        adapter: as `sync.named_adapter` yields it; the engine keeps it in bfloat16.

    Raises:
        QrlError: a linear of the engine has no slot, so its part of the adapter would be lost.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    runner = vllm_engine.runner(engine)
    manager = runner.lora_manager._adapter_manager
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    with torch.no_grad():
        tensors = {}
        for name, matrix_a, matrix_b in adapter:
            rank = len(matrix_a)
            tensors[f"base_model.model.{name}.lora_A.weight"] = matrix_a
            tensors[f"base_model.model.{name}.lora_B.weight"] = matrix_b
        lora = LoRAModel.from_lora_tensors(
            _ID,
            tensors,
            PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),  # B is scaled already
            device=str(runner.device),
            dtype=runner.lora_config.lora_dtype,
            weights_mapper=mapper and mapper.get_rename_mapper(),
        )
        # vLLM ignores the adapter of a linear without a slot. Fused linears are listed under their parts.
        slots = set(manager.modules).union(*manager.packed_modules.values())
        without_slot = sorted(set(lora.loras) - slots)
        if without_slot:
            raise QrlError(
                f"The rollout engine has no slot for the adapter of {without_slot[0]}, and would sample without it: "
                "set rollout.adapter = merged, and report the model's architecture."
            )
        manager.remove_adapter(_ID)
        manager.add_adapter(lora)
        manager.activate_adapter(_ID)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    engine.reset_prefix_cache()
