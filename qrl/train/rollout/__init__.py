"""Sample GRPO's completions with vLLM: its checks, its weights, and its gap to the trained model."""

from qrl.train.rollout.checks import (
    VLLM,
    arguments,
    check,
    check_heeded,
    check_installed,
    check_length,
    startup_warnings,
)
from qrl.train.rollout.engine_gap import METRICS, PREFIX
from qrl.train.rollout.memory import check as check_memory

__all__ = [
    "METRICS",
    "PREFIX",
    "VLLM",
    "arguments",
    "check",
    "check_heeded",
    "check_installed",
    "check_length",
    "check_memory",
    "startup_warnings",
]
