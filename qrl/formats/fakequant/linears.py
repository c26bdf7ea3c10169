"""Which linears of a model a format covers, and the calibrated scales that lie beside its masters.

Training and storing ask here, so that what is trained in few bits is what is stored in them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from qrl.checkpoint import SCALES
from qrl.errors import BadInput
from qrl.formats.fakequant import values

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def covered(model: PreTrainedModel, name: str) -> dict[str, nn.Linear]:
    """The linears that a format quantizes, by their name in the model; never the output head.

    Raises:
        BadInput: mixture of experts, a state-space model, or weights that are in no `nn.Linear`.
    """
    from torch import nn

    check_architecture(model)
    heads = {id(model.get_output_embeddings())}
    found = {
        path: each for path, each in model.named_modules() if isinstance(each, nn.Linear) and id(each) not in heads
    }
    if name.endswith("-attention"):
        owner = {path: type(model.get_submodule(path.rpartition(".")[0])).__name__ for path in found}
        found = {path: each for path, each in found.items() if "attention" in owner[path].lower()}
    if not found:
        raise BadInput(f"The model has no linear layer that {name} covers: expected a transformer language model.")
    return found


def check_fit(model: PreTrainedModel, name: str) -> None:
    """Refuses a model, with or without weights, that a format cannot hold; raises as `covered` does, and where groups do not divide a linear's inputs."""
    scheme = values.scheme(name)
    for path, linear in covered(model, name).items():
        values.check_width(path, linear.in_features, scheme.weights)


def check_architecture(model: PreTrainedModel, *, transposed: bool = False) -> None:
    """Refuses mixtures of experts, state-space models, and whatever keeps its matrices elsewhere than in `nn.Linear`.

    Args:
        model: with or without weights.
        transposed: GPT-2's `Conv1D` may hold them, too: bitsandbytes knows it.

    Raises:
        BadInput: what it is.
    """
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    held = (nn.Linear, nn.Embedding, *((Conv1D,) if transposed else ()))

    kind = model.config.model_type
    if any(getattr(model.config, key, None) for key in _EXPERTS):
        raise BadInput(
            f"{kind} is a mixture of experts, whose matrices neither training nor storing in few bits covers here: use a dense model."
        )
    names = {type(module).__name__.lower() for module in model.modules()}
    if any("mamba" in each or "ssm" in each for each in names):
        raise BadInput(
            f"{kind} has Mamba layers, which neither training nor storing in few bits covers here: use a transformer."
        )
    for path, module in model.named_modules():
        matrices = [name for name, weight in module.named_parameters(recurse=False) if weight.ndim > 1]
        if matrices and not isinstance(module, held):
            raise BadInput(
                f"{path}.{matrices[0]} of {kind} lies in a {type(module).__name__}, not in a Linear, and would stay in full "
                "precision unseen: use a dense transformer."
            )


def needs_calibration(name: str) -> bool:
    """Whether a format scales activations by something that texts have to tell."""
    args = values.scheme(name).input_activations
    return args is not None and args.dynamic == "local"


def write_activation_scales(folder: Path, found: dict[str, float]) -> None:
    """Keeps scales, as compressed-tensors stores them, beside a checkpoint; read back bit for bit. They appear whole, for a training may be killed at any moment."""
    partial = folder / f"{SCALES}.partial"
    partial.write_text(json.dumps(found, indent=1) + "\n")
    partial.replace(folder / SCALES)


def read_activation_scales(folder: Path) -> dict[str, float] | None:
    """Scales that were kept in a folder, or None."""
    file = folder / SCALES
    return json.loads(file.read_text()) if file.is_file() else None
