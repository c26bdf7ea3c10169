"""The output head, where config.json ties it to the embedding and a file stores one.

Loaders differ over such a file. transformers 5 computes with a stored head that differs from the embedding;
transformers 4, which AutoAWQ uses, and vLLM drop it. So schemes would store, and engines measure, different models. A
stored head that is the embedding, perhaps in another dtype, is harmless: every loader takes the embedding there
(`pretrained.load`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qrl.checkpoint import header
from qrl.checkpoint.header import Entry
from qrl.checkpoint.stream import Rows
from qrl.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor

TIED = "tie_word_embeddings"
HEADS = ("lm_head", "embed_out")  # modules, by the last part of their names
EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings", "tok_embeddings")
_STANDARD_EMBEDDING = "model.embed_tokens.weight"  # beside it, the head is lm_head
_BLOCK = 1 << 22  # numbers compared at once, which limits memory


def check(folder: Path, settings: Mapping[str, Any], entry_of: Mapping[str, Entry]) -> None:
    """Check that all loaders take the same output head; matrices are read only where the file stores a tied head.

    Args:
        folder: of the checkpoint.
        settings: its config.json.
        entry_of: its tensors, by name.

    Raises:
        BadInput: config.json ties the head to the embedding, and the file stores another head, or the head alone; or
            config.json unties them, and the file stores no head, or one for another number of tokens.
    """
    embedding_name = embedding(entry_of)
    head_name = head(entry_of)
    if settings.get(TIED) is False or not is_tied(settings):
        _check_own_head(folder, settings, entry_of, head_name, embedding_name)
        return
    if not head_name:
        return
    if not embedding_name:
        _check_embedding(folder, entry_of, head_name)
        return
    stored_head = entry_of[head_name]
    stored_embedding = entry_of[embedding_name]
    is_matrix = stored_head.dtype in header.FLOATS and stored_head.shape == stored_embedding.shape
    if is_matrix and same_matrix(folder, stored_head, folder, stored_embedding):
        return
    raise BadInput(
        f"{folder / 'config.json'} ties the output head to the embedding ({TIED}: true), but {stored_head.file} holds "
        f"another head, {head_name}, beside {embedding_name}: some loaders would use it, and others drop it. Set "
        f'"{TIED}": false in config.json to use the stored head, or remove {head_name} from the file to use the '
        "embedding.",
        field=TIED,
    )


def _check_own_head(
    folder: Path,
    settings: Mapping[str, Any],
    entry_of: Mapping[str, Entry],
    head_name: str | None,
    embedding_name: str | None,
) -> None:
    """Raise BadInput where a head of its own is missing, or has other rows than the embedding."""
    if head_name is None:
        if settings.get(TIED) is False and embedding_name == _STANDARD_EMBEDDING and _writes_text(settings):
            raise BadInput(
                f"{folder / 'config.json'} says that the output head is not the embedding ({TIED}: false), but no file "
                f"holds a head (lm_head.weight): copy or save the whole model again, or set {TIED} to true if the head "
                "is the embedding.",
                field=TIED,
            )
        return
    stored_head = entry_of[head_name]
    if embedding_name is None or len(stored_head.shape) != 2 or stored_head.dtype not in header.FLOATS:
        return
    rows, head_rows = entry_of[embedding_name].shape[0], stored_head.shape[0]
    if rows != head_rows:
        raise BadInput(
            f"{folder} holds {head_name} for {head_rows} tokens, but {embedding_name} for {rows}: enlarge both, "
            f"model.resize_token_embeddings({max(rows, head_rows)}), then save the model again."
        )


def _writes_text(settings: Mapping[str, Any]) -> bool:
    architectures = settings.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    return any(str(name).endswith("ForCausalLM") for name in names)


def _check_embedding(folder: Path, entry_of: Mapping[str, Entry], head_name: str) -> None:
    """Raise BadInput where a tied head is stored and nothing outside the layers has the shape of an embedding."""
    shape = entry_of[head_name].shape
    outside_layers = [entry for name, entry in entry_of.items() if name != head_name and ".layers." not in name]
    if any(entry.shape == shape for entry in outside_layers):
        return  # under a name that is not known here
    raise BadInput(
        f"{folder / 'config.json'} ties the output head to the embedding ({TIED}: true), but the weights hold the head "
        f"alone, {head_name}: some loaders would leave the embedding empty. Load the model with transformers 5 and "
        "save it again, which stores the embedding.",
        field=TIED,
    )


def is_tied(settings: Mapping[str, Any]) -> bool:
    """Return whether a config.json ties the head to the embedding; where it does not say, by its class in transformers.

    An architecture that transformers does not know counts as untied.
    """
    inner_settings = settings.get("text_config")
    for level in (settings, inner_settings if isinstance(inner_settings, Mapping) else {}):
        if isinstance(level.get(TIED), bool):
            return level[TIED]

    from transformers import CONFIG_MAPPING

    model_type = settings.get("model_type")
    if model_type not in CONFIG_MAPPING:
        return False
    return bool(getattr(CONFIG_MAPPING[model_type](), TIED, False))


def head(entry_of: Mapping[str, Entry]) -> str | None:
    """Return the name of the stored head's matrix, or of its codes where it is quantized; None where none is stored."""
    names = [name for name in entry_of if _module(name) in HEADS and not name.endswith(".bias")]
    plain_names = [name for name in names if name.endswith(".weight")]
    return min(plain_names or names, default=None)


def embedding(entry_of: Mapping[str, Entry]) -> str | None:
    """Return the name of the token embedding's matrix (vocabulary, hidden size); None where it is not recognized."""
    names = [name for name in entry_of if name.endswith(".weight") and _module(name) in EMBEDDINGS]
    matrices = [name for name in names if len(entry_of[name].shape) == 2 and entry_of[name].dtype in header.FLOATS]
    return min(matrices, key=len, default=None)


def row_count(settings: Mapping[str, Any], entry_of: Mapping[str, Entry]) -> int | None:
    """Return the number of rows of the embedding, one for each token id; None where nothing shows it."""
    embedding_name = embedding(entry_of)
    if embedding_name:
        return entry_of[embedding_name].shape[0]
    inner_settings = settings.get("text_config")
    size = settings.get("vocab_size", inner_settings.get("vocab_size") if isinstance(inner_settings, Mapping) else None)
    return size if type(size) is int else None


def used(settings: Mapping[str, Any], entry_of: Mapping[str, Entry]) -> str | None:
    """Return the name of the matrix that every loader computes logits with; None where it is not recognized."""
    head_name = head(entry_of)
    if head_name and not is_tied(settings):
        return head_name
    return embedding(entry_of)


def same_matrix(folder: Path, entry: Entry, other_folder: Path, other_entry: Entry) -> bool:
    """Return whether two stored matrices of one shape have the same values, up to rounding to the other's dtype."""
    stamps = tuple(_stamp(file) for file in (folder / entry.file, other_folder / other_entry.file))
    return _same_matrix(folder, entry, other_folder, other_entry, stamps)


@lru_cache(maxsize=32)  # a step checks a folder several times
def _same_matrix(folder: Path, entry: Entry, other_folder: Path, other_entry: Entry, stamps: tuple) -> bool:
    row_count, width = entry.shape
    block_rows = max(1, _BLOCK // max(1, width))
    with closing(Rows(folder)) as rows, closing(Rows(other_folder)) as other_rows:
        for first in range(0, row_count, block_rows):
            last = min(row_count, first + block_rows)
            if not _same_values(rows.read(entry, first, last), other_rows.read(other_entry, first, last)):
                return False
    return True


def _same_values(block: Tensor, other: Tensor) -> bool:
    # Rounding in one direction alone: the dtype with fewer digits cannot tell the two apart.
    return block.to(other.dtype).equal(other) or other.to(block.dtype).equal(block)


def _module(tensor: str) -> str:
    """Return the last part of the name of a tensor's module: `lm_head` of `lm_head.weight`."""
    return tensor.rpartition(".")[0].rpartition(".")[2]


def _stamp(file: Path) -> tuple[int, int, int]:
    """Return what changes when a file is written again."""
    stat = file.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
