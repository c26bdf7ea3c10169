"""A format's codes and scales for vLLM's own kernels: the tensors of a stored checkpoint, packed anew at every sync.

The engine starts as for such a checkpoint, with random codes; its first sync replaces all of them. What it computes is
not bit for bit what training simulates: `engine_gap` measures the difference. Written for vLLM 0.31.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qrl import checkpoint
from qrl.engine import pretrained
from qrl.formats import groups
from qrl.formats.fakequant import linears, rounding
from qrl.train import sharded
from qrl.train.qat.fold import folds
from qrl.train.rollout import sync

NAME = "real"  # of `rollout.quantization`
FORMATS = ("int4", "nvfp4-a16", "fp8")  # of `train.qat`
_ORDER = ("weight_shape", "weight_global_scale", "weight_scale", "weight_packed", "weight")
_PART = re.compile(r"\.weight_(shape|global_scale|scale|packed)$")


def engine_config(base: str | Path, name: str, group_size: int = groups.USUAL) -> dict[str, Any]:
    """Return a checkpoint's `quantization_config` for a base whose covered linears hold a format's codes.

    `group_size` is as for `rounding.scheme`.

    Raises:
        BadInput: as for `linears.covered`.
    """
    from compressed_tensors.quantization import QuantizationConfig

    model, scheme = pretrained.skeleton(checkpoint.config(base)), rounding.scheme(name, group_size)
    covered = linears.covered(model, name)
    others = [path for path, module in model.named_modules() if isinstance(module, nn.Linear) and path not in covered]
    stored = _format(scheme)
    scheme = scheme.model_copy(update={"format": stored})
    groups = {"config_groups": {"group_0": scheme}, "ignore": others}
    return QuantizationConfig(**groups, format=stored, quantization_status="compressed").model_dump(mode="json")


def named_codes(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a policy's stored checkpoint, one linear after the other; the model stays the same.

    Args:
        model: with a format attached.
        dtype: of weights that the format does not cover.

    Yields:
        (name, tensor): of a covered linear its codes, scales and shape as compressed-tensors stores them, else as
        `sync.named_weights`. A linear's largest tensor comes last: vLLM counts the shapes of fused linears more than
        once, and would otherwise take them for complete too early.
    """
    of_linear = {}
    for fold in folds(model):
        for path, linear in fold.members.items():
            of_linear[f"{sync.checkpoint_name(path)}.weight"] = (fold, linear)
    scaled: tuple[Any, dict[int, tuple[Tensor, Tensor]], Tensor | None] = (None, {}, None)  # of the latest fold
    for name, weight in sync.named_weights(model, dtype):
        if name not in of_linear:
            yield name, weight
            continue
        fold, linear = of_linear[name]
        if scaled[0] is not fold:
            masters = [sharded.whole(each.weight) for each in fold.members.values()]
            scales, shared, _ = rounding.scales(masters, fold.scheme.weights)
            of_member = zip(map(id, fold.members.values()), zip(masters, scales, strict=True), strict=True)
            scaled = (fold, dict(of_member), shared)
        parts = _compressed(*scaled[1][id(linear)], fold.scheme, scaled[2])
        for part in _ORDER:
            if part in parts:
                yield f"{name.removesuffix('.weight')}.{part}", parts[part]


def plain_name(name: str) -> str:
    """Return the name of the weight that a tensor is a part of, as an unquantized checkpoint has it."""
    return _PART.sub(".weight", name)


def _compressed(weight: Tensor, scale: Tensor, scheme, shared: Tensor | None) -> dict[str, Tensor]:
    """Return the stored tensors of a matrix (O, I), by their last name."""
    from compressed_tensors.compressors import BaseCompressor

    given = {"weight": weight, "weight_scale": scale}
    if shared is not None:
        given["weight_global_scale"] = shared
    with torch.no_grad():
        return BaseCompressor.get_value_from_registry(_format(scheme)).compress(given, scheme)


def _format(scheme) -> str:
    """Return compressed-tensors' name of the layout in which it stores a scheme."""
    from compressed_tensors.compressors.format import infer_module_format

    return infer_module_format(nn.Linear, scheme).value
