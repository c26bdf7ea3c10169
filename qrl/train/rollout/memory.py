"""A GPU's free memory, for training and a colocated engine: too little is refused before a weight is loaded.

Training and engine are never at their largest together. While the engine samples there are no gradients, and while
the model updates the engine may sleep: `check` compares the larger of the two moments with what is free.
"""

import torch

from qrl import process
from qrl.engine import memory
from qrl.errors import BadInput, QrlError
from qrl.recipe import Rollout, Train
from qrl.train import policy

_ENGINE = "the rollout engine"
_FOUR_BITS = ("int4", "nvfp4-a16")  # formats with codes of half a byte that a colocated engine can hold
_END_OTHERS = "end what else runs on this GPU, which `nvidia-smi` lists"


def check(settings: Rollout, train: Train, parameters: int, teacher: int = 0) -> None:
    """Check that this process's GPU has room for what training holds, a teacher, and an engine in this process.

    While the engine samples there are no gradients; while the model updates the engine may sleep.

    Args:
        settings: who samples.
        train: how weights are stored, and where a teacher is.
        parameters: of the model.
        teacher: parameters of the model that scores in a distillation.

    Raises:
        BadInput: less memory is free than these take at once.
    """
    free, total = torch.cuda.mem_get_info(process.local_rank())
    training = policy.resident(train, parameters, teacher)  # part → bytes
    engine = {} if train.algorithm == "sft" else _engine(settings, train.qat, parameters, total)
    while_sampling = {name: size for name, size in training.items() if name != policy.GRADIENTS} | engine
    while_updating = training | engine if settings.sleep == "off" else training
    largest = max(while_sampling, while_updating, key=lambda parts: sum(parts.values()))
    required = sum(largest.values())
    if required <= free:
        return

    remedies = [_END_OTHERS, _lower(settings) if engine else "take a smaller model"]
    if largest.get(policy.TEACHER):
        remedies.append("put the teacher behind a server (train.teacher_placement = server)")
    parts = ", ".join(f"{name} {_gib(size)}" for name, size in largest.items() if size)
    raise BadInput(
        f"Training would hold {_gib(required)} on the GPU at once ({parts}), but only {_gib(free)} of the GPU's "
        f"{_gib(total)} are free: {', or '.join(remedies)}."
    )


def _engine(settings: Rollout, qat: str, parameters: int, total: int) -> dict[str, float]:
    """Return the bytes of an engine in this process, by its name; nothing if there is none."""
    if settings.engine == "transformers" or settings.mode == "server":
        return {}
    if settings.kv_cache_gib is None:
        return {_ENGINE: settings.gpu_memory_utilization * total}
    if settings.quantization == "none":
        bytes_per_parameter = 2.0
    elif qat in _FOUR_BITS:
        bytes_per_parameter = 0.5
    else:  # FP8
        bytes_per_parameter = 1.0
    return {_ENGINE: settings.kv_cache_gib * 2**30 + bytes_per_parameter * parameters}


def free() -> str:
    """Return how much of the present GPU's memory is free, in words; nothing without a GPU."""
    if not torch.cuda.is_available():
        return ""
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return f", with {_gib(free_bytes)} of {_gib(total_bytes)} free beside the trained model"


def unstarted(error: Exception, settings: Rollout, free_memory: str) -> QrlError:
    """Return the sentence for an engine that did not start: vLLM's own reason, and what to do.

    Args:
        error: whatever vLLM raised.
        settings: of the engine.
        free_memory: what `free` returned before the start.
    """
    reason = " ".join(str(error).split())[:300].rstrip(".")
    key = "gpu_memory_utilization" if settings.kv_cache_gib is None else "kv_cache_gib"
    remedy = "correct what it names, or set rollout.engine = transformers"
    if "cache" in reason.lower() and "memory" in reason.lower():  # the engine's share is too small for its sequences
        remedy = f"raise rollout.{key}, or lower rollout.max_model_tokens"
    elif "memory" in reason.lower() or memory.ran_out(error):
        remedy = f"{_END_OTHERS}, {_lower(settings)}"
    elif "lora" in reason.lower():
        remedy = "set rollout.adapter = merged"
    return QrlError(f"The rollout engine cannot start{free_memory} ({reason}): {remedy}.")


def _lower(settings: Rollout) -> str:
    if settings.kv_cache_gib is None:
        setting = "lower rollout.gpu_memory_utilization, set rollout.kv_cache_gib"
    else:
        setting = "lower rollout.kv_cache_gib"
    return f"{setting}, or use a server (rollout.mode = server)"


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
