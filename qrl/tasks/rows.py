"""Rows of data sets, from JSONL files or the Hugging Face Hub, as questions."""

import codecs
import json
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qrl.errors import BadInput
from qrl.files import reading
from qrl.tasks.question import Question

FILES = {"train": "train.jsonl", "heldout": "test.jsonl"}
Row = tuple[str, dict[str, Any]]  # where it is, for errors, and its fields
ReadRow = Callable[[str, str, dict[str, Any]], Question]  # (id, location, fields) → question


def of_folder(folder: Path, split: str) -> Iterator[Row]:
    """Yield the objects in a split's file; raise BadInput if it is missing, or a line is not a JSON object in UTF-8."""
    path = folder / FILES[split]
    if not folder.is_dir():
        problem = f"{folder} is a file" if folder.is_file() else f"There is no data folder {folder}"
        raise BadInput(f"{problem}: expected a folder with {' and '.join(FILES.values())}.")
    if not path.is_file():
        raise BadInput(f"The data folder {folder} has no {path.name}, which has the {split} split: add it.")
    yield from of_file(path)


def of_file(path: Path) -> Iterator[Row]:
    """Yield the objects of a JSONL file; raise BadInput if it is too large, or a line is not a JSON object in UTF-8."""
    reading.check_regular_file(path, reading.TABLE_BYTES)
    with path.open("rb") as lines:  # not splitlines: JSON strings may hold characters that it takes for line ends
        for number, line in enumerate(lines, 1):
            if number == 1:
                reading.check_encoding(str(path), line)
            text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if text.strip():
                location = f"{path}, line {number}"
                yield location, _object(location, text.strip())


def is_mirror(folder: Path) -> bool:
    """Return whether a folder holds copies of the hub's data sets, as OWNER/NAME, instead of files for the splits."""
    has_splits = any((folder / name).exists() for name in FILES.values())
    return not has_splits and any(folder.glob("*/*/README.md"))


def files(folder: Path) -> list[Path]:
    """Return the files that decide what a data folder holds, sorted: its JSONL files, or all files of a mirror."""
    if is_mirror(folder):
        paths: list[Path] = []
        for repository in folder.glob("*/*"):
            if repository.is_dir():
                paths += reading.walk(repository)
    else:
        paths = list(folder.glob("*.jsonl"))
    return sorted(path for path in paths if path.is_file() and ".cache" not in path.relative_to(folder).parts)


def of_hub(name: str, config: str | None, split: str, mirror: Path | None = None) -> Iterator[Row]:
    """Return the rows of a data set on the hub, or of its copy in a mirror; raise BadInput if it cannot be loaded."""
    import datasets

    copy = None if mirror is None else mirror / name
    if copy is not None and not copy.is_dir():
        raise BadInput(f"{mirror} has copies of the hub's data sets, but not {name}: download it into {copy}.")
    try:
        table = datasets.load_dataset(str(copy or name), config, split=split)
    except Exception as error:  # a dozen kinds, by network, proxy and cache; the remedy is the same for all
        if copy is None:
            failure = f"{name} could not be loaded from the hub"
            remedy = "connect to it, or pass a folder with train.jsonl and test.jsonl as data"
        else:
            failure = f"{copy} could not be loaded"
            remedy = f"download {name} into it again, whole"
        raise BadInput(f"{failure} ({type(error).__name__}): {remedy}.") from error
    return ((f"{name} {config or ''} {split}, row {index}", row) for index, row in enumerate(table))


@contextmanager
def from_cache() -> Iterator[None]:
    """Read the hub's data sets from its cache alone: one that is not there is refused at once, without any request."""
    import datasets
    import huggingface_hub

    switches = (datasets.config, huggingface_hub.constants)
    former_values = [switch.HF_HUB_OFFLINE for switch in switches]
    try:
        for switch in switches:
            switch.HF_HUB_OFFLINE = True
        yield
    finally:
        for switch, value in zip(switches, former_values, strict=True):
            switch.HF_HUB_OFFLINE = value


def questions(
    prefix: str,
    rows: Iterable[Row],
    read_row: ReadRow,
    n: int | None,
    seed: int,
    source: str,
    selection: str = "random",
) -> list[Question]:
    """Return all questions, or n of them, the first or drawn without replacement; ids count the rows.

    Raises:
        BadInput: there is no row, or one is malformed.
    """
    questions = [read_row(f"{prefix}-{index}", location, row) for index, (location, row) in enumerate(rows)]
    if not questions:
        raise BadInput(f"{source} has no questions: expected at least one row.")
    if n is None or n >= len(questions) or selection == "first":
        return questions[:n]
    return random.Random(seed).sample(questions, n)


def calibration_texts(file: Path, n: int, setting: str = "quantize.calibration") -> list[str]:
    """Return the first n texts of a .jsonl file of rows with `text`: whole conversations, rendered, end token included.

    Args:
        file, n: values of the recipe's `setting` and of its number of samples.
        setting: named in errors.

    Raises:
        BadInput: the file does not exist, a row holds no text, or there are fewer than n.
    """
    try:
        located_rows = list(of_file(file))
    except OSError as error:
        raise BadInput(f"{setting} cannot be read from {file} ({error}): expected a .jsonl file of texts.") from None
    texts = []
    for location, row in located_rows:
        text = row.get("text")
        if not isinstance(text, str) or not text.strip():
            raise BadInput(f'{location} holds no calibration text: expected rows like {{"text": "…"}}.')
        texts.append(text)
    check_calibration_count(len(texts), n, str(file), setting)
    return texts[:n]


def check_calibration_count(available: int, n: int, source: str, setting: str = "quantize.calibration") -> None:
    """Raise BadInput where there are fewer than n texts: settings would record a number that was not used."""
    if available < n:
        required = f"{setting}_samples is {n}"
        raise BadInput(f"{source} has {available} calibration texts, but {required}: lower it, or add texts.")


def _object(location: str, line: bytes) -> dict[str, Any]:
    try:
        row = reading.parse_json(line.decode())
        if b"\\u" in line:  # a lone surrogate, `\ud800`, is not a text that a tokenizer can read
            json.dumps(row, ensure_ascii=False).encode()
    except ValueError:
        raise BadInput(f"{location} is not valid: expected a JSON object in UTF-8 on every line.") from None
    if not isinstance(row, dict):
        raise BadInput(f"{location} is a {type(row).__name__}: expected a JSON object on every line.")
    return row
