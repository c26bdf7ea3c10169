"""A GPU's memory for a colocated engine: too little is refused before a weight is loaded, or said in a sentence."""

import math

import torch

from qrl import process
from qrl.engine import memory
from qrl.errors import BadInput, QrlError
from qrl.recipe import Rollout, Train

_WEIGHT_BYTES = {"fp32": 4, "bf16": 2, "int8": 1, "nf4": 0.5}  # of a weight as training stores it, at least
_OTHERS = "end what else runs on this GPU, which `nvidia-smi` lists"


def check(settings: Rollout, train: Train, parameters: int, teacher: int = 0) -> None:
    """Check that this process's GPU has room for the trained weights, a teacher, and an engine beside them.

    Gradients, optimizer and activations are not counted: the engine may sleep while they are needed.

    Args:
        settings: who samples; only an engine in this process takes memory here.
        train: its base's storage.
        parameters: of the model.
        teacher: parameters of the model that scores in a distillation; `train.teacher_placement` says where. Its
            linears are stored as they are computed, so this is a lower bound.

    Raises:
        BadInput: less memory is free than these take at once.
    """
    if settings.engine == "transformers" or settings.mode == "server":
        return
    free, total = torch.cuda.mem_get_info(process.local_rank())
    held = 0 if process.sharded() else _WEIGHT_BYTES[train.storage] * parameters
    shares = {"process": 1, "sharded": process.world_size(), "server": math.inf}[train.teacher_placement]
    scores = _WEIGHT_BYTES[train.compute] * teacher / shares
    if settings.kv_cache_gib is None:
        engine, key = settings.gpu_memory_utilization * total, "gpu_memory_utilization"
    else:
        engine, key = settings.kv_cache_gib * 2**30, "kv_cache_gib"
        engine += parameters * (2 if settings.quantization == "none" else 1)
    if held + scores + engine > free:
        beside = f", the teacher {_gib(scores)}" if scores else ""
        parts = f"The rollout engine takes {_gib(engine)}{beside} and the trained weights {_gib(held)}"
        raise BadInput(
            f"{parts}, but only {_gib(free)} of the GPU's {_gib(total)} are free: {_OTHERS}, {_less(settings, key)}."
        )


def free() -> str:
    """Return how much of the present GPU's memory is free, in words; nothing without a GPU."""
    if not torch.cuda.is_available():
        return ""
    here, total = torch.cuda.mem_get_info()
    return f", with {_gib(here)} of {_gib(total)} free beside the trained model"


def unstarted(error: Exception, settings: Rollout, room: str) -> QrlError:
    """Return the sentence for an engine that did not start: vLLM's own reason, and what to do.

    Args:
        error: whatever vLLM raised.
        settings: of the engine.
        room: what `free` returned before the start.
    """
    reason = " ".join(str(error).split())[:300].rstrip(".")
    key = "gpu_memory_utilization" if settings.kv_cache_gib is None else "kv_cache_gib"
    remedy = "correct what it names, or set rollout.engine = transformers"
    if "cache" in reason.lower() and "memory" in reason.lower():  # the engine's share is too small for its sequences
        remedy = f"raise rollout.{key}, or lower rollout.max_model_tokens"
    elif "memory" in reason.lower() or memory.ran_out(error):
        remedy = f"{_OTHERS}, {_less(settings, key)}"
    elif "lora" in reason.lower():
        remedy = "set rollout.adapter = merged"
    return QrlError(f"The rollout engine cannot start{room} ({reason}): {remedy}.")


def _less(settings: Rollout, key: str) -> str:
    fixed = ", set rollout.kv_cache_gib" if settings.kv_cache_gib is None else ""
    return f"lower rollout.{key}{fixed}, or use a server (rollout.mode = server)"


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
