"""Typed recipes: the one source of parameters.

A field of these models, say `train.learning_rate`, *is* the command-line option, MLflow's `-P` key and the logged
parameter. A recipe is a YAML file of this package (by name) or of the user's (by path); options override it.
"""

from __future__ import annotations

import re
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError

from qrl.errors import BadInput
from qrl.recipe.sections import (
    Benchmark,
    Compare,
    Diagnose,
    Evaluate,
    Merge,
    Promote,
    Quantize,
    Rollout,
    Section,
    Train,
    Watch,
)

NAMED = Path(__file__).parent / "named"  # one YAML file a recipe
RENAMED = {  # former key → present one
    "train.importance_sampling": "train.importance_sampling_level",
    "train.iterations": "train.num_iterations",
    "train.clip": "train.epsilon",
    "train.clip_high": "train.epsilon_high",
    "rollout.importance_sampling": "rollout.is_correction",
    "rollout.importance_sampling_max": "rollout.is_correction_max",
    "rollout.max_kl": "rollout.max_engine_kl",
    "watch.max_kl": "watch.max_reference_kl",
}
_INT = "tag:yaml.org,2002:int"
DEFAULT = (
    "auto"  # `tiny`; where no recipe is named, `math` for that task, `instruct` for a model of the user's or gsm8k
)


class Recipe(Section):
    """A whole study: one model, one task, every step's settings."""

    model: str = Field("qrl-tiny", min_length=1, description="qrl-tiny (shipped), a checkpoint folder, or a hub id")
    registered_name: str | None = Field(None, description="name in the registry; default: from the model's name")
    task: Literal["arithmetic", "gsm8k", "math", "deepmath"] = Field("arithmetic", description="what is asked")
    data: str | None = Field(None, description="folder with train.jsonl and test.jsonl; default: generated, or the hub")
    prompt: str = Field("answer-line", description="prompt template: answer-line, boxed or plain")
    seed: int = Field(0, ge=0, lt=2**31, description="seed of everything random")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="where models run; auto takes a GPU if there is one"
    )
    train: Train = Train()
    rollout: Rollout = Rollout()
    watch: Watch = Watch()
    merge: Merge = Merge()
    quantize: Quantize = Quantize()
    evaluate: Evaluate = Evaluate()
    diagnose: Diagnose = Diagnose()
    compare: Compare = Compare()
    promote: Promote = Promote()
    benchmark: Benchmark = Benchmark()

    def dump(self) -> str:
        """The resolved recipe as YAML, which `load` reads back to an equal recipe."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)

    def flat(self, *sections: str) -> dict[str, str]:
        """Dotted key → value as text, as `-P` takes it; all sections, or the top level and those named."""
        values = {}
        for key, value in self.model_dump(mode="json").items():
            if isinstance(value, dict):
                if not sections or key in sections:
                    values |= {f"{key}.{name}": _text(inner) for name, inner in value.items()}
            else:
                values[key] = _text(value)
        return values


def fields() -> dict[str, tuple[Any, str]]:
    """Every recipe field as dotted key → (type annotation, description); options are made from it."""
    found = {}
    for key, field in Recipe.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            for name, inner in field.annotation.model_fields.items():
                found[f"{key}.{name}"] = (inner.annotation, inner.description or "")
        else:
            found[key] = (field.annotation, field.description or "")
    return found


def names() -> list[str]:
    """Names of the recipes that ship with the package."""
    return sorted(path.stem for path in NAMED.glob("*.yaml"))


def load(name_or_path: str = DEFAULT, overrides: dict[str, str] | None = None) -> Recipe:
    """A recipe by name or path, with dotted overrides applied and everything validated.

    Args:
        name_or_path: a name from `names()`, a path ending in .yaml, or `auto`.
        overrides: dotted key → text, as typed on the command line; values are read as YAML scalars.

    Raises:
        BadInput: unknown recipe or key, a wrong type or a number out of range; one sentence naming key and allowed values.
    """
    if name_or_path == DEFAULT:
        task = (overrides or {}).get("task")
        own = (overrides or {}).get("model", "qrl-tiny") != "qrl-tiny" or task == "gsm8k"
        name_or_path = "math" if task in ("math", "deepmath") else "instruct" if own else "tiny"
    path = NAMED / f"{name_or_path}.yaml"
    if not path.is_file() and str(name_or_path).endswith((".yaml", ".yml")):
        path = Path(name_or_path)
    if not path.is_file():
        raise BadInput(
            f"There is no recipe '{name_or_path}': expected one of {', '.join(names())}, or the path of a .yaml file that exists."
        )
    document = _read(path)
    for key, text in (overrides or {}).items():
        _set(document, key, text)
    try:
        return Recipe.model_validate(document)
    except ValidationError as error:
        raise BadInput(_sentence(error)) from None


class _Once(yaml.SafeLoader):
    """YAML whose keys stand once, where the library silently takes the last of two, and whose numbers are decimal: to it 010 is 8, 1:30 is 90."""

    yaml_implicit_resolvers: typing.ClassVar = {
        first: [(tag, pattern) for tag, pattern in found if tag != _INT]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"'{key}' is given twice")
        return super().construct_mapping(node, deep)


_Once.add_implicit_resolver(_INT, re.compile(r"[-+]?(0|[1-9][0-9_]*)$"), list("-+0123456789"))


def _read(path: Path) -> dict:
    """A recipe file as sections of keys and values; a section left empty is its defaults, and a list may stand as it is typed.

    Raises:
        BadInput: it is no such YAML.
    """
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), _Once) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadInput(f"Recipe {path} is not valid YAML: {' '.join(str(error).split())}.") from None
    except RecursionError:
        raise BadInput(
            f"Recipe {path} is nested hundreds deep, but holds sections of keys and values: see qrl/recipe/named."
        ) from None
    if not isinstance(document, dict):
        raise BadInput(
            f"Recipe {path} holds a {type(document).__name__}, but a mapping of keys to values was expected."
        )
    known = fields()
    if dotted := [key for key in document if key in known and "." in str(key)]:
        section, _, name = dotted[0].partition(".")
        raise BadInput(
            f"'{dotted[0]}' stands in recipe {path} as it is typed as an option: write '{name}' below '{section}'."
        )
    for name in known.keys() & document.keys():
        document[name] = _parse(document[name], known[name][0])
    for section in {key.partition(".")[0] for key in known if "." in key} & document.keys():
        values = document[section] = {} if document[section] is None else document[section]
        if not isinstance(values, dict):
            raise BadInput(
                f"'{section}' is a section of the recipe, but its value is {values!r}: write its keys below it."
            )
        for name in [name for name in values if f"{section}.{name}" in known]:
            annotation, _ = known[f"{section}.{name}"]
            if isinstance(values[name], bool) and type_name(annotation) in ("int", "float"):
                raise BadInput(f"'{section}.{name}' is {values[name]}, but a number was expected.")
            if isinstance(values[name], bool) and "on" in typing.get_args(annotation):
                values[name] = "on" if values[name] else "off"  # which YAML takes for booleans
            values[name] = _parse(values[name], annotation)
    return document


def _set(document: dict, key: str, text: str) -> None:
    annotations = fields()
    if key not in annotations:
        raise BadInput(_unknown(key))
    *section, name = key.split(".")
    target = document.setdefault(section[0], {}) if section else document
    target[name] = _parse(text, annotations[key][0])
    if target[name] == () and isinstance(text, str) and text.strip():
        raise BadInput(
            f"'{key}' is {text!r}, which names nothing: name something, separated by commas, or leave it out."
        )


def _parse(text: str, annotation: Any) -> Any:
    """Text to what pydantic should judge: lists by comma, null, booleans; numbers are left to pydantic's own reading."""
    if not isinstance(text, str):
        return text
    if typing.get_origin(annotation) is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if text.lower() in ("null", "none", "") and type(None) in typing.get_args(annotation):
        return None
    if typing.get_origin(annotation) is Literal and all(
        isinstance(option, int) for option in typing.get_args(annotation)
    ):
        return int(text) if text.isdigit() else text
    return text


def _unknown(key: str) -> str:
    import difflib

    if key in RENAMED:
        return f"'{key}' is now called '{RENAMED[key]}': write that instead."

    close = difflib.get_close_matches(key, fields(), n=1, cutoff=0.0)[0]
    section = key.split(".", maxsplit=1)[0]
    siblings = [name for name in fields() if name.startswith(f"{section}.")] or [
        name for name in fields() if "." not in name
    ]
    return f"'{key}' is not a key of a recipe: did you mean '{close}'? Allowed here: {', '.join(siblings)}."


def _sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"] if isinstance(part, str) and part != "tagged-union")
    if first["type"] in ("extra_forbidden", "invalid_key"):  # the latter is a number, say
        return _unknown(".".join(map(str, first["loc"])))
    given = (
        ",".join(map(str, first["input"])) if isinstance(first["input"], tuple) else first["input"]
    )  # a list, as it was written
    return f"'{key}' is {given!r}, but {_allowed(key, first)}."


def _allowed(key: str, first: dict) -> str:
    message = first["msg"].removeprefix("Value error, ")
    message = (message[0].lower() + message[1:]).partition(", unable")[0]
    return (
        message.replace("input should be", "must be")
        .replace("input should have", "must have")
        .replace("a valid tuple", "a list")
        .replace("unable to parse string as an", "must be an")
        .replace("unable to parse string as a", "must be a")
    )


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return "null" if value is None else str(value)


def type_name(annotation: Any) -> str:
    """How `--help` shows a field's type: `int`, `float`, `a|b`, `text`."""
    origin = typing.get_origin(annotation)
    if origin is Literal:
        return "|".join(map(str, typing.get_args(annotation)))
    if origin is Annotated:
        return type_name(typing.get_args(annotation)[0])
    if origin is tuple:
        return "list"
    if origin in (typing.Union, types.UnionType):
        return type_name(next(part for part in typing.get_args(annotation) if part is not type(None)))
    return "text" if annotation is str else annotation.__name__
