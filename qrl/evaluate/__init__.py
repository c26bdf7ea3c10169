"""Evaluation: a cell's rows, whether they are healthy, and what they score."""

from qrl.recipe import Evaluate


def unheeded(settings: Evaluate) -> list[str]:
    """Return a sentence for each setting that has no effect."""
    sentences = []
    if settings.samples == 1 and settings.temperature != Evaluate.model_fields["temperature"].default:
        what = f"evaluate.temperature = {settings.temperature:g} means nothing with evaluate.samples = 1"
        sentences.append(f"{what}: a single answer is greedy, only several are sampled.")
    if settings.deterministic and settings.engine != "vllm":
        what = f"evaluate.deterministic means nothing with evaluate.engine = {settings.engine}"
        sentences.append(f"{what}: it selects vLLM's kernels.")
    return sentences
