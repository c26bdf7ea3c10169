"""Evaluation: a cell's rows, whether they are healthy, and what they score."""

from qrl.recipe import Evaluate


def unheeded(settings: Evaluate) -> list[str]:
    """What a section asks for and will not be done, a sentence each."""
    told = []
    if settings.samples == 1 and settings.temperature != Evaluate.model_fields["temperature"].default:
        told.append(
            f"evaluate.temperature = {settings.temperature:g} means nothing where evaluate.samples = 1: one answer is greedy, more are sampled."
        )
    if settings.deterministic and settings.engine != "vllm":
        told.append(
            f"evaluate.deterministic means nothing where evaluate.engine = {settings.engine}: it chooses vLLM's kernels."
        )
    return told
