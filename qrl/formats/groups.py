"""How many inputs of a linear share a scale, where a recipe chooses that: a size that divides every linear's inputs.

Read from the headers of a checkpoint, so that a cache key and a check need neither torch nor weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from qrl import checkpoint

# A recipe's group size: a number, or "auto" for the largest that fits the model.
GroupSize = int | Literal["auto"]
AUTO = "auto"
SIZES = (128, 64, 32)  # of quantize.group_size, the best known first
USUAL = SIZES[0]
# Matrices that no scheme stores in few bits: tables of embeddings and the output head, by their names in transformers.
_KEPT = re.compile(r"embed|lm_head|(^|\.)w[tp]e\.")


def widths(folder: Path | str) -> set[int]:
    """Return the numbers of inputs of a checkpoint's linears; embeddings and the output head are left out."""
    entries = checkpoint.entries(folder)
    matrices = {name: entry.shape for name, entry in entries.items() if len(entry.shape) == 2}
    return {shape[1] for name, shape in matrices.items() if name.endswith(".weight") and not _KEPT.search(name)}


def fitting(inputs: Iterable[int]) -> int | None:
    """Return the largest of `SIZES` that divides all numbers of inputs, or None."""
    common_divisor = math.gcd(*inputs)
    return next((size for size in SIZES if common_divisor % size == 0), None)


def of(folder: Path | str, setting: GroupSize) -> int:
    """Return the group size for a checkpoint: the recipe's, or under `auto` the largest that fits.

    Where none fits it is the usual one, which the check of the scheme then refuses with the layer's name.
    """
    if setting != AUTO:
        return int(setting)
    return fitting(widths(folder)) or USUAL


def stored(quantization: Mapping[str, Any] | None) -> int | None:
    """Return the group size of integer codes in a `quantization_config`; None for other codes, or one scale a row."""
    quantization = quantization or {}
    if quantization.get("quant_method") == "awq":
        return quantization.get("group_size")
    for group in (quantization.get("config_groups") or {}).values():
        weights = group.get("weights") or {}
        if weights.get("type") == "int" and weights.get("strategy") == "group":
            return weights.get("group_size")
    return None
