"""Evaluation: a cell's rows, whether they are healthy, and what they score."""

from collections.abc import Iterable

from qrl import names
from qrl.engine import device as devices
from qrl.errors import BadInput
from qrl.recipe import Recipe, rules


def check_kv(schemes: Iterable[str], engine: str) -> None:
    """Raise BadInput if a scheme has its key-value cache in FP8 and the engine cannot."""
    for scheme in schemes:
        if scheme.endswith(names.KV_FP8) and engine != "vllm":
            raise BadInput(rules.needs_vllm(scheme, engine), field="evaluate.engine", rule="kv-fp8-needs-vllm")


def check_gpus(count: int, engine: str, device: str, gpus: int | None = None) -> None:
    """Raise BadInput if engine and machine, or one with `gpus`, lack what `evaluate.tensor_parallel` requires."""
    if count == 1:
        return
    setting = f"evaluate.tensor_parallel = {count}"
    if engine != "vllm":
        raise BadInput(
            f"{setting} divides a model's weights under vLLM, but the engine is {engine}: choose vllm, or 1."
        )
    available = devices.gpus(device) if gpus is None else gpus
    if available < count:
        raise BadInput(f"{setting} needs {count} GPUs, but this machine has {available} for device {device}: lower it.")


def kv_schemes(recipe: Recipe) -> list[str]:
    """Return the schemes of `evaluate.kv_fp8` as cells name them: `awq+kv-fp8`."""
    return [f"{scheme}{names.KV_FP8}" for scheme in recipe.evaluate.kv_fp8]
