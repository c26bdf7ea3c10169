"""Check the sizes in config.json against the tensors beside it; transformers checks the rest when it loads them."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qrl.errors import BadInput
from qrl.formats.header import Entry

_EMBEDDING_SIZES = ("vocab_size", "hidden_size")
_SIZES = (*_EMBEDDING_SIZES, "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_EMBEDDING = "model.embed_tokens.weight"  # in nearly all decoders that transformers knows
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def check(file: Path, settings: Mapping[str, Any], tensors: Mapping[str, Entry]) -> None:
    """Check sizes that transformers would otherwise ignore or fill with random numbers.

    Args:
        file: config.json, for the error.
        settings: its content; sizes that it does not name are not checked.
        tensors: of the checkpoint, by name.

    Raises:
        BadInput: a size is not a whole number above 0, or differs from the weights'.
    """
    for key in _SIZES:
        value = settings.get(key)
        if value is not None and (type(value) is not int or value < 1):
            expected = "a whole number above 0 was expected"
            raise BadInput(f"{file} says {key} = {value!r}, but {expected}: copy it from the model again.")
    actual: dict[str, set[int]] = {}
    if (table := tensors.get(_EMBEDDING)) is not None and len(table.shape) == 2:
        actual = {key: {size} for key, size in zip(_EMBEDDING_SIZES, table.shape, strict=True)}
    layers = len({match[1] for name in tensors if (match := _LAYER.match(name))})
    if layers:  # layers that predict further tokens are stored after the ones that num_hidden_layers counts
        actual["num_hidden_layers"] = {layers, layers - (settings.get("num_nextn_predict_layers") or 0)}
    for key, sizes in actual.items():
        if settings.get(key) not in (None, *sizes):
            said = f"{file} says {key} = {settings[key]}, but its weights have {max(sizes)}"
            raise BadInput(f"{said}: copy config.json and weights from the same model.")
