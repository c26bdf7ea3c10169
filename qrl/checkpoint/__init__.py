"""A checkpoint folder: checked to be safe and complete, and identified by a digest.

Nothing in a checkpoint is ever executed: weights must be safetensors, which hold numbers only, and folders with
pickles, Python files or a pointer to remote code are refused. Checks read headers; `digest` alone reads every byte.

Transformers, vLLM and AutoAWQ each choose for themselves which files of a folder they read. A digest identifies a model
only if it covers whatever any of them may read, so most of this file is lists of names: what counts (`files`), what
must be absent (`refuse_code`), and how large a file may be. `header` reads a safetensors file's header, `architecture`
compares it with config.json, `head` and `vocabulary` compare head and tokenizer with the embedding, and `stream` reads
the weights themselves; `qrl.formats` builds on these.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, BinaryIO

from qrl.checkpoint import architecture, head, header, vocabulary
from qrl.checkpoint.header import Entry
from qrl.checkpoint.stream import Rows
from qrl.errors import BadInput
from qrl.files import reading

if TYPE_CHECKING:
    import torch

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json")
SCALES = "activation_scales.json"  # of a model with quantized activations: a linear's name → scale of its inputs
# Types of rotary scaling that max_position_embeddings includes already; for others it is the length before scaling.
_SCALING_INCLUDED = ("llama3", "longrope", "su")
TEMPLATES = "additional_chat_templates"  # a folder of templates; transformers prefers its default.jinja to all others
# The digest covers every file that transformers, vLLM or AutoAWQ may read: weights, configuration, and how text becomes
# tokens and back. A model card, MLflow's MLmodel and a trainer's leftovers decide nothing. Further weights are refused.
CONFIG_FILES = ("config.json", "generation_config.json", INDEX, SCALES)
_MAPS = ("merges.txt", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
TOKENIZER_FILES = (*TOKENIZERS, *_MAPS, *CHAT_TEMPLATES)
# Patterns of what few models have: other vocabularies, settings of processors (with templates of their own), Mistral's
# own files, and settings that vLLM looks for where config.json has none.
_VOCABULARIES = ("*.model", "*.tiktoken", "*.spm", "bpe.codes", "dict.txt", "tekken.json", "tokenizer.model.v*")
_PROCESSORS = ("*processor_config.json", "audio_tokenizer_config.json", "sentence_*_config.json", "modules.json")
_QUANTIZERS = ("params.json", "*quant_config.json", "quanti[sz]*_config.json", "torchao_config.json", "sparse_*.json")
CONFIGS = (*CONFIG_FILES, *_QUANTIZERS)
TEXTS = (*TOKENIZER_FILES, *_VOCABULARIES, *_PROCESSORS)
# Keys that make transformers read other files than those that the digest covers.
_REDIRECTS = {"config.json": "configuration_files", "tokenizer_config.json": "fast_tokenizer_files"}
# Largest size of a file in MiB, by the first pattern that matches; the largest published ones have a third of it.
_VOCABULARY_LIMITS = dict.fromkeys(("tokenizer.json", "vocab.*", "merges.txt", *_VOCABULARIES), 128)
_SIZE_LIMITS = {"*.jinja": 1, INDEX: 64, SCALES: 64, **_VOCABULARY_LIMITS, "*": 8}
_PICKLES = (".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_MAX_READERS = 16  # files hashed at once
_POINTER = b"version https://git-lfs.github.com/spec/"  # how a pointer of Git LFS begins
_MAX_POINTER = 1024  # bytes; a larger file is none
_UNSAFE = {".py": "Python code", ".bin": "pickled weights", **dict.fromkeys(_PICKLES, "a pickle")}


@dataclass(frozen=True)
class Checkpoint:
    """A folder that passed every check."""

    path: Path
    bytes: int  # size of the weight files
    dtype: str  # of most floating-point weights, such as "bfloat16"
    quantization: str | None  # "bitsandbytes", "awq", "compressed-tensors", …; None: full precision

    @cached_property
    def digest(self) -> str:
        """The sha256, as `digest` computes it, at the first access: it reads every byte."""
        return digest(self.path)


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
    _refuse_pointers(folder)
    settings = config(folder)  # before the folder is searched: it may be any on the disk
    refuse_code(folder)
    entry_of = entries(folder)
    architecture.check(folder / "config.json", settings, entry_of)
    if need_tokenizer:
        _check_tokenizer(folder, need_chat_template)
    head.check(folder, settings, entry_of)
    for name in files(folder):  # which refuses what one loader would read and another would not
        with _opened(folder / name):  # an unreadable file is an error now, and not once weights are loaded
            pass
    vocabulary.check(folder, settings, entry_of, _json)
    weights_bytes = sum((folder / name).stat().st_size for name in shards(folder))
    method = (settings.get("quantization_config") or {}).get("quant_method")
    return Checkpoint(folder, weights_bytes, main_dtype(entry_of), method)


def digest(path: Path | str) -> str:
    """Return the sha256 that identifies a checkpoint; copying, hard-linking or adding a README does not change it.

    It is the sha256 of a manifest in sha256sum's format ("<sha256 of the file>  <name>", one line per file, sorted by
    name) of `files`: weights, configuration, tokenizer, chat templates and activation scales. Other files do not count.
    Several files are read at once, for one core hashes some 1.5 GB/s.

    Returns:
        64 hexadecimal digits.

    Raises:
        BadInput: as `files`, or a file cannot be read.
    """
    folder = Path(path)
    names = files(folder)
    hash_of: dict[str, str] = {}
    errors: list[Exception] = []
    queue = iter(names)  # threads may share it: `next` of a list's iterator is one step

    def hash_files() -> None:
        try:
            for name in queue:
                with _opened(folder / name) as file:
                    hash_of[name] = hashlib.file_digest(file, "sha256").hexdigest()
        except Exception as error:  # an error in a thread would be lost: it is raised below
            errors.append(error)

    # Daemons, since an end of the process must not wait for them, as it does for those of concurrent.futures.
    readers = min(_MAX_READERS, os.cpu_count() or 1, len(names))
    threads = [Thread(target=hash_files, daemon=True) for _ in range(readers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    manifest = "".join(f"{hash_of[name]}  {name}\n" for name in names)
    return hashlib.sha256(manifest.encode()).hexdigest()


@contextmanager
def _opened(file: Path) -> Iterator[BinaryIO]:
    try:
        with file.open("rb") as content:
            yield content
    except OSError as error:
        raise BadInput(f"{file} cannot be read: {error.strerror}.") from None


def state(path: Path) -> list[tuple]:
    """Return a record of a folder's files that changes if one is written to or replaced, even with the same bytes."""
    stats = [(file.name, file.stat()) for file in sorted(path.rglob("*")) if file.exists()]
    return [(name, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in stats]


def files(path: Path | str) -> list[str]:
    """Return the names of all files that a loader may read, relative to the folder, sorted.

    Raises:
        BadInput: there are weights that one loader would read and another would not, or a file is too large to be what
            its name says.
    """
    folder = Path(path)
    weights = shards(folder)
    # With an index, transformers, vLLM and AutoAWQ read only what it lists, or consolidated*.
    has_index = weights != [WEIGHTS]
    for name in sorted(os.listdir(folder)):
        is_extra = name.endswith((".safetensors", ".gguf")) and name not in weights
        is_ignored = has_index and name.endswith(".safetensors") and not name.startswith("consolidated")
        if (is_extra and not is_ignored) or name == "adapter_config.json":
            raise BadInput(
                f"{folder / name} is not part of the model in {weights[0]}, but loaders may read it too: move it out "
                "of the folder."
            )
    return sorted({*weights, *_matching(folder, CONFIGS), *text_files(folder)})


def text_files(path: Path | str) -> list[str]:
    """Return the names of the files that decide how text becomes tokens and back, chat templates included.

    Raises:
        BadInput: one is too large to be what its name says.
    """
    folder = Path(path)
    names = _matching(folder, TEXTS)
    if (folder / TEMPLATES).is_dir():
        names += [f"{TEMPLATES}/{name}" for name in _matching(folder / TEMPLATES, ("*.jinja",))]
    return names


def _matching(folder: Path, patterns: Sequence[str]) -> list[str]:
    """Return the sorted names of the files in a folder that match a pattern, none larger than its limit."""
    names = []
    for name in sorted(os.listdir(folder)):
        matches = any(fnmatchcase(name, pattern) for pattern in patterns)
        if not matches or (folder / name).is_dir():
            continue
        _check_name(folder, name)
        try:
            reading.check_regular_file(folder / name, _size_limit(name))
        except OSError as error:  # such as a link to a file that is gone
            raise BadInput(f"{folder / name} cannot be read ({error.strerror}): copy the folder again.") from None
        names.append(name)
    return names


def _check_name(folder: Path, name: str) -> None:
    if not name.isprintable():  # a line break could make the manifests of two folders equal
        raise BadInput(f"{folder} has a file with control characters in its name, {name!r}: rename it.")


def config(path: Path | str) -> dict:
    """Return config.json as a mapping.

    Raises:
        BadInput: it is missing, it or its quantization_config is not a JSON object, or it names weights elsewhere.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        raise BadInput(f"{Path(path)} has no config.json: expected a checkpoint as save_pretrained writes it.")
    settings = _json(file)
    quantization = settings.get("quantization_config") or {}
    if not isinstance(quantization, dict):
        raise BadInput(f"{file} has a quantization_config that is not an object: expected an object, or none.")
    # bitsandbytes would guess, and pack the weights.
    if quantization and not isinstance(quantization.get("quant_method"), str):
        raise BadInput(f"{file} has a quantization_config without a quant_method: copy it from the model again.")
    weights = settings.get("transformers_weights")
    if weights not in (None, WEIGHTS, INDEX):
        raise BadInput(
            f"{file} takes the weights from {weights!r} (transformers_weights): expected {WEIGHTS}, or no key."
        )
    if settings.get("speculators_config") is not None:  # vLLM would answer with the verifier that it names
        raise BadInput(
            f"{file} describes a draft model (speculators_config): give the model that it drafts for, or delete the "
            "key."
        )
    return settings


def tokens(path: Path | str) -> dict[str, int]:
    """Return the tokens of a folder's tokenizer and their ids; none where there is none, or only a binary one.

    Raises:
        BadInput: a file of it is no JSON object.
    """
    return vocabulary.tokens(Path(path), _json)


def positions(path: Path | str) -> int | None:
    """Return the longest text in tokens; None where config.json does not say, or scales positions."""
    settings = config(path)
    rope = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    scaling = rope.get("rope_type", rope.get("type"))
    if "factor" in rope and scaling not in _SCALING_INCLUDED:
        return None
    return settings.get("max_position_embeddings")


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
    for name in names:
        _check_name(folder, name)
        if Path(name).name != name:
            raise BadInput(f"{index} names {name}, which is in another folder: shards must be beside the index.")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise BadInput(f"{folder} lacks {', '.join(missing)}, which {INDEX} lists: copy or download the folder again.")
    return names


def entries(path: Path | str) -> dict[str, Entry]:
    """Return the header entry of every tensor, by name.

    Raises:
        BadInput: a file is truncated or not safetensors, two hold the same tensor, or the index lists one that no file
            holds.
    """
    folder = Path(path)
    weights = shards(folder)
    entry_of: dict[str, Entry] = {}
    for file in weights:
        entries_of_file = header.read(folder / file)
        duplicates = entry_of.keys() & entries_of_file
        if duplicates:
            tensor = min(duplicates)
            raise BadInput(
                f"{folder / file} and {entry_of[tensor].file} both hold {tensor}, and loaders differ in which of them "
                "they use: write the weights again."
            )
        entry_of |= entries_of_file
    if weights == [WEIGHTS]:
        return entry_of
    missing = set(_json(folder / INDEX)["weight_map"]) - set(entry_of)
    if missing:
        raise BadInput(f"{folder} lacks the tensor {min(missing)}, which {INDEX} lists: copy the folder again.")
    return entry_of


def tensors(path: Path | str, names: Sequence[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors on the CPU, one at a time, so that a large checkpoint is never in memory as a whole.

    Args:
        path: checkpoint folder.
        names: of the tensors, in the order to yield them; None: all, sorted by name.
    """
    entry_of = entries(path)
    with closing(Rows(path)) as rows:
        for name in sorted(entry_of) if names is None else names:
            yield name, rows.whole(entry_of[name])


def refuse_code(folder: Path) -> None:
    """Refuse a folder with code, or with weights that could run code when loaded.

    Raises:
        BadInput: the sentence names the file.
    """
    for file in reading.walk(folder):
        if file.suffix.lower() in _UNSAFE and file.is_file():
            raise BadInput(
                f"{file} is {_UNSAFE[file.suffix.lower()]}, which could run code when loaded: delete it or move it out "
                "of the folder, since only safetensors are read."
            )
    for name, key in _REDIRECTS.items():
        settings = _json(folder / name) if (folder / name).is_file() else {}
        if "auto_map" in settings:
            raise BadInput(
                f"{folder / name} refers to the checkpoint's own code (auto_map), which is never run: expected an "
                "architecture that transformers itself knows."
            )
        if key in settings:
            raise BadInput(f"{folder / name} refers to other files ({key}), which no digest covers: delete this key.")


def _refuse_pointers(folder: Path) -> None:
    """Refuse a folder that git cloned without Git LFS: texts of a few lines stand there in place of large files."""
    for pattern in ("*.safetensors", "*.json", "*.model"):
        for file in folder.glob(pattern):
            if not file.is_file() or file.stat().st_size > _MAX_POINTER:
                continue
            with _opened(file) as content:
                start = content.read(len(_POINTER))
            if start == _POINTER:
                raise BadInput(
                    f"{file} is a pointer of Git LFS, and not the file that it stands for: run `git lfs pull` in the "
                    "clone that it came from."
                )


def _check_tokenizer(folder: Path, need_chat_template: bool) -> None:
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise BadInput(f"{folder} has no tokenizer: expected {TOKENIZERS[0]} beside the weights.")
    file = folder / "tokenizer_config.json"
    settings = _json(file) if file.is_file() else {}
    template_files = (*CHAT_TEMPLATES, f"{TEMPLATES}/default.jinja")
    has_template = settings.get("chat_template") or any((folder / name).is_file() for name in template_files)
    if need_chat_template and not has_template:
        raise BadInput(
            f"{folder} has a tokenizer without a chat template: expected {CHAT_TEMPLATES[0]}, or chat_template in "
            f"{file.name}, as an instruction-tuned model has."
        )


def main_dtype(entry_of: dict[str, Entry]) -> str:
    """Return the dtype of most floating-point weights, such as "bfloat16".

    Raises:
        BadInput: there is none.
    """
    counts: Counter[str] = Counter()
    for entry in entry_of.values():
        if entry.dtype in header.FLOATS:
            counts[header.FLOATS[entry.dtype]] += entry.numel
    if not counts:
        raise BadInput("The weight files hold no floating-point tensor: expected the weights of a language model.")
    return counts.most_common(1)[0][0]


def _json(file: Path) -> dict:
    try:
        value = reading.parse_json(reading.read_bytes(file, _size_limit(file.name)).decode())
    except ValueError as error:
        raise BadInput(f"{file} cannot be read as JSON: {str(error)[:200]}.") from None
    if not isinstance(value, dict):
        raise BadInput(f"{file} holds a JSON {type(value).__name__}, but an object was expected.")
    return value


def _size_limit(name: str) -> int:
    """Return the largest size of a file of this name, in bytes."""
    limits_mib = (limit for pattern, limit in _SIZE_LIMITS.items() if fnmatchcase(name, pattern))
    return next(limits_mib) * reading.MIB
