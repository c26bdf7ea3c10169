"""How a process of ours behaves: its libraries are quiet, its threads do not spin, its memory is kept."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import logging
import os
import warnings

CHATTY = ("torchao", "torch.utils._pytree", "bitsandbytes", "torch.distributed.elastic", "torch.fx", "alembic")
FOLDER = "QRL_FOLDER"  # where the command was given that launched this process, which MLflow starts in the project's own folder
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _NEVER = -1, -3, 1 << 30  # glibc's mallopt


def settle() -> None:
    """Sets working folder, environment, log levels and the allocator; to be called before torch or transformers is imported."""
    if folder := os.environ.pop(FOLDER, None):
        os.chdir(folder)  # a relative path means what it meant to whoever gave it, and work in progress stays there
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Threads that wait for each other by spinning take the processor from those they wait for, once anybody else wants
    # it too: on two busy cores decoding took 5.8 s instead of 1.5 s in one trial.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", message=".*MatMul8bitLt.*")  # INT8 warns once a matrix product
    _keep_memory()


def hush_transformers() -> None:
    """Turns off transformers' own bars, which flash for every load and save of a small model."""
    from transformers.utils import logging as theirs

    theirs.disable_progress_bar()
    theirs.set_verbosity_error()


def hush_gptqmodel() -> None:
    """Imports GPTQModel, where it is installed, without its banner and advice: PEFT does so for every adapter, of any base."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(ImportError):
        importlib.import_module("gptqmodel")


def _keep_memory() -> None:
    """Lets glibc keep what large tensors free: else each one is mapped and faulted in anew, a third of decoding's time."""
    with contextlib.suppress(OSError, AttributeError):  # not Linux, or not glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _NEVER)
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)


def rank() -> int:
    """Which of several processes of one training this is, as `torchrun` and `accelerate launch` say; 0 writes and logs."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Which of them on this machine: the number of its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def world_size() -> int:
    """How many processes train together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def sharded() -> bool:
    """Whether each process holds a part of the weights only, as `accelerate launch --use_fsdp` arranges."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
