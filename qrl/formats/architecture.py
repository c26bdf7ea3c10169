"""Check the sizes in config.json against the tensors beside it; transformers checks the rest when it loads them."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qrl.errors import BadInput
from qrl.formats.header import Entry

_EMBEDDING_SIZES = ("vocab_size", "hidden_size")
_SIZES = (*_EMBEDDING_SIZES, "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_EXTRA_LAYERS = "num_nextn_predict_layers"  # they predict further tokens
# What transformers builds one by one, and what it allocates by: a hundred times what published models have.
_BOUNDS = {re.compile(r"(layers?|experts|heads?|blocks|depth)$"): 10_000, re.compile(r"(_size|_dim)$|^[nd]_"): 1 << 24}
_CODE = "_implementation"  # of attention and experts: a name with a slash is a kernel on the hub, which is code
_EMBEDDING = "model.embed_tokens.weight"  # in nearly all decoders that transformers knows
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def check(file: Path, settings: Mapping[str, Any], tensors: Mapping[str, Entry]) -> None:
    """Check sizes that transformers would otherwise ignore or fill with random numbers.

    Args:
        file: config.json, for the error.
        settings: its content; sizes that it does not name are not checked.
        tensors: of the checkpoint, by name.

    Raises:
        BadInput: a size is not a whole number above 0, differs from the weights' or is no model's, or attention is to
            be computed by code from the hub.
    """
    for key in _SIZES:
        value = settings.get(key)
        if value is not None and (type(value) is not int or value < 1):
            expected = "a whole number above 0 was expected"
            raise BadInput(f"{file} says {key} = {value!r}, but {expected}: copy it from the model again.")
    for key, value in _flat(settings):
        most = next((most for name, most in _BOUNDS.items() if name.search(key)), None)
        if most and isinstance(value, int | float) and not value <= most:
            raise BadInput(f"{file} says {key} = {value!r}, but at most {most:,} was expected: copy it again.")
        if key.endswith(_CODE) and "/" in str(value):
            raise BadInput(f"{file} takes code from the hub ({key} = {value!r}), which is never run: delete this key.")
    extra = settings.get(_EXTRA_LAYERS) or 0
    if type(extra) is not int or extra < 0:
        raise BadInput(f"{file} says {_EXTRA_LAYERS} = {extra!r}, but a whole number was expected: copy it again.")
    actual: dict[str, set[int]] = {}
    if (table := tensors.get(_EMBEDDING)) is not None and len(table.shape) == 2:
        actual = {key: {size} for key, size in zip(_EMBEDDING_SIZES, table.shape, strict=True)}
    layers = len({match[1] for name in tensors if (match := _LAYER.match(name))})
    if layers:  # the extra ones are stored after those that num_hidden_layers counts
        actual["num_hidden_layers"] = {layers, layers - extra}
    for key, sizes in actual.items():
        if settings.get(key) not in (None, *sizes):
            contradiction = f"{file} says {key} = {settings[key]}, but its weights have {max(sizes)}"
            raise BadInput(f"{contradiction}: copy config.json and weights from the same model.")


def _flat(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of a configuration and of those within it, such as text_config."""
    left = [settings]
    while left:
        for key, value in left.pop().items():
            yield key, value
            left += [value] if isinstance(value, Mapping) else []
