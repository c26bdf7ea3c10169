"""A checkpoint folder: checked to be safe and complete, and identified by a digest.

Nothing in a checkpoint is ever executed: weights must be safetensors, which hold numbers only, and folders with
pickles, Python files or a pointer to remote code are refused. Checks read headers; `digest` alone reads every byte.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qrl.errors import BadInput
from qrl.formats import architecture, header
from qrl.formats.header import Entry
from qrl.formats.stream import Rows

if TYPE_CHECKING:
    import torch

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json")
SCALES = "activation_scales.json"  # of a model with quantized activations: a linear's name → scale of its inputs
# The digest covers everything that decides what a model writes: weights, configuration, and how text becomes tokens and
# back. A model card, MLflow's MLmodel and a trainer's leftovers decide nothing.
CONFIG_FILES = ("config.json", "generation_config.json", INDEX, SCALES)
_MAPS = ("merges.txt", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
TOKENIZER_FILES = (*TOKENIZERS, *_MAPS, *CHAT_TEMPLATES)
_PICKLES = (".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_UNSAFE = {".py": "Python code", ".bin": "pickled weights", **dict.fromkeys(_PICKLES, "a pickle")}


@dataclass(frozen=True)
class Checkpoint:
    """A folder that passed every check."""

    path: Path
    digest: str  # sha256, as `digest` computes it
    bytes: int  # size of the weight files
    dtype: str  # of most floating-point weights, such as "bfloat16"
    quantization: str | None  # "bitsandbytes", "awq", "compressed-tensors", …; None: full precision


def check(path: Path | str, *, need_tokenizer: bool = True, need_chat_template: bool = True) -> Checkpoint:
    """Check that a folder is a safe, complete and usable checkpoint, and return its description.

    Args:
        path: a folder with config.json, *.safetensors and a tokenizer.
        need_tokenizer: refuse a folder without a tokenizer; weights alone can be measured without one.
        need_chat_template: also refuse a tokenizer without a chat template.

    Raises:
        BadInput: a part is missing, truncated or unsafe; the sentence names the file.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise BadInput(f"{folder} is not a folder: expected one with config.json, *.safetensors and a tokenizer.")
    if (folder / "adapter_config.json").is_file():
        raise BadInput(f"{folder} holds a PEFT adapter, not a model: merge it into its base with `merge` first.")
    _refuse_code(folder)
    settings, tensors_ = config(folder), entries(folder)
    architecture.check(folder / "config.json", settings, tensors_)
    if need_tokenizer:
        _check_tokenizer(folder, need_chat_template)
    size = sum((folder / name).stat().st_size for name in shards(folder))
    method = (settings.get("quantization_config") or {}).get("quant_method")
    return Checkpoint(folder, digest(folder), size, main_dtype(tensors_), method)


def digest(path: Path | str) -> str:
    """Return the sha256 that identifies a checkpoint; copying, hard-linking or adding a README does not change it.

    It is the sha256 of a manifest in sha256sum's format ("<sha256 of the file>  <name>", one line per file, sorted by
    name) of the weight, configuration, tokenizer and activation-scale files. Other files and subfolders do not count.

    Returns:
        64 hexadecimal digits.

    Raises:
        BadInput: a file cannot be read.
    """
    folder, manifest = Path(path), ""
    names = {*shards(folder), *(name for name in (*CONFIG_FILES, *TOKENIZER_FILES) if (folder / name).is_file())}
    for name in sorted(names):
        try:
            with open(folder / name, "rb") as file:
                manifest += f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {name}\n"
        except OSError as error:
            raise BadInput(f"{folder / name} cannot be read: {error.strerror}.") from None
    return hashlib.sha256(manifest.encode()).hexdigest()


def config(path: Path | str) -> dict:
    """Return config.json as a mapping.

    Raises:
        BadInput: it is missing, or it or its quantization_config is not a JSON object.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        raise BadInput(f"{Path(path)} has no config.json: expected a checkpoint as save_pretrained writes it.")
    settings = _json(file)
    if not isinstance(settings.get("quantization_config") or {}, dict):
        raise BadInput(f"{file} has a quantization_config that is not an object: expected an object, or none.")
    return settings


def shards(path: Path | str) -> list[str]:
    """Return the names of the weight files: model.safetensors, or else, as in transformers, those that the index lists.

    Raises:
        BadInput: there is none, or the index lists one that is missing.
    """
    folder = Path(path)
    if (folder / WEIGHTS).is_file():
        return [WEIGHTS]
    index = folder / INDEX
    if not index.is_file():
        raise BadInput(f"{folder} has neither {WEIGHTS} nor {INDEX}: write the weights with save_pretrained first.")
    listed = _json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise BadInput(f"{index} has no weight_map: expected tensor names and the files that hold them.")
    names = sorted(set(map(str, listed.values())))
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise BadInput(f"{index} names {outside[0]}, which is in another folder: shards must be beside the index.")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise BadInput(f"{folder} lacks {', '.join(missing)}, which {INDEX} lists: copy or download the folder again.")
    return names


def entries(path: Path | str) -> dict[str, Entry]:
    """Return the header entry of every tensor, by name.

    Raises:
        BadInput: a file is truncated or not safetensors, or the index lists a tensor that no file holds.
    """
    folder = Path(path)
    names = shards(folder)
    by_name: dict[str, Entry] = {}
    for name in names:
        by_name |= header.read(folder / name)
    absent = set() if names == [WEIGHTS] else set(_json(folder / INDEX)["weight_map"]) - set(by_name)
    if absent:
        raise BadInput(f"{folder} lacks the tensor {min(absent)}, which {INDEX} lists: copy the folder again.")
    return by_name


def tensors(path: Path | str, wanted: Sequence[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors on the CPU, one at a time, so that a large checkpoint is never in memory as a whole.

    Args:
        path: checkpoint folder.
        wanted: names of the tensors, in the order to yield them; None: all, sorted by name.
    """
    by_name = entries(path)
    with closing(Rows(path)) as rows:
        for name in sorted(by_name) if wanted is None else wanted:
            yield name, rows.whole(by_name[name])


def _refuse_code(folder: Path) -> None:
    for file in sorted(folder.rglob("*")):
        if file.suffix.lower() in _UNSAFE and file.is_file():
            risk = f"{file} is {_UNSAFE[file.suffix.lower()]}, which could run code when loaded"
            raise BadInput(f"{risk}: delete it or move it out of the folder, since only safetensors are read.")
    for name in ("config.json", "tokenizer_config.json"):
        if (folder / name).is_file() and "auto_map" in _json(folder / name):
            risk = f"{folder / name} refers to the checkpoint's own code (auto_map), which is never run"
            raise BadInput(f"{risk}: expected an architecture that transformers itself knows.")


def _check_tokenizer(folder: Path, need_chat_template: bool) -> None:
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise BadInput(f"{folder} has no tokenizer: expected {TOKENIZERS[0]} beside the weights.")
    file = folder / "tokenizer_config.json"
    settings = _json(file) if file.is_file() else {}
    templated = settings.get("chat_template") or any((folder / name).is_file() for name in CHAT_TEMPLATES)
    if need_chat_template and not templated:
        places = f"{CHAT_TEMPLATES[0]}, or chat_template in {file.name}, as an instruction-tuned model has"
        raise BadInput(f"{folder} has a tokenizer without a chat template: expected {places}.")


def main_dtype(by_name: dict[str, Entry]) -> str:
    """Return the dtype of most floating-point weights, such as "bfloat16".

    Raises:
        BadInput: there is none.
    """
    counts: Counter[str] = Counter()
    for entry in by_name.values():
        if entry.dtype in header.FLOATS:
            counts[header.FLOATS[entry.dtype]] += entry.numel
    if not counts:
        raise BadInput("The weight files hold no floating-point tensor: expected the weights of a language model.")
    return counts.most_common(1)[0][0]


def _json(file: Path) -> dict:
    try:
        value = json.loads(file.read_text())
    except (ValueError, OSError) as error:
        raise BadInput(f"{file} cannot be read as JSON: {error}.") from None
    if not isinstance(value, dict):
        raise BadInput(f"{file} holds a JSON {type(value).__name__}, but an object was expected.")
    return value
