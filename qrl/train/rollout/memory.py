"""A GPU's free memory, for training and a colocated engine: too little is refused before a weight is loaded."""

import torch

from qrl import process
from qrl.engine import memory
from qrl.errors import BadInput, QrlError
from qrl.recipe import Rollout, Train
from qrl.train import footprint

_ENGINE = "the rollout engine"
_FOUR_BITS = ("int4", "nvfp4-a16")  # whose codes a colocated engine can hold
_OTHERS = "end what else runs on this GPU, which `nvidia-smi` lists"


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
    held = footprint.resident(train, parameters, teacher)
    engine = {} if train.algorithm == "sft" else _engine(settings, train.qat, parameters, total)
    samples = {name: size for name, size in held.items() if name != footprint.GRADIENTS} | engine
    updates = held | (engine if settings.sleep == "off" else {})
    most = max(samples, updates, key=lambda parts: sum(parts.values()))
    if sum(most.values()) > free:
        parts = ", ".join(f"{name} {_gib(size)}" for name, size in most.items() if size)
        whole = _gib(sum(most.values()))
        ways = [_OTHERS, *([_less(settings)] if engine else ["take a smaller model"])]
        ways += ["put the teacher behind a server (train.teacher_placement = server)"] * bool(
            most.get(footprint.TEACHER)
        )
        raise BadInput(
            f"Training would hold {whole} on the GPU at once ({parts}), but only {_gib(free)} of the GPU's "
            f"{_gib(total)} are free: {', or '.join(ways)}."
        )


def _engine(settings: Rollout, qat: str, parameters: int, total: int) -> dict[str, float]:
    """Return the bytes of an engine in this process, by its name; nothing if there is none."""
    if settings.engine == "transformers" or settings.mode == "server":
        return {}
    if settings.kv_cache_gib is None:
        return {_ENGINE: settings.gpu_memory_utilization * total}
    each = 2 if settings.quantization == "none" else 0.5 if qat in _FOUR_BITS else 1  # FP8 holds one
    return {_ENGINE: settings.kv_cache_gib * 2**30 + each * parameters}


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
        remedy = f"{_OTHERS}, {_less(settings)}"
    elif "lora" in reason.lower():
        remedy = "set rollout.adapter = merged"
    return QrlError(f"The rollout engine cannot start{room} ({reason}): {remedy}.")


def _less(settings: Rollout) -> str:
    shared = settings.kv_cache_gib is None
    key, fixed = ("gpu_memory_utilization", ", set rollout.kv_cache_gib") if shared else ("kv_cache_gib", "")
    return f"lower rollout.{key}{fixed}, or use a server (rollout.mode = server)"


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
