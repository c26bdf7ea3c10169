"""How quantization moves next-token distributions, position by position, against full precision.

Both models read the same held-out texts, question and worked solution, and nothing is sampled. At a position with
next-token distributions p (full precision) and q (quantized), KL(p ‖ q) = Σ p ln(p / q) in nats, 0 where they agree;
top-1 agreement is whether their likeliest tokens are the same. Positions of one text depend on each other, so standard
errors are those of a ratio over texts, not over positions.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from qrl.diagnose.weights import tensor_labels
from qrl.formats import proxy
from qrl.recipe.sections import Diagnose

POSITIONS = 2048  # at most, in one batch, so that logits fit into memory
MOST_TEXTS = 64  # in one batch
Texts = Sequence[Sequence[int]]  # token ids
Sums = tuple[float, int, int]  # of one text: summed divergence, positions with the same top token, positions


@dataclass(frozen=True)
class Behaviour:
    """The distance of a model's next-token distributions from another's."""

    kl: float  # nats per token, mean over positions
    kl_stderr: float
    top1_agreement: float  # share of positions
    top1_agreement_stderr: float
    n: int  # texts
    positions: int


def against(full: PreTrainedModel, quantized: PreTrainedModel, texts: Texts) -> Behaviour:
    """Compare a quantized model with its full-precision one, both in memory, a batch of logits at a time.

    Args:
        full, quantized: causal language models with one vocabulary.
        texts: two lists of token ids at least.

    Raises:
        ValueError: there are fewer than two texts, so that there is no standard error.
    """
    of_texts: list[Sums] = []
    for batch in _batches(texts):
        of_texts += _compare(_log_probabilities(full, batch), quantized, batch)
    return _summary(of_texts)


def sensitivity(model: PreTrainedModel, texts: Texts, settings: Diagnose = Diagnose()) -> dict[int, Behaviour]:
    """Return by layer what rounding the linears of that layer alone does.

    Args:
        model: in full precision; its weights are restored afterwards.
        texts: as in `against`.
        settings: bits and group size of the rounding.
    """
    layers: dict[int, list] = {}
    for name, module in model.named_modules():
        layer = tensor_labels(name)["layer"]
        if isinstance(module, torch.nn.Linear) and layer >= 0:
            layers.setdefault(layer, []).append(module)
    sums: dict[int, list[Sums]] = {layer: [] for layer in sorted(layers)}
    # Batches outside, layers inside: logits at full precision are computed once, and only one batch of them is kept.
    for batch in _batches(texts):
        full = _log_probabilities(model, batch)
        for layer, of_texts in sums.items():
            with _rounded(layers[layer], settings):
                of_texts.extend(_compare(full, model, batch))
    return {layer: _summary(of_texts) for layer, of_texts in sums.items()}


@contextmanager
def _rounded(modules: list, settings: Diagnose) -> Iterator[None]:
    """Round the weights of linears within the `with` block."""
    originals = [module.weight.data for module in modules]
    try:
        for module, weight in zip(modules, originals, strict=True):
            coded = proxy.encode(weight, settings.bits, settings.group_size)
            module.weight.data = proxy.decode(*coded, weight.shape[1]).to(weight)
        yield
    finally:
        for module, weight in zip(modules, originals, strict=True):
            module.weight.data = weight


def _batches(texts: Texts) -> Iterator[Texts]:
    """Yield the texts in order, as many at a time as have logits that fit into memory."""
    first = 0
    while first < len(texts):
        candidates = texts[first : first + MOST_TEXTS]
        longest = max(map(len, candidates))
        batch = candidates[: max(1, POSITIONS // longest)]
        yield batch
        first += len(batch)


def _log_probabilities(model: PreTrainedModel, batch: Texts) -> list[Tensor]:
    """Return (T, V) float32 for each text. Texts are padded on the right, which causal attention does not see."""
    width = max(map(len, batch))
    ids = torch.tensor([[*text, *[0] * (width - len(text))] for text in batch], device=model.device)
    mask = torch.tensor([[1] * len(text) + [0] * (width - len(text)) for text in batch], device=model.device)
    with torch.inference_mode():
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return [row[: len(text)].float().log_softmax(-1) for row, text in zip(logits, batch, strict=True)]


def _compare(full: list[Tensor], quantized: PreTrainedModel, batch: Texts) -> Iterator[Sums]:
    """Yield the sums of each text, given its log-probabilities at full precision."""
    for full_row, q in zip(full, _log_probabilities(quantized, batch), strict=True):
        p = full_row.to(quantized.device)
        divergence = torch.nn.functional.kl_div(q.double(), p.double(), reduction="sum", log_target=True).item()
        yield divergence, int((p.argmax(-1) == q.argmax(-1)).sum()), len(q)


def _summary(rows: list[Sums]) -> Behaviour:
    if len(rows) < 2:
        raise ValueError(f"A standard error needs two texts, but there are {len(rows)}.")
    divergences, agreements, positions = (list(column) for column in zip(*rows, strict=True))
    kl, kl_stderr = _ratio(divergences, positions)
    agreement, agreement_stderr = _ratio(agreements, positions)
    return Behaviour(kl, kl_stderr, agreement, agreement_stderr, len(rows), sum(positions))


def _ratio(sums: list[float], sizes: list[int]) -> tuple[float, float]:
    """Return the mean over positions and its standard error over texts.

    Source: Cochran, Sampling Techniques, 3rd ed., equation 6.13.
    """
    n = len(sums)
    mean = sum(sums) / sum(sizes)
    variance = sum((text_sum - mean * size) ** 2 for text_sum, size in zip(sums, sizes, strict=True)) / (n - 1)
    return mean, math.sqrt(variance / n) / (sum(sizes) / n)
