"""Attention for decoding on a CPU where several query heads share one key head (grouped-query attention).

PyTorch's kernel for CPUs wants as many key heads as query heads, so transformers copies the whole cache once per token and
layer, which is the largest single cost of decoding a small model. With one query token a head there is another way:
the query heads of a group take the place of query tokens, and nothing is copied. The result is the same sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "sdpa_grouped"


def use_grouped(model: PreTrainedModel) -> None:
    """Lets a model decode without copying its cache; prompts and training go through transformers' own `sdpa`.

    Args:
        model: on a CPU; one whose attention is not `sdpa` is left as it is.
    """
    if model.config._attn_implementation != "sdpa":
        return
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)


def _attend(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **rest):
    """Scaled dot-product attention as transformers calls it.

    Args:
        query: (B, H, L, D); decoding has L = 1.
        key, value: (B, G, S, D), where G divides H.
        attention_mask: (B, 1, L, S), or None.

    Returns:
        (B, L, H, D), and None in place of weights.
    """
    from torch.nn.functional import scaled_dot_product_attention
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    batch, heads, length, size = query.shape
    if length != 1:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **rest
        )
    grouped = query.reshape(batch, key.shape[1], -1, size)
    attended = scaled_dot_product_attention(
        grouped, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
    )
    return attended.reshape(batch, 1, heads, size), None
