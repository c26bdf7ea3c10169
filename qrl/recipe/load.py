"""Recipes by name or path: YAML files, what they extend, and overrides as typed on the command line.

A recipe is a YAML file of this package (by name) or of the user (by path). With the key `extends`, the name or path of
another recipe, it holds only what differs.
"""

import difflib
import itertools
import re
import types
import typing
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ValidationError

from qrl import names as known
from qrl.errors import BadInput
from qrl.files import reading
from qrl.recipe import documents, layers, prompts
from qrl.recipe.base import Section
from qrl.recipe.sections import Recipe, as_text
from qrl.recipe.training import rate_of_other_method

NAMED = Path(__file__).parent / "named"  # a YAML file per recipe
DEFAULT = "auto"  # no recipe is named: the one that `default` returns
EXTENDS = "extends"
OF_SCHEMES = ("quantize.schemes", "evaluate.kv_fp8")  # keys of lists of schemes
MACHINE = "machine"  # `gpu` in a recipe sized for one, `any` in others; recipes that extend it inherit it
_METHOD, _RATE = "train.method", "train.learning_rate"
RENAMED = {  # former key → present key
    "train.importance_sampling": "train.importance_sampling_level",
    "train.iterations": "train.num_iterations",
    "train.clip": "train.epsilon",
    "train.clip_high": "train.epsilon_high",
    "rollout.importance_sampling": "rollout.is_correction",
    "rollout.importance_sampling_max": "rollout.is_correction_max",
    "rollout.max_kl": "rollout.max_engine_kl",
    "watch.max_kl": "watch.max_reference_kl",
}
LAYERS = ("quantize.layers", "train.qat_layers")
REMOVED = {"merge.max_logit_diff": "merge.max_kl limits the KL instead, in nats per token"}  # key → what to do


@cache
def fields() -> dict[str, tuple[Any, str]]:
    """Return every recipe field as dotted key → (type annotation, description); options are made from it."""
    described = {}
    for key, field in Recipe.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            for name, inner in field.annotation.model_fields.items():
                described[f"{key}.{name}"] = (inner.annotation, inner.description or "")
        else:
            described[key] = (field.annotation, field.description or "")
    return described


def names() -> list[str]:
    """Return the names of the recipes that ship with the package."""
    return sorted(path.stem for path in NAMED.glob("*.yaml"))


def about(name_or_path: str) -> str:
    """Return the comment at the head of a recipe's file; raise BadInput if there is no such recipe."""
    path = _path(name_or_path)
    documents.parse(path, f"Recipe {path}")  # it is text in UTF-8
    lines = path.read_text(encoding="utf-8").splitlines()
    head = itertools.takewhile(lambda line: line.startswith("#"), lines)
    return "\n".join(line.removeprefix("#").strip() for line in head)


def load(name_or_path: str = DEFAULT, overrides: Mapping[str, str] | None = None) -> Recipe:
    """Return a recipe by name or path, with dotted overrides applied and everything validated.

    Args:
        name_or_path: a name from `names()`, a path ending in .yaml, or `auto`.
        overrides: dotted key → text, as typed on the command line; values are read as YAML scalars.

    Raises:
        BadInput: the recipe or a key is unknown, a type is wrong or a number out of range.
    """
    overrides = overrides or {}
    values = _read(_path(default(overrides) if name_or_path == DEFAULT else name_or_path))
    return _validated(_laid_over(values, {key: _typed(key, text) for key, text in overrides.items()}))


def stored(path: Path, params: Mapping[str, str] | None = None) -> Recipe:
    """Return a recipe that a run recorded, maybe under an older version: former keys are renamed or left out.

    Args:
        path: the file, which whoever may write to the store can edit.
        params: the run's params, which nobody can: they count where the file says otherwise.

    Raises:
        BadInput: as `load`.
    """
    values = {RENAMED.get(key, key): value for key, value in _read(path).items() if key not in REMOVED}
    recorded = {RENAMED.get(key, key): text for key, text in (params or {}).items() if key not in REMOVED}
    # A prompt may have been typed as a file, whose text only the recipe holds: rows have its hash.
    readable = fields().keys() - {"prompt"}
    overrides = {key: _typed(key, text) for key, text in recorded.items() if key in readable}
    return _validated(values | overrides)


def _validated(values: Mapping[str, Any]) -> Recipe:
    document = {}
    for key, value in values.items():
        if key == MACHINE:
            continue
        for text in value if isinstance(value, tuple) else (value,):
            reading.check_control_characters(f"'{key}'", str(text))
            if re.search("[\ud800-\udfff]", str(text)):  # of a file name's bytes, which no store could record
                raise BadInput(f"'{key}' is {ascii(text)[:200]}, which is not in UTF-8: rename it.")
        section, dot, name = str(key).partition(".")
        if dot:
            document.setdefault(section, {})[name] = value
        else:
            document[key] = value
    try:
        return Recipe.model_validate(document)
    except ValidationError as error:
        raise BadInput(_sentence(error)) from None


def change(name_or_path: str) -> dict[str, str]:
    """Return what a recipe changes in the whole one that it extends, as typed: dotted key → text.

    A recipe that names a model is whole. One that extends nothing counts entirely, whole or not.

    Raises:
        BadInput: as `load`.
    """
    path = _path(name_or_path)
    values = _read(path)
    root = _root(path)
    root_values = _read(root) if root != path else {}
    if "model" not in root_values:
        root_values = {}
    typed = {}
    for key, value in values.items():
        if key != MACHINE and root_values.get(key, ()) != value:
            typed[key] = as_text(list(value) if isinstance(value, tuple) else value)
    return typed


def _root(path: Path) -> Path:
    """Return the file at the end of a chain of `extends`, which `_read` has found whole."""
    parent = documents.parse(path, f"Recipe {path}").get(EXTENDS)
    file = _locate(parent, path.parent) if parent else None
    return _root(file) if file else path


def is_whole(name_or_path: str) -> bool:
    """Return whether a recipe, or one that it extends, names a model; raise BadInput if there is no such recipe."""
    return name_or_path == DEFAULT or "model" in _read(_path(name_or_path))


def default(overrides: Mapping[str, str], *, device: str = "cuda") -> str:
    """Return the recipe that `auto` stands for: tiny, or instruct or math, which have smaller versions for a CPU."""
    task = overrides.get("task")
    if task in ("math", "deepmath"):
        name = "math"
    elif task == "gsm8k" or overrides.get("model", "qrl-tiny") != "qrl-tiny":
        name = "instruct"
    else:
        return "tiny"  # sized for two cores
    return f"{name}-cpu" if device == "cpu" else name


def needs_gpu(name_or_path: str) -> bool:
    """Return whether a recipe is sized for a GPU, as it says itself; raise BadInput if there is no such recipe."""
    return name_or_path != DEFAULT and _read(_path(name_or_path)).get(MACHINE) == "gpu"


def _path(name_or_path: str) -> Path:
    if path := _locate(name_or_path, Path()):
        return path
    if name_or_path.endswith((".yaml", ".yml")):
        raise BadInput(f"There is no file {name_or_path}: give the path of a recipe, or a name that `recipes` lists.")
    raise BadInput(
        f"There is no recipe '{name_or_path}'{_hint(name_or_path, names())}: expected one of {', '.join(names())}, or "
        "the path of a .yaml file."
    )


def _locate(name_or_path: str, folder: Path) -> Path | None:
    """Return the file of a recipe, relative paths counted from `folder`, or None if there is none."""
    paths = [NAMED / f"{name_or_path}.yaml"]
    if name_or_path.endswith((".yaml", ".yml")):
        paths.append(folder / name_or_path)
    return next((path for path in paths if path.is_file()), None)


def _read(path: Path, extending: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return a recipe file as dotted key → value, on top of the recipe that it extends.

    An empty section holds the defaults, and a list may be written as it is typed.
    `extending` holds the files that led to this one by `extends`.
    """
    document = documents.parse(path, f"Recipe {path}")
    parent_values = _parent(document.pop(EXTENDS, None), path, (*extending, path.resolve()))
    values: dict[str, Any] = {}
    for key, value in document.items():
        if key == MACHINE and value not in ("gpu", "any"):
            raise BadInput(f"Recipe {path} says {MACHINE}: {value!r}, but gpu or any was expected.")
        section, dot, name = str(key).partition(".")
        if dot:
            if key not in fields():
                raise BadInput(_unknown(str(key)))
            raise BadInput(f"Recipe {path} holds '{key}', an option's name: write '{name}' below '{section}'.")
        is_section = any(name.startswith(f"{key}.") for name in fields())
        if not is_section:
            values[key] = prompts.resolve(value, path.parent) if key == "prompt" else _value(key, value)
        elif isinstance(value, dict | None):
            for name, inner in (value or {}).items():
                values[f"{key}.{name}"] = _value(f"{key}.{name}", inner)
        else:
            raise BadInput(f"'{key}' is a section of the recipe, but its value is {value!r}: write its keys below it.")
    return _laid_over(parent_values, values)


def _laid_over(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with changes on top, by dotted key.

    A learning rate is for all weights or for an adapter: if the changes switch between the two and set none, the
    other's is converted, or left to the default.
    """
    combined = {**values, **changes}
    was_adapter = values.get(_METHOD, "full") != "full"
    is_adapter = combined.get(_METHOD, "full") != "full"
    if was_adapter == is_adapter or _RATE in changes or _RATE not in values:
        return combined
    try:
        rate = float(values[_RATE])
    except (TypeError, ValueError):  # which pydantic refuses
        return combined
    return combined | {_RATE: rate_of_other_method(rate, is_adapter=is_adapter)}


def _parent(extends: object, path: Path, chain: tuple[Path, ...]) -> dict:
    if extends is None:
        return {}
    parent = _locate(extends, path.parent) if isinstance(extends, str) else None
    if parent is None:
        raise BadInput(
            f"Recipe {path} extends {extends!r}, which does not exist: expected one of {', '.join(names())}, "
            f"or the path of a .yaml file relative to {path.parent}."
        )
    if parent.resolve() in chain:
        cycle = " → ".join(file.name for file in (*chain, parent))
        raise BadInput(f"Recipe {path} extends itself ({cycle}): take one `extends` out.")
    return _read(parent, chain)


def _value(key: str, value: Any) -> Any:
    if key not in fields():
        return value  # pydantic refuses it, with its siblings' names
    annotation = fields()[key][0]
    if isinstance(value, bool) and type_name(annotation) in ("int", "float"):
        raise BadInput(f"'{key}' is {value}, but a number was expected.")
    if isinstance(value, bool) and "on" in typing.get_args(annotation):
        value = "on" if value else "off"  # YAML reads both as booleans
    return _parse(key, value)


def _typed(key: str, text: str) -> Any:
    """Return the value of a key as typed on the command line."""
    if key not in fields():
        raise BadInput(_unknown(key))
    value = prompts.resolve(text, Path()) if key == "prompt" else _parse(key, text)
    if value == () and isinstance(text, str) and text.strip():
        raise BadInput(f"'{key}' is {text!r}, which names nothing: name something, separated by commas, or omit it.")
    return value


def _parse(key: str, text: Any) -> Any:
    """Return a value for pydantic to judge: lists are split at commas, null and integers of a choice are read here."""
    if not isinstance(text, str):
        return layers.from_mapping(text) if key in LAYERS else text
    annotation = fields()[key][0]
    options = typing.get_args(annotation)
    if typing.get_origin(annotation) is dict and text.lstrip().startswith("{"):
        return documents.parse(text, f"'{key}'")
    if typing.get_origin(annotation) is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if text.lower() in ("null", "none", "") and type(None) in options:
        return None
    if typing.get_origin(annotation) is Literal and any(isinstance(option, int) for option in options):
        return int(text) if text.isdigit() else text
    return text


def _hint(word: str, choices: Iterable[str]) -> str:
    """Return a clause that asks for the choice nearest to a word; empty if none is near."""
    close = difflib.get_close_matches(word, choices, n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""


def _unknown(key: str) -> str:
    if key in RENAMED:
        return f"'{key}' is now called '{RENAMED[key]}': write that instead."
    if key in REMOVED:
        return f"'{key}' is gone: {REMOVED[key]}."
    close = difflib.get_close_matches(key, fields(), n=1, cutoff=0.0)[0]
    section = f"{key.partition('.')[0]}."
    siblings = [name for name in fields() if name.startswith(section)] or [name for name in fields() if "." not in name]
    return f"'{key}' is not a key of a recipe: did you mean '{close}'? Allowed here: {', '.join(siblings)}."


def _sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"] if isinstance(part, str) and part != "tagged-union")
    if first["type"] in ("extra_forbidden", "invalid_key"):  # an invalid key is a number, say
        return _unknown(".".join(map(str, first["loc"])))
    value = first["input"]
    if isinstance(value, tuple):  # a list, as it was typed
        value = ",".join(map(str, value))
    hint = ""
    if first["type"] == "literal_error" and key in OF_SCHEMES:
        hint = known.scheme_hint(str(value))
    elif first["type"] == "literal_error":
        hint = _hint(str(value), re.findall(r"'([^']+)'", first["msg"]))
    return f"'{key}' is {value!r}{hint}, but {_allowed(first['msg'])}."


def _allowed(message: str) -> str:
    message = message.removeprefix("Value error, ")
    message = (message[0].lower() + message[1:]).partition(", unable")[0].replace("a valid tuple", "a list")
    message = message.replace("a valid dictionary", 'JSON, such as {"name": false}')
    message = message.replace("a valid boolean", "true or false")
    message = re.sub(r"input should (be|have)", r"must \1", message)
    return re.sub(r"unable to parse string as (an?)", r"must be \1", message)


def type_name(annotation: Any) -> str:
    """Return how `--help` shows a field's type: `int`, `float`, `a|b`, `text`."""
    origin = typing.get_origin(annotation)
    if origin is Literal:
        return "|".join(map(str, typing.get_args(annotation)))
    if origin is Annotated:
        return type_name(typing.get_args(annotation)[0])
    if origin in (tuple, dict):
        return "list" if origin is tuple else "JSON"
    if origin in (typing.Union, types.UnionType):
        return type_name(next(part for part in typing.get_args(annotation) if part is not type(None)))
    return "text" if annotation is str else annotation.__name__
