"""YAML files of settings, read strictly: unique keys, decimal numbers, one mapping."""

import copy
import re
import typing
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from qrl.errors import BadInput
from qrl.files import reading

LARGEST = 1 << 18  # bytes of a file
MOST_VALUES = 10_000  # of a document
_INT = "tag:yaml.org,2002:int"


class Loader(yaml.SafeLoader):
    """YAML with unique keys and decimal numbers; the library keeps the last of two keys, and reads 010 as 8."""

    yaml_implicit_resolvers: typing.ClassVar = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != _INT]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = Counter(str(key.value) for key, _ in node.value)
        for key, times in keys.items():
            if times > 1:
                raise yaml.YAMLError(f"'{key}' is given twice")
        return super().construct_mapping(node, deep)

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None and _expanded(node, {}) > MOST_VALUES:
            raise yaml.YAMLError(f"its aliases (*name) make more than {MOST_VALUES:,} values of it")
        return node


def _expanded(node: yaml.Node, sizes: dict[int, float]) -> float:
    """Return the number of values that a node stands for, aliases written out; infinite if it contains itself."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in sizes:
        sizes[id(node)] = float("inf")  # while its parts are counted
        parts = node.value if isinstance(node, yaml.SequenceNode) else [part for pair in node.value for part in pair]
        sizes[id(node)] = 1 + sum(_expanded(part, sizes) for part in parts)
    return sizes[id(node)]


Loader.add_implicit_resolver(_INT, re.compile(r"[-+]?(0|[1-9][0-9_]*)$"), list("-+0123456789"))


def parse(source: Path | str, what: str) -> dict:
    """Return the mapping in a file or a text; `what` names it in errors.

    Raises:
        BadInput: it cannot be read, is not YAML in UTF-8, or holds something else.
    """
    try:
        if isinstance(source, str):
            document = _of_json(source)
        else:
            content = reading.read_bytes(source, LARGEST)
            reading.check_encoding(what, content)
            document = _of_yaml(content.decode())
    except (yaml.YAMLError, ValueError) as error:
        raise BadInput(f"{what} is not valid YAML: {' '.join(str(error).split())}.") from None
    except RecursionError:
        expected = "but sections of keys were expected: see qrl/recipe/named"
        raise BadInput(f"{what} is nested hundreds deep, {expected}.") from None
    if not isinstance(document or {}, dict):
        raise BadInput(f"{what} holds a {type(document).__name__}, but a mapping of keys to values was expected.")
    return document or {}


def _of_json(text: str) -> Any:
    """Return what a text holds as JSON, in which recipes write mappings down; else as YAML, which people type."""
    try:
        return reading.parse_json(text, unique=True)
    except ValueError:  # YAML reads some values of JSON otherwise: 1e-05 is a text there
        return _of_yaml(text)


def _of_yaml(text: str) -> Any:
    """Return what a text holds, for the caller to change."""
    return copy.deepcopy(_loaded(text))


@lru_cache(maxsize=256)  # a command reads its recipe, and those which that extends, several times
def _loaded(text: str) -> Any:
    return yaml.load(text, Loader)
