"""Check that an adapter fits its base, from its files alone.

PEFT drops what the base lacks, and raises a list of sizes where they differ. The usual case is an adapter that was
trained with a larger vocabulary than that of the base at hand.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from qrl import checkpoint
from qrl.checkpoint import head, header
from qrl.checkpoint.header import Entry
from qrl.errors import BadInput

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."  # of an adapter's tensors
_STANDARD = "model.layers."  # of the base's tensors, where adapters have the same names
# What PEFT puts between a module's name and that of its own tensor.
_WRAPPERS = (".base_layer", ".modules_to_save", ".original_module", ".token_adapter")
_LINEAR = (".lora_A", ".lora_B")
# An adapter's tensor → its axis that is as long as an axis of the base's matrix (outputs, inputs), and that axis.
_AXES = {
    ".lora_A.weight": (1, 1),
    ".lora_B.weight": (0, 0),
    ".lora_B.bias": (0, 0),
    ".lora_embedding_A": (1, 0),
    ".lora_embedding_B": (0, 1),
    ".trainable_tokens_delta": (1, 1),
}
_BASE = "Give the base that it was trained over"


def check(path: Path, base: checkpoint.Checkpoint) -> None:
    """Check that a folder is a PEFT adapter in safetensors that can be merged into this base.

    Raises:
        BadInput: a file is missing or damaged, the adapter changes no weights, its tokenizer has other tokens than the
            base's, or a tensor extends what the base lacks or has in another size; the sentence names both sizes.
    """
    settings = check_files(path)
    entry_of = checkpoint.entries(base.path)
    base_settings = checkpoint.config(base.path)
    _check_tokenizer(path, base.path)
    _check_token_indices(path, settings, head.row_count(base_settings, entry_of))
    tensors = header.read(path / WEIGHTS)
    _check_tokens_apart(path, settings, tensors, is_tied=head.is_tied(base_settings))
    for name, entry in tensors.items():
        _check_tensor(path, name, entry, base, entry_of, is_tied=head.is_tied(base_settings))


def check_files(path: Path) -> dict:
    """Return an adapter's settings; raise BadInput if a folder is no PEFT adapter in safetensors, or is damaged."""
    for name in (CONFIG, WEIGHTS):
        if not (path / name).is_file():
            raise BadInput(f"{path} is no adapter: {name} is missing; expected a PEFT folder with safetensors.")
    header.read(path / WEIGHTS)
    try:
        settings = json.loads((path / CONFIG).read_text())
    except ValueError as error:
        raise BadInput(f"{path / CONFIG} is not JSON: {error}.") from None
    if not isinstance(settings, dict):
        raise BadInput(f"{path / CONFIG} holds a JSON {type(settings).__name__}, but an object was expected.")
    if settings.get("num_virtual_tokens"):
        raise BadInput(
            f"{path} is an adapter of {settings.get('peft_type')}: it puts {settings['num_virtual_tokens']} "
            "vectors before the prompt and changes no weight, so it cannot be merged. Train a LoRA adapter instead "
            "(train.method=lora)."
        )
    return settings


def _check_tokenizer(path: Path, base: Path) -> None:
    """Raise BadInput if a tokenizer beside the adapter has tokens that the base's has not, or has under other ids."""
    tokens = checkpoint.tokens(path)
    base_tokens = checkpoint.tokens(base)
    if not tokens or not base_tokens:
        return
    others = [token for token, token_id in tokens.items() if base_tokens.get(token) != token_id]
    if not others:
        return
    token = min(others, key=lambda name: tokens[name])
    base_id = base_tokens.get(token)
    has = f"has it as {base_id}" if base_id is not None else f"has no such token among its {len(base_tokens):,}"
    raise BadInput(
        f"{path} was trained with another vocabulary than that of {base}: its tokenizer has {len(tokens):,} tokens, "
        f"'{token}' with the id {tokens[token]}, but the base's {has}. {_BASE}: the model with these tokens, resized "
        "(model.resize_token_embeddings) and saved with this tokenizer."
    )


def _check_token_indices(path: Path, settings: Mapping, rows: int | None) -> None:
    """Raise BadInput if the adapter trained single tokens (trainable_token_indices) that the base has no row for."""
    indices = settings.get("trainable_token_indices") or []
    lists = indices.values() if isinstance(indices, dict) else [indices]
    largest = max((index for ids in lists for index in ids), default=0)
    if rows is not None and largest >= rows:
        raise BadInput(
            f"{path} trained the token {largest} (trainable_token_indices), but the embedding of the base has {rows} "
            f"rows, for ids 0 to {rows - 1}. {_BASE}."
        )


def _check_tokens_apart(path: Path, settings: Mapping, tensors: Mapping[str, Entry], *, is_tied: bool) -> None:
    """Raise BadInput if LoRA extends a matrix of which single tokens are trained too: PEFT loses one of the two."""
    if not settings.get("trainable_token_indices"):
        return
    for name in tensors:
        module, kind = _parts(name)
        leaf = module.rpartition(".")[2]
        if kind.startswith(".lora") and (leaf in head.EMBEDDINGS or (leaf in head.HEADS and is_tied)):
            raise BadInput(
                f"{path} trains single tokens (trainable_token_indices) and extends {leaf}, the same matrix, by LoRA: "
                f"PEFT cannot merge both. Train it again with one of the two, such as without {leaf} in "
                "target_modules.",
                field="trainable_token_indices",
            )


def _check_tensor(
    path: Path, name: str, entry: Entry, base: checkpoint.Checkpoint, entry_of: Mapping[str, Entry], *, is_tied: bool
) -> None:
    """Raise BadInput if a tensor of the adapter does not fit the base's matrix that it extends or replaces."""
    if not name.startswith(_PREFIX) or not any(tensor.startswith(_STANDARD) for tensor in entry_of):
        return
    module, kind = _parts(name.removeprefix(_PREFIX))
    leaf = module.rpartition(".")[2]
    if leaf in head.HEADS and is_tied:  # the base stores it as the embedding
        matrix = entry_of.get(head.embedding(entry_of) or "")
    else:
        matrix = entry_of.get(f"{module}.weight")
    if matrix is None:
        if any(tensor.startswith(f"{module}.") for tensor in entry_of):
            return  # such as experts, whose matrices are parameters of one module
        if _extends(module.rpartition(".")[0], entry_of, is_tied=is_tied):
            return  # a module of PEFT's own within one of the base, such as `q_proj.oft_R`
        raise BadInput(
            f"{path} was trained over another model than {base.path}: it extends {module}, which that model lacks. "
            f"{_BASE}."
        )
    if kind == ".lora_B.bias" and f"{module}.bias" not in entry_of:
        raise BadInput(
            f"{path} has a bias for {module} (lora_bias), but that linear of {base.path} has none to merge it into. "
            "Train it again with lora_bias = false.",
            field="lora_bias",
        )
    fits, size, base_size = _sizes(kind, entry, matrix)
    if fits:
        return
    if leaf in (*head.HEADS, *head.EMBEDDINGS):
        raise BadInput(
            f"{path} was trained with another vocabulary than that of {base.path}: its {leaf} has {size}, but the "
            f"base's has {base_size}. {_BASE}: the model resized (model.resize_token_embeddings) and saved with the "
            "adapter's tokenizer."
        )
    raise BadInput(
        f"{path} was trained over another model than {base.path}: its {module} has {size}, but that model's has "
        f"{base_size}. {_BASE}."
    )


def _extends(module: str, entry_of: Mapping[str, Entry], *, is_tied: bool) -> bool:
    """Return whether a module of the base has a weight of its own; a tied head has that of the embedding."""
    return f"{module}.weight" in entry_of or (is_tied and module.rpartition(".")[2] in head.HEADS)


def _parts(name: str) -> tuple[str, str]:
    """Return the base's module of an adapter's tensor, and the rest of the tensor's name, such as `.lora_A.weight`."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    for kind in _AXES:
        if name.endswith(kind):
            return name.removesuffix(kind), kind
    module, _, parameter = name.rpartition(".")
    return module, f".{parameter}"


def _sizes(kind: str, entry: Entry, matrix: Entry) -> tuple[bool, str, str]:
    """Return whether an adapter's tensor fits the base's matrix, and both sizes in words."""
    if kind == ".weight":  # a whole copy
        return entry.shape == matrix.shape, _shape(entry), _shape(matrix)
    if len(matrix.shape) != 2 or len(entry.shape) != 2 or kind not in _AXES:
        return True, "", ""
    axis, matrix_axis = _AXES[kind]
    size, base_size = entry.shape[axis], matrix.shape[matrix_axis]
    # GPT-2 stores the matrices of its linears the other way round.
    fits = size in matrix.shape if kind.startswith(_LINEAR) else size == base_size
    what = "rows" if matrix_axis == 0 else "columns"
    return fits, f"{size} {what}", f"{base_size} {what}"


def _shape(entry: Entry) -> str:
    return " × ".join(map(str, entry.shape)) or "one number"
