"""Which linears of a model a format covers, and the file of calibrated activation scales next to its masters.

Training and storing use the same answer, so that what is trained in few bits is stored in few bits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from qrl.checkpoint import SCALES
from qrl.errors import BadInput
from qrl.formats import groups
from qrl.formats.fakequant import rounding
from qrl.workspace import write_atomically

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationScheme
    from torch import nn
    from transformers import PreTrainedModel

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def covered(model: PreTrainedModel, name: str) -> dict[str, nn.Linear]:
    """Return the linears that a format quantizes, by their name in the model; never the output head.

    Raises:
        BadInput: as for `check_architecture`, or the format covers no linear.
    """
    from torch import nn

    check_architecture(model)
    head = model.get_output_embeddings()
    attention_only = name.endswith("-attention")
    linears = {}
    for path, module in model.named_modules():
        owner = type(model.get_submodule(path.rpartition(".")[0])).__name__
        in_scope = not attention_only or "attention" in owner.lower()
        if isinstance(module, nn.Linear) and module is not head and in_scope:
            linears[path] = module
    if not linears:
        raise BadInput(f"The model has no linear layer that {name} covers: expected a transformer language model.")
    return linears


def check_fit(model: PreTrainedModel, name: str, group_size: int = groups.USUAL) -> None:
    """Check that a format can hold a model, with or without weights; `group_size` is as for `rounding.scheme`.

    Raises:
        BadInput: as for `covered`, or groups do not divide a linear's inputs.
    """
    check_widths(covered(model, name), name, group_size)


def check_widths(linear_of: Mapping[str, nn.Linear], name: str, group_size: int = groups.USUAL) -> None:
    """Raise BadInput where groups of a format do not divide a linear's inputs, or blocks its matrix; by path."""
    weights = rounding.scheme(name, group_size).weights
    for path, linear in linear_of.items():
        rounding.check_width(path, linear, weights)


def check_architecture(model: PreTrainedModel, *, transposed: bool = False) -> None:
    """Check that every matrix of a model is in an `nn.Linear`, an embedding or, if `transposed`, in GPT-2's `Conv1D`.

    Raises:
        BadInput: the model is a mixture of experts, has Mamba layers, or keeps a matrix elsewhere.
    """
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    model_type = model.config.model_type
    class_names = {type(module).__name__.lower() for module in model.modules()}
    problem = ""
    if any(getattr(model.config, key, None) for key in _EXPERTS):
        problem = "is a mixture of experts"
    elif any("mamba" in name or "ssm" in name for name in class_names):
        problem = "has Mamba layers"
    if problem:
        raise BadInput(
            f"{model_type} {problem}, which neither training nor storing in few bits supports here: use a dense "
            "transformer."
        )

    supported_classes = (nn.Linear, nn.Embedding, Conv1D) if transposed else (nn.Linear, nn.Embedding)
    for path, module in model.named_modules():
        matrices = [name for name, weight in module.named_parameters(recurse=False) if weight.ndim > 1]
        if matrices and not isinstance(module, supported_classes):
            raise BadInput(
                f"{path}.{matrices[0]} of {model_type} is in a {type(module).__name__}, not in a Linear, and would "
                "silently stay in full precision: use a dense transformer."
            )


def needs_calibration(name: str) -> bool:
    """Return whether a format scales activations by something that has to be calibrated on texts."""
    return rounding.is_calibrated(rounding.scheme(name).input_activations)


def stored_scale(scheme: QuantizationScheme) -> str:
    """Return the name under which compressed-tensors stores the calibrated scale of a linear's inputs."""
    return "input_scale" if rounding.is_static(scheme.input_activations) else "input_global_scale"


def write_activation_scales(folder: Path, scales: dict[str, float]) -> None:
    """Write scales, as compressed-tensors stores them, into a checkpoint's folder; they are read back bit for bit."""
    with write_atomically(folder / SCALES) as file:
        file.write_text(json.dumps(scales, indent=1) + "\n")


def read_activation_scales(folder: Path) -> dict[str, float] | None:
    """Return the scales of a folder, or None."""
    file = folder / SCALES
    return json.loads(file.read_text()) if file.is_file() else None
