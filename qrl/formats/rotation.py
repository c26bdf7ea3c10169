"""SpinQuant's rotations, undone: rotated weights become comparable with the original.

A rotation is block-diagonal; its blocks are Sylvester's Hadamard matrix over the root of its size. That is symmetric
and orthogonal, so it is its own inverse. Source: SpinQuant's R1 and R2 (arXiv 2405.16406), as compressed-tensors fuses
them into weights and records them in `transform_config`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

STREAM = "R1"  # turns what layers pass on; R2 turns each head's values


def of(quantization: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotations in a `quantization_config`, by name; empty for schemes other than spinquant."""
    return (quantization.get("transform_config") or {}).get("config_groups") or {}


def turned(values: Tensor, size: int) -> Tensor:
    """Return (…, I) with each block of `size` along the last dimension rotated; twice is once back."""
    import torch

    hadamard = torch.ones(1, 1)
    while len(hadamard) < size:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    return (values.unflatten(-1, (-1, size)) @ (hadamard / size**0.5)).flatten(-2)


def undone(values: Tensor, rotations: Mapping[str, Any], module: str) -> Tensor:
    """Return a stored matrix (O, I) as it was before these rotations."""
    for rotation in rotations.values():
        size = rotation["head_dim"]
        for side in rotation["apply"]:
            if not any(re.match(target.removeprefix("re:"), module) for target in side["targets"]):
                continue
            if side["location"] == "weight_input":
                values = turned(values, size)
            else:  # the outputs
                values = turned(values.T, size).T
    return values
