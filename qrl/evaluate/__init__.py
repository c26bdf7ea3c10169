"""Evaluation: a cell's rows, whether they are healthy, and what they score."""

from qrl.recipe import Evaluate


def unheeded(settings: Evaluate) -> list[str]:
    """Return a sentence for each setting that has no effect."""
    sentences = []
    if settings.samples == 1 and settings.temperature != Evaluate.model_fields["temperature"].default:
        sentences.append(
            f"evaluate.temperature = {settings.temperature:g} means nothing with evaluate.samples = 1: "
            "a single answer is greedy, only several are sampled."
        )
    if settings.deterministic and settings.engine != "vllm":
        sentences.append(
            f"evaluate.deterministic means nothing with evaluate.engine = {settings.engine}: it selects vLLM's kernels."
        )
    return sentences
