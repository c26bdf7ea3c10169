"""Group-wise symmetric round-to-nearest: the plainest 4-bit weights, a proxy for how well a matrix quantizes.

Shapes: O output features, I input features, G groups in a row, S inputs in a group.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def encode(weight: Tensor, bits: int = 4, group_size: int = 128) -> tuple[Tensor, Tensor]:
    """Return a matrix's codes and scales, with scale = max|w| / (2^(bits-1) - 1) in each group.

    Args:
        weight: (O, I), any float dtype; computed in float32.
        bits: bits per code, 2 to 8; 4 means codes -7..7.
        group_size: S, inputs that share a scale; a ragged last group is padded with zeros.

    Returns:
        Codes (O, G, S) as int8, padding included, and scales (O, G, 1) as float32; a group of zeros has scale 0.

    Raises:
        ValueError: bits or group_size is out of range, or weight is not a matrix.

    Source: the W4 proxy of study 000; AWQ's grid without its scale search (arXiv 2306.00978).
    """
    if weight.ndim != 2 or not 2 <= bits <= 8 or group_size < 1:
        raise ValueError(
            f"expected a matrix, 2 to 8 bits and groups of at least 1, got {tuple(weight.shape)}, {bits}, {group_size}"
        )
    groups = grouped(weight.float(), group_size)
    top = 2 ** (bits - 1) - 1
    largest = groups.abs().amax(-1, keepdim=True)
    # w · top is exact for bf16 and fp16, so a weight half-way between two codes is recognized; w / scale, with its
    # rounded scale, would send it to either code by chance.
    codes = torch.round(groups * top / torch.where(largest == 0, 1.0, largest)).clamp_(-top, top)
    return codes.to(torch.int8), largest / top


def decode(codes: Tensor, scales: Tensor, in_features: int) -> Tensor:
    """Return the matrix (O, in_features), float32, of codes (O, G, S) and scales (O, G, 1)."""
    return (codes * scales).flatten(1)[:, :in_features]


def grouped(weight: Tensor, group_size: int) -> Tensor:
    """Return a matrix (O, I) as groups (O, G, S); a ragged last group is padded with zeros, otherwise it is a view."""
    ragged = -weight.shape[1] % group_size
    padded = torch.nn.functional.pad(weight, (0, ragged)) if ragged else weight
    return padded.reshape(weight.shape[0], -1, group_size)


def scan(
    groups: Tensor, largest: Tensor, bits: int = 4, known_error: float = 0.0, scratch: Sequence[Tensor] | None = None
) -> tuple[float, float]:
    """Return the squared error and the largest error of rounding groups, without making codes.

    Args:
        groups: (O, G, S) float32.
        largest: (O, G, 1), largest |w| of each.
        bits: bits per code.
        known_error: an error found elsewhere: groups that cannot exceed it are skipped in the search for the largest.
        scratch: two float32 tensors with as many elements, which are overwritten instead of allocating memory.

    Returns:
        Σ (w - Q(w))², summed in float64, and max |w - Q(w)|, or `known_error` if that is larger.
    """
    top = 2 ** (bits - 1) - 1
    buffers = scratch or torch.empty(2, groups.numel(), device=groups.device)
    scaled = buffers[0].view(groups.shape)
    rounded = buffers[1].view(groups.shape)
    torch.mul(groups, torch.where(largest == 0, 0.0, top / largest), out=scaled)
    distances = torch.linalg.vector_norm(scaled.sub_(torch.round(scaled, out=rounded)), dim=-1)  # in steps of its group
    steps = largest.squeeze(-1).double() / top
    return (distances * steps).square_().sum().item(), _max_error(groups, steps, top, known_error)


def _max_error(groups: Tensor, steps: Tensor, top: int, known_error: float) -> float:
    """Return the largest rounding error, in float64.

    No error exceeds half a step, so the error in the group with the largest step rules out most other groups.
    """
    flat_groups = groups.flatten(0, 1)
    steps = steps.flatten()
    largest_step, index = steps.max(0)
    if largest_step.item() <= 2 * known_error:
        return known_error
    largest_error = max(known_error, _rounding_error(flat_groups[index], largest_step, top))
    candidates = steps > 2 * largest_error
    if not candidates.any():
        return largest_error
    return max(largest_error, _rounding_error(flat_groups[candidates], steps[candidates].unsqueeze(-1), top))


def _rounding_error(values: Tensor, step: Tensor, top: int) -> float:
    values = values.double()
    return (values - step * (values / step).round().clamp(-top, top)).abs().max().item()


def snr_db(relative_mse: float) -> float:
    """Return the signal-to-noise ratio in decibels: infinite if nothing was lost, NaN if there is no signal.

    Args:
        relative_mse: mean squared error / mean squared weight.

    Source: relative MSE and SNR as study 000 defines them.
    """
    if relative_mse > 0:
        return -10 * math.log10(relative_mse)
    return math.inf if relative_mse == 0 else math.nan
