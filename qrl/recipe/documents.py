"""YAML files of settings, read strictly: unique keys, decimal numbers, one mapping."""

import json
import re
import typing
from pathlib import Path
from typing import Any

import yaml

from qrl.errors import BadInput

_INT = "tag:yaml.org,2002:int"


class Loader(yaml.SafeLoader):
    """YAML with unique keys and decimal numbers; the library keeps the last of two keys, and reads 010 as 8."""

    yaml_implicit_resolvers: typing.ClassVar = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != _INT]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"'{key}' is given twice")
        return super().construct_mapping(node, deep)


Loader.add_implicit_resolver(_INT, re.compile(r"[-+]?(0|[1-9][0-9_]*)$"), list("-+0123456789"))


def parse(source: Path | str, what: str) -> dict:
    """Return the mapping in a file or a text; `what` names it in errors.

    Raises:
        BadInput: it cannot be read, is not YAML in UTF-8, or holds something else.
    """
    try:
        text = source if isinstance(source, str) else source.read_text(encoding="utf-8")
        document = _of_json(text) if isinstance(source, str) else yaml.load(text, Loader)
    except (yaml.YAMLError, ValueError) as error:
        raise BadInput(f"{what} is not valid YAML: {' '.join(str(error).split())}.") from None
    except OSError as error:
        raise BadInput(f"{what} cannot be read ({error.strerror}): give a readable file.") from None
    except RecursionError:
        expected = "but sections of keys were expected: see qrl/recipe/named"
        raise BadInput(f"{what} is nested hundreds deep, {expected}.") from None
    if not isinstance(document or {}, dict):
        raise BadInput(f"{what} holds a {type(document).__name__}, but a mapping of keys to values was expected.")
    return document or {}


def _of_json(text: str) -> Any:
    """Return what a text holds as JSON, in which recipes write mappings down; else as YAML, which people type."""
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError):  # YAML reads some values of JSON otherwise: 1e-05 is a text there
        return yaml.load(text, Loader)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key is given twice")
    return dict(pairs)
