"""How much memory is free, and what happens where it ran out: the work is repeated once with half the batch."""

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from qrl.errors import QrlError

_Result = TypeVar("_Result")
_CGROUP = Path("/sys/fs/cgroup")  # a container's limit of memory
_WORDS = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")


def ran_out(error: BaseException) -> bool:
    """Return whether an error means that a GPU's or this machine's memory ran out."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


def halved(
    work: Callable[[int], _Result], size: int, name: str, *, divisor_of: int = 0, say: Callable[[str], object] = print
) -> _Result:
    """Return what `work` returns for a batch size or, if memory runs out, for half of it.

    Args:
        work: a function of the batch size; its second call repeats the work, or resumes it.
        size: of the batch, from the recipe.
        name: of the recipe's field.
        divisor_of: a number that the half must divide, too; 0: any half does.
        say: called with a sentence before the second call.

    Raises:
        QrlError: memory ran out for half the batch, too, or the batch has no half.
    """
    half_size = size // 2
    if half_size and divisor_of % half_size:
        half_size = 0
    try:
        return work(size)
    except Exception as error:
        if not ran_out(error):
            raise
        reason = " ".join(str(error).split())[:120] or type(error).__name__
    if not half_size:
        raise QrlError(f"Memory ran out with {name} = {size} ({reason}): {_remedy(name)}.")

    # Outside the except block: within it, the traceback would keep the tensors alive.
    _free()
    say(f"Memory ran out with {name} = {size} ({reason}), so it goes on with {half_size}.")
    try:
        return work(half_size)
    except Exception as error:
        if not ran_out(error):
            raise
    raise QrlError(f"Memory ran out with {name} = {size}, and with {half_size}: {_remedy(name)}.")


def _remedy(name: str) -> str:
    if name.startswith("train."):
        return "set train.gradient_checkpointing, or lower train.prompts_per_step or train.max_completion_tokens"
    if name.startswith("--"):  # of a command that makes a model
        return f"lower {name}, or free memory that other processes hold"
    return f"lower {name} or evaluate.max_new_tokens, or free memory that other processes hold"


def _free() -> None:
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def free_bytes(device: str) -> int:
    """Return the memory that is free on a device, in a container at most what its limit leaves."""
    if device == "cuda":
        import torch

        return torch.cuda.mem_get_info()[0]
    import psutil

    free = psutil.virtual_memory().available
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit == "max":
            return free
        used = int((_CGROUP / "memory.current").read_text())
        statistics = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        file_cache = int(statistics["inactive_file"])  # counts as used, but is given up when memory is short
        return min(free, int(limit) - used + file_cache)
    except (OSError, KeyError, ValueError):  # no container, or an older kernel's files
        return free


def in_gib(size: float) -> str:
    """Return bytes as 0.04 GiB, 5.1 GiB or 48 GiB."""
    gib = size / 2**30
    return f"{gib:.2g} GiB" if gib < 10 else f"{gib:.0f} GiB"
