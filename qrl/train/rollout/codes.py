"""A format's codes and scales for vLLM's own kernels: the tensors of a stored checkpoint, packed anew at every sync.

With `rollout.quantization = real` the engine does not simulate the format of training, but runs it: it is created as
for a stored checkpoint of that format (`engine_config`), starts with random codes, and gets the present ones at every
sync (`named_codes`). What it computes is not bit for bit what training simulates: `engine_gap` measures the
difference. Written for vLLM 0.31.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qrl import checkpoint
from qrl.engine import pretrained
from qrl.formats import groups, layers
from qrl.formats.fakequant import rounding
from qrl.train import sharded
from qrl.train.qat.fold import folds
from qrl.train.rollout import sync

NAME = "real"  # of `rollout.quantization`
_ORDER = ("weight_shape", "weight_global_scale", "weight_scale", "weight_packed", "weight")
_PART = re.compile(r"\.weight_(shape|global_scale|scale|packed)$")


def engine_config(
    base: str | Path, name: str, group_size: int = groups.USUAL, terms: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the `quantization_config` of a checkpoint that stores a base's covered linears as a format's codes.

    `group_size` is as for `rounding.scheme`, `terms` are those of `train.qat_layers`.

    Raises:
        BadInput: as for `layers.plan_of`.
    """
    from compressed_tensors.quantization import QuantizationConfig

    model = pretrained.skeleton(checkpoint.config(base))
    plan = layers.plan_of(model, name, terms, "train.qat_layers")
    linear_paths = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    config_groups = {}
    for number, (format_name, paths) in enumerate(plan.by_format.items()):
        scheme = rounding.scheme(format_name, group_size)
        targets = paths if terms else scheme.targets
        config_groups[f"group_{number}"] = scheme.model_copy(update={"format": _layout(scheme), "targets": targets})
    layouts = {scheme.format for scheme in config_groups.values()}
    config = QuantizationConfig(
        config_groups=config_groups,
        ignore=[path for path in linear_paths if path not in plan.formats],
        format=layouts.pop() if len(layouts) == 1 else "mixed-precision",
        quantization_status="compressed",
    )
    return config.model_dump(mode="json")


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
    fold_of = {}  # name of a covered weight → its fold, and its number among the fold's members
    for fold in folds(model):
        for index, path in enumerate(fold.members):
            fold_of[f"{sync.checkpoint_name(path)}.weight"] = (fold, index)

    # The members of a fold come one after the other, so their masters and scales are kept for one fold at a time.
    latest_fold = None
    for name, weight in sync.named_weights(model, dtype):
        if name not in fold_of:
            yield name, weight
            continue
        fold, index = fold_of[name]
        if fold is not latest_fold:
            masters = [sharded.whole(linear.weight) for linear in fold.members.values()]
            scales, global_scale, _ = rounding.scales(masters, fold.scheme.weights)
            latest_fold = fold
        tensors = _compressed(masters[index], scales[index], fold.scheme, global_scale)
        for part in _ORDER:
            if part in tensors:
                yield f"{name.removesuffix('.weight')}.{part}", tensors[part]


def plain_name(name: str) -> str:
    """Return the name of the weight that a tensor is a part of, as an unquantized checkpoint has it."""
    return _PART.sub(".weight", name)


def _compressed(weight: Tensor, scale: Tensor, scheme, global_scale: Tensor | None) -> dict[str, Tensor]:
    """Return the stored tensors of a matrix (O, I), by their last name."""
    from compressed_tensors.compressors import BaseCompressor

    state = {"weight": weight, "weight_scale": scale}
    if global_scale is not None:
        state["weight_global_scale"] = global_scale
    with torch.no_grad():
        return BaseCompressor.get_value_from_registry(_layout(scheme)).compress(state, scheme)


def _layout(scheme) -> str:
    """Return compressed-tensors' name of the layout in which it stores a scheme."""
    from compressed_tensors.compressors.format import infer_module_format

    return infer_module_format(nn.Linear, scheme).value
