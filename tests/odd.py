"""Odd checkpoints as people have them, made from the shipped model: other heads, and tokens beyond the embedding."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from qrl import checkpoint, tiny

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ROWS = 512  # of the shipped model's embedding
PAD = "<|pad|>"


def copied(folder: Path) -> Path:
    """Return a copy of the shipped model."""
    return Path(shutil.copytree(tiny.PATH, folder))


def edit(folder: Path, file: str, **changes) -> None:
    """Change keys of a JSON file; None removes one."""
    document = json.loads((folder / file).read_text()) | changes
    (folder / file).write_text(json.dumps({key: value for key, value in document.items() if value is not None}))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a folder with one weight file."""
    return load_file(folder / checkpoint.WEIGHTS)


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Replace the tensors of a folder with one weight file."""
    apart = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(apart, folder / checkpoint.WEIGHTS, metadata={"format": "pt"})


def swapped_head(folder: Path) -> torch.Tensor:
    """Return the shipped head with the rows of two digits exchanged: answers become wrong, and hidden states do not."""
    vocabulary = checkpoint.tokens(folder)
    one, two = vocabulary["1"], vocabulary["2"]
    head = weights(folder)[EMBEDDING].clone()
    head[[one, two]] = head[[two, one]]
    return head


def swap_head(folder: Path, *, tied: bool | None = True) -> Path:
    """Store another head beside the embedding; `tied` is what config.json says of the two, None for nothing."""
    write(folder, weights(folder) | {HEAD: swapped_head(folder)})
    edit(folder, "config.json", tie_word_embeddings=tied)
    return folder


def shard_head(folder: Path) -> None:
    """Move the head into a weight file of its own, with an index."""
    tensors = weights(folder)
    (folder / checkpoint.WEIGHTS).unlink()
    first, second = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    save_file({HEAD: tensors.pop(HEAD)}, folder / second, metadata={"format": "pt"})
    save_file(tensors, folder / first, metadata={"format": "pt"})
    weight_map = {**dict.fromkeys(tensors, first), HEAD: second}
    (folder / checkpoint.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def add_token(folder: Path, token: str, token_id: int, *, special: bool = True) -> None:
    """Add a token to tokenizer.json, as `tokenizer.add_tokens` saves it."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}
    tokenizer["added_tokens"].append({"id": token_id, "content": token, **flags})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def pad_rows(folder: Path, count: int) -> None:
    """Enlarge the embedding by rows of zeros, as models pad it to a multiple of 64."""
    tensors = weights(folder)
    rows = tensors[EMBEDDING]
    tensors[EMBEDDING] = torch.cat([rows, rows.new_zeros(count, rows.shape[1])])
    write(folder, tensors)
    edit(folder, "config.json", vocab_size=len(rows) + count)
