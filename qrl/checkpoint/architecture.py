"""Check the sizes in config.json against the tensors beside it; transformers checks the rest when it loads them."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qrl.checkpoint.header import Entry
from qrl.errors import BadInput

_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
)
_EXTRA_LAYERS = "num_nextn_predict_layers"  # they predict further tokens
# A hundred times what published models have: larger values would only fill the memory.
_BOUNDS = {
    re.compile(r"(layers?|experts|heads?|blocks|depth)$"): 10_000,  # what transformers builds one by one
    re.compile(r"(_size|_dim)$|^[nd]_"): 1 << 24,  # what it allocates by
}
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
        BadInput: `model_type` is no name, a size is not a whole number above 0, differs from the weights' or is no
            model's, or attention is to be computed by code from the hub.
    """
    model_type = settings.get("model_type")
    if not isinstance(model_type, str | None):
        raise BadInput(
            f"{file} says model_type = {model_type!r}, but a name was expected: copy it from the model again."
        )
    for key in _SIZES:
        value = settings.get(key)
        if value is not None and (type(value) is not int or value < 1):
            raise BadInput(
                f"{file} says {key} = {value!r}, but a whole number above 0 was expected: copy it from the model again."
            )
    for key, value in _flat(settings):
        bound = next((bound for pattern, bound in _BOUNDS.items() if pattern.search(key)), None)
        if bound and isinstance(value, int | float) and not value <= bound:  # NaN is refused, too
            raise BadInput(f"{file} says {key} = {value!r}, but at most {bound:,} was expected: copy it again.")
        if key.endswith(_CODE) and "/" in str(value):
            raise BadInput(f"{file} takes code from the hub ({key} = {value!r}), which is never run: delete this key.")
    extra_layers = settings.get(_EXTRA_LAYERS) or 0
    if type(extra_layers) is not int or extra_layers < 0:
        raise BadInput(
            f"{file} says {_EXTRA_LAYERS} = {extra_layers!r}, but a whole number was expected: copy it again."
        )
    for key, sizes in _stored_sizes(tensors, extra_layers).items():
        if settings.get(key) not in (None, *sizes):
            raise BadInput(
                f"{file} says {key} = {settings[key]}, but its weights have {max(sizes)}: copy config.json and weights "
                "from the same model."
            )


def _stored_sizes(tensors: Mapping[str, Entry], extra_layers: int) -> dict[str, set[int]]:
    """Return the values that config.json may have for a size, by the tensors; none for sizes that they do not show."""
    sizes: dict[str, set[int]] = {}
    embeddings = tensors.get(_EMBEDDING)
    if embeddings is not None and len(embeddings.shape) == 2:
        vocab_size, hidden_size = embeddings.shape
        sizes["vocab_size"] = {vocab_size}
        sizes["hidden_size"] = {hidden_size}
    matches = filter(None, map(_LAYER.match, tensors))
    layers = len({match[1] for match in matches})
    if layers:  # the extra ones are stored after those that num_hidden_layers counts
        sizes["num_hidden_layers"] = {layers, layers - extra_layers}
    return sizes


def _flat(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of a configuration and of those within it, such as text_config."""
    stack = [settings]
    while stack:
        for key, value in stack.pop().items():
            yield key, value
            if isinstance(value, Mapping):
                stack.append(value)
