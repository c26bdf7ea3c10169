"""A checkpoint folder through transformers' own loader, which by itself fills what a folder lacks with random numbers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from qrl.errors import BadInput

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_UNFIT = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    IndexError,
    ZeroDivisionError,
)  # what classes raise over a config that they cannot build


def load(path: Path, **given) -> PreTrainedModel:
    """The model of a folder that `checkpoint.check` accepts, every weight of it read from there; nothing in it is executed.

    Args:
        path: the folder.
        given: dtype, device and quantization, as `from_pretrained` takes them.

    Raises:
        BadInput: an architecture that transformers does not know, a config.json that it cannot build, or weights that do not fit it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # each architecture's class judges the file in its own way
        raise BadInput(f"{path / 'config.json'} cannot be loaded by transformers: {_reason(error)}.") from error
    told = {
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,
    }  # told by name below, where transformers prints a table
    try:
        model, read = AutoModelForCausalLM.from_pretrained(
            path, trust_remote_code=False, use_safetensors=True, **told, **given
        )
    except _UNFIT as error:
        raise BadInput(f"{path} cannot be loaded by transformers: {_reason(error)}.") from error
    for name, stored, wanted in sorted(read["mismatched_keys"]):
        raise BadInput(
            f"{path} holds {name} as {_shape(stored)}, but its config.json makes it {_shape(wanted)}: copy config.json and weights from the same model."
        )
    for name in sorted(read["missing_keys"]):
        raise BadInput(
            f"{path} lacks {name}, which would be filled with random numbers: copy or save the whole model again."
        )
    return model


def skeleton(config: dict) -> PreTrainedModel:
    """The model of a config.json, without weights.

    Raises:
        BadInput: transformers cannot build it.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), trust_remote_code=False)
    except Exception as error:  # each architecture's class judges its configuration in its own way
        raise BadInput(
            f"transformers cannot build a language model '{config.get('model_type')}' from its config.json ({_reason(error)}): give another."
        ) from None


def _reason(error: Exception) -> str:
    """The first sentence, on one line."""
    return " ".join(str(error).split()).partition(". ")[0].rstrip(".") or type(error).__name__


def _shape(size) -> str:
    return " × ".join(map(str, size)) or "a number"
