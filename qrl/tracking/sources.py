"""The sources that can change a step's result, each with its digest.

They are the step's file and all that it imports from this package, at whatever depth. Python is compared as parsed
code without comments and docstrings: another wording or layout never retrains, and a changed number does. Data files
next to a source (a kernel, a template) are compared byte by byte; Markdown is ignored.

To parse a study's sources takes a second, so what is found out of a source is kept in the user's cache, by its content.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from qrl import process
from qrl.workspace import write_atomically

PACKAGE = Path(__file__).parents[1]
_SAME_FILE = {"merge": "train"}  # step → the step whose file it is in, where the name differs
NO_RESULT = (
    *("figures", "steps/record.py", "steps/outcome.py"),  # draw, log and report results
    *("tracking", "registry", "study", "cli", "__init__.py"),  # store, find and launch them
    *("workspace.py", "process.py", "errors.py", "source.py"),  # where a step works, how it fails, which files it finds
    *("recipe/__init__.py", "recipe/base.py", "recipe/load.py", "recipe/sections.py"),  # define settings: values count
    *("recipe/documents.py", "recipe/prompts.py", "recipe/rules.py"),  # read and refuse settings
)
_LEFT_OUT = tuple(name if name.endswith(".py") else f"{name}/" for name in NO_RESULT)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_MODULE = re.compile(r"qrl(\.\w+)+")
_LARGEST_CACHE = 5000  # sources; an edited one is one more


class Source(NamedTuple):
    """What is found out of a source of Python."""

    digest: str  # of its code, 64 hexadecimal digits
    modules: tuple[str, ...]  # of this package, that it imports or names in a string, sorted


def digests(step: str, package: Path = PACKAGE) -> dict[str, str]:
    """Return the sha256 of every source that can change a step's result; edits while this process runs count.

    Args:
        step: entry point.
        package: folder of the package.

    Returns:
        Path in the package → 64 hexadecimal digits.
    """
    found = {file.relative_to(package).as_posix(): _digest(file) for file in files(step, package)}
    _cache().save()
    return found


def files(step: str, package: Path = PACKAGE) -> list[Path]:
    """Return the sources that can change a step's result, sorted."""
    seen = set()
    reached = set()
    pending = [f"steps/{_SAME_FILE.get(step, step)}"]
    while pending:
        name = pending.pop()  # of a module, as a path in the package without its suffix
        if name in seen:
            continue
        seen.add(name)
        file = package / f"{name}.py"
        if f"{name}.py".startswith(_LEFT_OUT) or not file.is_file():
            continue
        reached.add(file)
        for module in _cache().source(file.read_bytes()).modules:
            parts = module.split(".")[1:]
            for depth in range(1, len(parts) + 1):
                part = "/".join(parts[:depth])
                pending += [part, f"{part}/__init__"]
    data_files = set()
    for folder in {file.parent for file in reached} - {package}:
        data_files |= {path for path in folder.iterdir() if path.is_file() and path.suffix not in (".py", ".md")}
    return sorted(reached | data_files)


def _digest(file: Path) -> str:
    content = file.read_bytes()
    return _cache().source(content).digest if file.suffix == ".py" else sha256(content).hexdigest()


class Cache:
    """What was found out of sources before, by the sha256 of their bytes, in a file that processes share."""

    def __init__(self, path: Path | None) -> None:
        """Read the file; None is for a user who has no folder for it."""
        self._path = path
        self._is_saved = True
        self._sources: dict[str, Source] = {}
        if path is None:
            return
        with suppress(OSError, ValueError, TypeError, AttributeError):  # none yet, none that can be read, or damaged
            kept = json.loads(path.read_bytes()).items()
            self._sources = {name: Source(digest, tuple(modules)) for name, (digest, modules) in kept}

    def source(self, content: bytes) -> Source:
        """Return what is found out of a source."""
        name = sha256(content).hexdigest()
        if name not in self._sources:
            self._sources[name] = _parse(content)
            self._is_saved = False
        return self._sources[name]

    def save(self) -> None:
        """Write the file, if anything is new; where that cannot be done, the next process parses again."""
        if self._is_saved or self._path is None:
            return
        if len(self._sources) > _LARGEST_CACHE:
            self._sources.clear()
        with suppress(OSError), write_atomically(self._path) as partial:
            partial.write_text(json.dumps(self._sources), encoding="utf-8")
        self._is_saved = True


@lru_cache(maxsize=1)
def _cache() -> Cache:
    """Return the user's cache for this version of Python, whose trees may differ, and of this file's rules."""
    rules = sha256(Path(__file__).read_bytes()).hexdigest()[:16]
    try:
        folder = process.cache_folder()
    except RuntimeError:  # a container's user without a home
        return Cache(None)
    return Cache(folder / f"sources-{sys.version_info[0]}.{sys.version_info[1]}-{rules}.json")


def _parse(source: bytes) -> Source:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return Source(sha256(repr(_structure(tree)).encode()).hexdigest(), tuple(sorted({*_modules(tree)})))


def _structure(node: object) -> object:
    """Return a tree as nested tuples without empty fields, which differ between versions of Python."""
    if isinstance(node, ast.AST):
        fields = [(name, value) for name, value in ast.iter_fields(node) if value is not None and value != []]
        return (type(node).__name__, *((name, _structure(value)) for name, value in fields))
    if isinstance(node, list):
        return tuple(map(_structure, node))
    return node


def _modules(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return  # does not run
    if isinstance(node, ast.Import):
        yield from (name.name for name in node.names if _MODULE.fullmatch(name.name))
    elif isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "qrl":
        yield from (f"{node.module}.{name.name}" for name in node.names)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _MODULE.fullmatch(node.value):
        yield node.value
    for child in ast.iter_child_nodes(node):
        yield from _modules(child)
