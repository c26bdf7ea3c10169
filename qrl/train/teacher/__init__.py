"""The teacher of a distillation: where its weights are, and what it returns for the tokens that a student sampled."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor, nn


class Likeliest(NamedTuple):
    """The teacher's likeliest tokens at N positions."""

    scores: Tensor  # (N, K) float32, logits or log-probabilities over the temperature: they differ by a constant
    tokens: Tensor  # (N, K) int64


class Teacher(Protocol):
    """Scores the tokens of one micro-batch; all processes call it equally often."""

    def __call__(self, score: Callable[[nn.Module], Tensor], ids: Tensor, mask: Tensor, valid: Tensor) -> Likeliest:
        """Return the likeliest tokens at the N positions where `valid` is true, row by row.

        Args:
            score: returns a model's logits at these positions, (N, V).
            ids: (B, P + C), prompts padded on the left, completions on the right.
            mask: (B, P + C), 0 where a token is padding.
            valid: (B, C), whether the completion's token counts.
        """
        ...
