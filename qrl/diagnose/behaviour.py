"""What quantization does to what a model says: next-token distributions, position by position, against full precision.

Both models read the same held-out texts, question and worked solution, and nothing is sampled. At a position with next-token
distributions p (full precision) and q (quantized): KL(p ‖ q) = Σ p ln(p / q) in nats, 0 where they agree, and whether their likeliest
tokens are the same. Positions of one text depend on each other, so standard errors are those of a ratio over texts, not over positions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qrl.formats import rtn

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

LAYER = re.compile(r"layers\.(\d+)\.")
POSITIONS = 2048  # looked at together, at most, so that logits fit into memory


@dataclass(frozen=True)
class Behaviour:
    """How far a model's next-token distributions are from another's."""

    kl: float  # nats a token, mean over positions
    kl_stderr: float
    top1_agreement: float  # share of positions
    top1_agreement_stderr: float
    n: int  # texts
    positions: int


def against(full: PreTrainedModel, quantized: PreTrainedModel, texts: Sequence[Sequence[int]]) -> Behaviour:
    """A quantized model against its full-precision one, both in memory, a batch of logits at a time.

    Args:
        full, quantized: causal language models with one vocabulary.
        texts: two lists of token ids at least.

    Raises:
        ValueError: fewer than two texts, of which no standard error can be told.
    """
    return _summed(
        [row for batch in _batches(texts) for row in _sums(_log_probabilities(full, batch), quantized, batch)]
    )


def sensitivity(
    model: PreTrainedModel,
    texts: Sequence[Sequence[int]],
    *,
    bits: int = 4,
    group_size: int = 128,
    progress: Callable[[int], object] = lambda n: None,
) -> dict[int, Behaviour]:
    """Behaviour with the linears of one layer rounded to nearest and all others left alone, by layer.

    Args:
        model: in full precision; it is as it was afterwards.
        texts: as in `against`.
        bits, group_size: of the rounding.
        progress: called with 1 after each layer and batch.
    """
    import torch

    layers: dict[int, list] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and (found := LAYER.search(name)):
            layers.setdefault(int(found[1]), []).append(module)
    rows: dict[int, list] = {layer: [] for layer in sorted(layers)}
    for batch in _batches(texts):
        full = _log_probabilities(model, batch)
        for layer, found in rows.items():
            with _rounded(layers[layer], bits, group_size):
                found.extend(_sums(full, model, batch))
            progress(1)
    return {layer: _summed(found) for layer, found in rows.items()}


@contextmanager
def _rounded(modules: list, bits: int, group_size: int) -> Iterator[None]:
    """These linears with rounded weights, for a while."""
    kept = [module.weight.data for module in modules]
    try:
        for module, weight in zip(modules, kept, strict=True):
            module.weight.data = rtn.decode(*rtn.encode(weight, bits, group_size), weight.shape[1]).to(weight)
        yield
    finally:
        for module, weight in zip(modules, kept, strict=True):
            module.weight.data = weight


def _batches(texts: Sequence[Sequence[int]]) -> Iterator[Sequence[Sequence[int]]]:
    """Texts in order, so many at a time that their logits fit into memory."""
    at = 0
    while at < len(texts):
        batch = texts[at : at + max(1, POSITIONS // max(map(len, texts[at : at + 64])))][:64]
        yield batch
        at += len(batch)


def _log_probabilities(model: PreTrainedModel, batch: Sequence[Sequence[int]]) -> list[Tensor]:
    """(T, V) float32 for each text. Texts are padded on the right, where causal attention does not look."""
    import torch

    width = max(map(len, batch))
    ids = torch.tensor([[*text, *[0] * (width - len(text))] for text in batch], device=model.device)
    mask = torch.tensor([[1] * len(text) + [0] * (width - len(text)) for text in batch], device=model.device)
    with torch.inference_mode():
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return [row[: len(text)].float().log_softmax(-1) for row, text in zip(logits, batch, strict=True)]


def _sums(
    full: list[Tensor], quantized: PreTrainedModel, batch: Sequence[Sequence[int]]
) -> list[tuple[float, int, int]]:
    """Of each text: its divergence summed over positions, positions with one likeliest token, positions."""
    import torch

    found = []
    for p, q in zip(full, _log_probabilities(quantized, batch), strict=True):
        divergence = torch.nn.functional.kl_div(
            q.double(), p.to(q.device).double(), reduction="sum", log_target=True
        ).item()
        found.append((divergence, int((p.to(q.device).argmax(-1) == q.argmax(-1)).sum()), len(q)))
    return found


def _summed(rows: list[tuple[float, int, int]]) -> Behaviour:
    if len(rows) < 2:
        raise ValueError(f"got {len(rows)} texts, but two are needed for a standard error")
    kl, agreement = (_ratio([row[i] for row in rows], [row[2] for row in rows]) for i in (0, 1))
    return Behaviour(*kl, *agreement, len(rows), sum(row[2] for row in rows))


def _ratio(sums: list[float], sizes: list[int]) -> tuple[float, float]:
    """Mean over positions and its standard error over texts. Source: Cochran, Sampling Techniques, 3rd ed., equation 6.13."""
    n, mean = len(sums), sum(sums) / sum(sizes)
    spread = sum((part - mean * size) ** 2 for part, size in zip(sums, sizes, strict=True)) / (n - 1)
    return mean, math.sqrt(spread / n) / (sum(sizes) / n)
