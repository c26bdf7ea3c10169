"""Group-wise symmetric round-to-nearest: the plainest 4-bit weights, as a proxy of how well a matrix quantizes.

Shapes: O output features, I input features, G groups of a row, S inputs in a group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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

    _check(weight, bits, group_size)
    groups = grouped(weight.float(), group_size)
    top = 2 ** (bits - 1) - 1
    largest = groups.abs().amax(-1, keepdim=True)
    # w · top is exact for bf16 and fp16, so a weight half-way between two codes is seen as that; by the rounded scale, chance decides
    codes = torch.round(groups * top / torch.where(largest == 0, 1.0, largest)).clamp_(-top, top)
    return codes.to(torch.int8), largest / top


def decode(codes: Tensor, scales: Tensor, in_features: int) -> Tensor:
    """The matrix (O, in_features) that codes (O, G, S) and scales (O, G, 1) stand for, float32."""
    return (codes * scales).flatten(1)[:, :in_features]


def grouped(weight: Tensor, group_size: int) -> Tensor:
    """A matrix (O, I) as its groups (O, G, S), the last one of a row padded with zeros; a view where none is ragged."""
    import torch

    ragged = -weight.shape[1] % group_size
    padded = torch.nn.functional.pad(weight, (0, ragged)) if ragged else weight
    return padded.reshape(weight.shape[0], -1, group_size)


def scan(
    groups: Tensor, largest: Tensor, bits: int = 4, least: float = 0.0, scratch: Sequence[Tensor] | None = None
) -> tuple[float, float]:
    """Squared error of rounding groups, and the largest error, without making codes.

    Args:
        groups: (O, G, S) float32.
        largest: (O, G, 1), largest |w| of each.
        bits: bits per code.
        least: an error already found elsewhere: groups that cannot exceed it are not looked at for the largest.
        scratch: two float32 tensors with as many elements, to be written over, so that no memory is asked for.

    Returns:
        Σ (w - Q(w))², summed in float64, and max |w - Q(w)|, or `least` if that is larger.
    """
    import torch

    top = 2 ** (bits - 1) - 1
    scaled, rounded = (
        each.view(groups.shape) for each in scratch or torch.empty(2, groups.numel(), device=groups.device)
    )
    torch.mul(groups, torch.where(largest == 0, 0.0, top / largest), out=scaled)
    off = torch.linalg.vector_norm(scaled.sub_(torch.round(scaled, out=rounded)), dim=-1)  # in steps of its group
    steps = largest.squeeze(-1).double() / top
    return (off * steps).square_().sum().item(), _max_error(groups, steps, top, least)


def _max_error(groups: Tensor, steps: Tensor, top: int, least: float) -> float:
    """Largest rounding error, in float64. No error exceeds half a step, so the largest step's group rules out most others."""
    found = least
    flat, steps = groups.flatten(0, 1), steps.flatten()
    widest, at = steps.max(0)
    if widest.item() <= 2 * found:
        return found
    found = max(found, _off(flat[at], widest, top))
    rest = steps > 2 * found
    return max(found, _off(flat[rest], steps[rest].unsqueeze(-1), top)) if rest.any() else found


def _off(values: Tensor, step: Tensor, top: int) -> float:
    values = values.double()
    return (values - step * (values / step).round().clamp(-top, top)).abs().max().item()


def error(weight: Tensor, bits: int = 4, group_size: int = 128) -> Error:
    """What round-to-nearest does to a matrix (O, I), which must not be all zeros.

    Raises:
        ValueError: weight is all zeros, or as `encode` says.

    Source: relative MSE and SNR as the seed study defines them.
    """
    _check(weight, bits, group_size)
    groups = grouped(weight.float(), group_size)
    power = weight.double().square().sum().item()
    if power == 0:
        raise ValueError("a matrix of zeros has no relative error")
    squared, largest = scan(groups, groups.abs().amax(-1, keepdim=True), bits)
    return Error(relative_mse=squared / power, snr_db=snr_db(squared / power), max_error=largest)


def snr_db(relative_mse: float) -> float:
    """Signal to noise in decibels: infinite where nothing was lost, NaN where there is no signal."""
    return -10 * math.log10(relative_mse) if relative_mse > 0 else (math.inf if relative_mse == 0 else math.nan)


def _check(weight: Tensor, bits: int, group_size: int) -> None:
    if weight.ndim != 2 or not 2 <= bits <= 8 or group_size < 1:
        raise ValueError(
            f"expected a matrix, 2 to 8 bits and groups of at least 1, got {tuple(weight.shape)}, {bits}, {group_size}"
        )
