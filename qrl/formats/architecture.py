"""Whether config.json describes the tensors beside it, as far as plain numbers tell; what is finer, the loader finds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qrl.errors import BadInput
from qrl.formats.header import Entry

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
_EMBEDDING = "model.embed_tokens.weight"  # of the decoders that transformers knows, nearly all
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def check(file: Path, settings: Mapping[str, Any], tensors: Mapping[str, Entry]) -> None:
    """Refuses sizes that are none, and tables or layers of another model: what transformers leaves out or fills in at random.

    Args:
        file: config.json, for the sentence.
        settings: what it holds; a size that it does not name is not looked at.
        tensors: the checkpoint's tensors by name, as their files' headers describe them.

    Raises:
        BadInput: a size is no whole number above 0, or not the one that the weights have.
    """
    for key in _SIZES:
        value = settings.get(key)
        if value is not None and (type(value) is not int or value < 1):
            raise BadInput(
                f"{file} says {key} = {value!r}, but a whole number above 0 was expected: copy it from the model again."
            )
    if (table := tensors.get(_EMBEDDING)) is not None and len(table.shape) == 2:
        for key, found in zip(("vocab_size", "hidden_size"), table.shape, strict=True):
            _same(file, key, settings.get(key), {found})
    layers = len({match[1] for name in tensors if (match := _LAYER.match(name))})
    if layers:  # layers that predict further tokens are stored behind those that count
        _same(
            file,
            "num_hidden_layers",
            settings.get("num_hidden_layers"),
            {layers, layers - (settings.get("num_nextn_predict_layers") or 0)},
        )


def _same(file: Path, key: str, said: int | None, found: set[int]) -> None:
    if said is not None and said not in found:
        raise BadInput(
            f"{file} says {key} = {said}, but its weights have {max(found)}: copy config.json and weights from the same model."
        )
