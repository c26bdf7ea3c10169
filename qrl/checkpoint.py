"""What a checkpoint folder is: safe to read, whole, and named by its digest.

Nothing in a checkpoint is ever executed: weights are safetensors, which hold numbers only, and folders with pickles, Python
files or a pointer to remote code are refused. The checks read headers, never weights; only `digest` reads every byte.
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
# Everything that decides what a model writes: weights, configuration, and how text becomes tokens and back. A model card,
# MLflow's MLmodel or a trainer's leftovers decide nothing, so they do not count.
TOKENIZER_FILES = (
    *TOKENIZERS,
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    *CHAT_TEMPLATES,
)
SCALES = "activation_scales.json"  # beside masters that were trained with quantized activations: linear's name → scale of its inputs
CONFIG_FILES = ("config.json", "generation_config.json", INDEX, SCALES)
_UNSAFE = {
    ".py": "Python code",
    ".bin": "pickled weights",
    ".pt": "a pickle",
    ".pth": "a pickle",
    ".ckpt": "a pickle",
    ".pkl": "a pickle",
    ".pickle": "a pickle",
}


@dataclass(frozen=True)
class Checkpoint:
    """A folder that passed every check."""

    path: Path
    digest: str  # sha256, as `digest` computes it
    bytes: int  # of weights on disk
    dtype: str  # of most of its floating-point weights, "bfloat16" say
    shards: tuple[str, ...]  # names of the weight files
    quantization: str | None  # "bitsandbytes", "awq", "compressed-tensors", …; None: full precision


def check(path: Path | str, *, need_tokenizer: bool = True, need_chat_template: bool = True) -> Checkpoint:
    """A checkpoint folder, after every check that it is safe, whole and usable.

    Args:
        path: a folder with config.json, *.safetensors and a tokenizer.
        need_tokenizer: refuse a folder without a tokenizer; weights alone can be measured without one.
        need_chat_template: refuse a tokenizer without a chat template, too.

    Raises:
        BadInput: anything is missing, truncated or unsafe; one sentence names the file.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise BadInput(
            f"{folder} is not a folder: expected a checkpoint with config.json, *.safetensors and a tokenizer."
        )
    if (folder / "adapter_config.json").is_file():
        raise BadInput(f"{folder} holds a PEFT adapter, not a whole model: fold it into its base with `merge` first.")
    _refuse_code(folder)
    settings = config(folder)
    found = entries(folder)
    architecture.check(folder / "config.json", settings, found)
    if need_tokenizer:
        _check_tokenizer(folder, need_chat_template)
    return Checkpoint(
        path=folder,
        digest=digest(folder),
        bytes=sum((folder / name).stat().st_size for name in shards(folder)),
        dtype=main_dtype(found),
        shards=tuple(shards(folder)),
        quantization=(settings.get("quantization_config") or {}).get("quant_method"),
    )


def digest(path: Path | str) -> str:
    """sha256 that names a checkpoint: the same after copying, hard-linking or adding a README.

    It is the sha256 of a manifest in sha256sum's format ("<sha256 of the file>  <name>", a line per file, sorted by name)
    of the weight, configuration, tokenizer and activation-scale files in the folder; other files and subfolders do not count.

    Returns:
        64 hexadecimal digits.

    Raises:
        BadInput: a file cannot be read.
    """
    folder = Path(path)
    names = {*shards(folder), *(name for name in (*CONFIG_FILES, *TOKENIZER_FILES) if (folder / name).is_file())}
    manifest = ""
    for name in sorted(names):
        try:
            with open(folder / name, "rb") as file:
                manifest += f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {name}\n"
        except OSError as error:
            raise BadInput(f"{folder / name} cannot be read: {error.strerror}.") from None
    return hashlib.sha256(manifest.encode()).hexdigest()


def config(path: Path | str) -> dict:
    """config.json as a mapping.

    Raises:
        BadInput: it is missing, or it or its quantization_config is not a JSON object.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        raise BadInput(f"{Path(path)} has no config.json: expected a checkpoint as save_pretrained writes it.")
    found = _json(file)
    if not isinstance(found.get("quantization_config") or {}, dict):
        raise BadInput(
            f"{file} has a quantization_config that is no object: expected what the quantizing library writes, or none."
        )
    return found


def shards(path: Path | str) -> list[str]:
    """Names of the weight files, as transformers looks for them: model.safetensors, or else those that the index lists.

    Raises:
        BadInput: there is none, or the index lists one that is not there.
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
        raise BadInput(f"{index} names {outside[0]}, which lies elsewhere: shards must lie beside the index.")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise BadInput(f"{folder} lacks {', '.join(missing)}, which {INDEX} lists: copy or download the folder again.")
    return names


def entries(path: Path | str) -> dict[str, Entry]:
    """Every tensor by name, as the headers of the weight files describe it.

    Raises:
        BadInput: a file is truncated or not safetensors, or the index lists a tensor that no file holds.
    """
    folder = Path(path)
    names = shards(folder)
    found = {}
    for name in names:
        found |= header.read(folder / name)
    absent = set() if names == [WEIGHTS] else set(_json(folder / INDEX)["weight_map"]) - set(found)
    if absent:
        raise BadInput(f"{folder} lacks the tensor {min(absent)}, which {INDEX} lists: copy the folder again.")
    return found


def tensors(path: Path | str, wanted: Sequence[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors by name on the CPU, one at a time, so that a large checkpoint never lies in memory as a whole.

    Args:
        path: checkpoint folder.
        wanted: names of the tensors, in the order they are to come; None: all, by name.
    """
    found = entries(path)
    with closing(Rows(path)) as rows:
        for key in sorted(found) if wanted is None else wanted:
            yield key, rows.whole(found[key])


def _refuse_code(folder: Path) -> None:
    for file in sorted(folder.rglob("*")):
        if file.suffix.lower() in _UNSAFE and file.is_file():
            raise BadInput(
                f"{file} is {_UNSAFE[file.suffix.lower()]}, which could run when loaded: only safetensors are read, so delete it "
                "or move it out of the folder."
            )
    for name in ("config.json", "tokenizer_config.json"):
        if (folder / name).is_file() and "auto_map" in _json(folder / name):
            raise BadInput(
                f"{folder / name} asks for code of the checkpoint's own (auto_map): only architectures that transformers "
                "itself knows are loaded."
            )


def _check_tokenizer(folder: Path, need_chat_template: bool) -> None:
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise BadInput(f"{folder} has no tokenizer: expected {TOKENIZERS[0]} beside the weights.")
    settings = _json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    templated = settings.get("chat_template") or any((folder / name).is_file() for name in CHAT_TEMPLATES)
    if need_chat_template and not templated:
        raise BadInput(
            f"{folder} has a tokenizer without a chat template: expected chat_template.jinja, or chat_template in "
            "tokenizer_config.json, as an instruction-tuned model has."
        )


def main_dtype(found: dict[str, Entry]) -> str:
    """Dtype of most floating-point weights, "bfloat16" say.

    Raises:
        BadInput: there is none.
    """
    counts: Counter[str] = Counter()
    for entry in found.values():
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
