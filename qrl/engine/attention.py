"""Grouped-query attention for decoding on a CPU, without copying the key-value cache.

PyTorch's CPU kernel needs as many key heads as query heads, so transformers repeats the whole cache for every token and
layer, which is the largest single cost of decoding a small model. With one query token per head, the query heads of a
group can take the place of query tokens instead: nothing is copied, and the sum is the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "sdpa_grouped"


def use_grouped(model: PreTrainedModel) -> None:
    """Let a model on a CPU decode without copying its cache, if its attention is transformers' own `sdpa`.

    Prompts and training keep that attention.
    """
    if model.config._attn_implementation != "sdpa":
        return
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)


def _attend(module, query, key, value, attention_mask, **options):
    """Attend by transformers' signature: query (B, H, L, D), key and value (B, G, S, D) → (B, L, H, D) and no weights.

    G divides H; decoding has L = 1. The mask is (B, 1, L, S), or None.
    """
    from torch.nn.functional import scaled_dot_product_attention
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    batch, heads, length, size = query.shape
    if length != 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    grouped = query.reshape(batch, key.shape[1], -1, size)
    dropout = options.get("dropout", 0.0)
    scale = options.get("scaling")
    attended = scaled_dot_product_attention(grouped, key, value, attention_mask, dropout, scale=scale)
    return attended.reshape(batch, 1, heads, size), None
