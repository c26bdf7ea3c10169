"""Group-wise symmetric round-to-nearest: the plainest 4-bit weights, as a proxy of how well a matrix quantizes.

Shapes: O output features, I input features, G groups of a row, S inputs in a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Error:
    """What rounding did to a matrix."""

    relative_mse: float  # mean squared error / mean squared weight; 0 is lossless
    snr_db: float  # -10 log10(relative_mse); infinite when lossless
    max_error: float  # largest |w - Q(w)|, in the unit of w


def encode(weight: Tensor, bits: int = 4, group_size: int = 128) -> tuple[Tensor, Tensor]:
    """Codes and scales of a matrix: scale = max|w| / (2^(bits-1) - 1) in each group.

    Args:
        weight: (O, I), any float dtype; computed in float32.
        bits: bits per code, 2 to 8; 4 means codes -7..7.
        group_size: S, inputs that share a scale; a ragged last group is padded with zeros.

    Returns:
        Codes (O, G, S) as int8, padding included, and scales (O, G, 1) as float32; a group of zeros has scale 0.

    Raises:
        ValueError: bits or group_size out of range, or weight not a matrix.

    Source: the W4 proxy of the seed study; AWQ's grid without its scale search (arXiv 2306.00978).
    """
    import torch

    if weight.ndim != 2 or not 2 <= bits <= 8 or group_size < 1:
        raise ValueError(f"expected a matrix, 2 to 8 bits and groups of at least 1, got {tuple(weight.shape)}, {bits}, {group_size}")
    padded = torch.nn.functional.pad(weight.float(), (0, -weight.shape[1] % group_size))
    groups = padded.reshape(weight.shape[0], -1, group_size)
    top = 2 ** (bits - 1) - 1
    scales = groups.abs().amax(-1, keepdim=True) / top
    codes = torch.round(groups / torch.where(scales == 0, 1.0, scales)).clamp_(-top, top)
    return codes.to(torch.int8), scales


def decode(codes: Tensor, scales: Tensor, in_features: int) -> Tensor:
    """The matrix (O, in_features) that codes (O, G, S) and scales (O, G, 1) stand for, float32."""
    return (codes * scales).flatten(1)[:, :in_features]


def error(weight: Tensor, bits: int = 4, group_size: int = 128) -> Error:
    """What round-to-nearest does to a matrix (O, I), which must not be all zeros.

    Raises:
        ValueError: weight is all zeros, or as `encode` says.

    Source: relative MSE and SNR as the seed study defines them.
    """
    import math

    weight = weight.float()
    power = weight.square().mean().item()
    if power == 0:
        raise ValueError("a matrix of zeros has no relative error")
    difference = weight - decode(*encode(weight, bits, group_size), weight.shape[1])
    relative = difference.square().mean().item() / power
    snr = -10 * math.log10(relative) if relative > 0 else math.inf
    return Error(relative_mse=relative, snr_db=snr, max_error=difference.abs().max().item())
