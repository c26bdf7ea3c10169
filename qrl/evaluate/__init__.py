"""Evaluation: a cell's rows, whether they are healthy, and what they score."""

from collections.abc import Iterable

from qrl import names
from qrl.engine import device as devices
from qrl.errors import BadInput
from qrl.recipe import Evaluate, Recipe


def check_kv(schemes: Iterable[str], engine: str) -> None:
    """Raise BadInput if a scheme has its key-value cache in FP8 and the engine cannot."""
    for scheme in schemes:
        if scheme.endswith(names.KV_FP8) and engine != "vllm":
            raise BadInput(
                f"Scheme {scheme} needs vLLM, which can keep the key-value cache in FP8, but the engine is {engine}: "
                f"choose vllm (--evaluate.engine, or --engine of serve), or the scheme {names.stored(scheme)}."
            )


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
    """Return the schemes of `evaluate.kv_fp8` as cells name them: `awq+kv-fp8`.

    Raises:
        BadInput: the engine is not vLLM, or the study does not make the scheme.
    """
    study_schemes = (names.FULL, *recipe.quantize.schemes)
    for scheme in recipe.evaluate.kv_fp8:
        if scheme not in study_schemes:
            raise BadInput(
                f"evaluate.kv_fp8 names {scheme}, but the study makes {', '.join(study_schemes)}: name some of these."
            )
    schemes = [f"{scheme}{names.KV_FP8}" for scheme in recipe.evaluate.kv_fp8]
    check_kv(schemes, recipe.evaluate.engine)
    return schemes


def unheeded(settings: Evaluate) -> list[str]:
    """Return a sentence for each setting that has no effect."""
    sentences = []
    default_temperature = Evaluate.model_fields["temperature"].default
    if settings.samples == 1 and settings.temperature != default_temperature:
        setting = f"evaluate.temperature = {settings.temperature:g} means nothing with evaluate.samples = 1"
        sentences.append(f"{setting}: a single answer is greedy, only several are sampled.")
    if settings.deterministic and settings.engine != "vllm":
        setting = f"evaluate.deterministic means nothing with evaluate.engine = {settings.engine}"
        sentences.append(f"{setting}: it selects vLLM's kernels.")
    if settings.unpacked and settings.engine != "vllm":
        setting = f"evaluate.unpacked means nothing with evaluate.engine = {settings.engine}"
        sentences.append(f"{setting}: it always unpacks weights.")
    return sentences
