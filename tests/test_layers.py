"""Imports: each layer only from those above it; rooms of layer 3 neither from each other nor from MLflow.

Within a room, no file imports another that imports it back, directly or through others.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import qrl
from qrl.tracking import sources

PACKAGE = Path(qrl.__file__).parent
LAYERS = [
    {"names", "errors", "files", "mlflow_run", "process", "workspace", "stats", "recipe", "plan"},
    {"checkpoint", "source", "tiny", "tasks", "formats", "engine", "figures"},
    {"train", "quantize", "evaluate", "diagnose", "compare", "serve", "benchmark"},
    {"tracking", "registry", "cluster"},
    {"steps"},
    {"study"},
    {"cli", "__main__", "examples"},
]
ROOMS = LAYERS[2]
KNOWS_MLFLOW = {"tracking", "registry", "cluster", "study"}  # the study's launcher calls mlflow.projects.run
HEAVY = {"torch", "transformers", "trl", "mlflow", "scipy", "matplotlib", "plotly", "datasets", "bitsandbytes", "peft"}
HEAVY |= {"pydantic", "pandas"}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
# Files of one room that import each other, in a circle. Delete an entry when its circle is gone; add none.
CYCLES = {("figures.cards", "figures.forest"), ("train.qat.fold", "train.qat.linear")}


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def layer(name: str) -> int:
    return next(i for i, names in enumerate(LAYERS) if name in names)


def statements(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield a tree's imports, at whatever depth, without TYPE_CHECKING blocks, which do not run."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        yield from statements(node)


def imports(tree: ast.AST) -> list[str]:
    """Return the dotted names that a tree imports; `from qrl import a` counts as qrl.a."""
    modules = []
    for node in statements(tree):
        if isinstance(node, ast.Import):
            modules += [name.name for name in node.names]
        else:
            modules += [node.module] if node.module != "qrl" else [f"qrl.{name.name}" for name in node.names]
    return modules


def module_name(path: Path) -> str:
    """Return the dotted name of a file, below the package: `tasks.own`, and `tasks` for a room's `__init__`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imported_files() -> dict[str, set[str]]:
    """Return which files each file imports, in its types too: dotted names below the package."""
    modules = {module_name(path): path for path in FILES}
    imported = {}
    for module, path in modules.items():
        names = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:  # a file, or a name in one
                    is_file = f"{node.module}.{alias.name}".removeprefix("qrl.") in modules
                    names.add(f"{node.module}.{alias.name}" if is_file else node.module)
        imported[module] = {name.removeprefix("qrl.") for name in names} & modules.keys() - {module}
    return imported


def reachable(start: str, imported: dict[str, set[str]]) -> set[str]:
    """Return the files of a file's room that it imports, directly or through files of that room."""
    own_room = start.partition(".")[0]
    reached = set()
    waiting = [start]
    while waiting:
        for name in imported[waiting.pop()]:
            if name.partition(".")[0] == own_room and name not in reached:
                reached.add(name)
                waiting.append(name)
    return reached


def test_the_root_stays_small():
    assert len(list(PACKAGE.glob("*.py"))) <= 8, "a ninth file belongs into a room"


def test_every_file_has_a_layer():
    assert {room(path) for path in FILES} == set().union(*LAYERS)


@pytest.mark.process
@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_up_only(path):
    own_room = room(path)
    modules = imports(ast.parse(path.read_text()))
    imported_rooms = {name.split(".")[1] for name in modules if name.startswith("qrl.")}
    for name in imported_rooms - {own_room, "__file__", "__version__", "Room"}:
        assert layer(name) <= layer(own_room), f"{path} imports qrl.{name}, a layer below its own"
        assert not (own_room in ROOMS and name in ROOMS), f"{path} imports its neighbour qrl.{name}"
    if own_room not in KNOWS_MLFLOW:
        assert not [name for name in modules if name.partition(".")[0] == "mlflow"], f"{path} imports mlflow"


@pytest.mark.process
def test_files_of_a_room_do_not_import_each_other_in_a_circle():
    imported = imported_files()
    reached = {module: reachable(module, imported) for module in imported}
    circles = set()
    for module in imported:
        if module in reached[module]:
            circles.add(tuple(sorted(name for name in reached[module] if module in reached[name])))
    assert circles == CYCLES


def test_steps_know_no_study():
    for path in FILES:
        if room(path) == "steps":
            modules = {name for name in imported_files()[module_name(path)] if name.partition(".")[0] == "study"}
            assert not modules, f"{path} imports {sorted(modules)}: a study knows its steps, and not the reverse"


def test_the_pipeline_launches_steps_and_never_imports_them():
    for path in (PACKAGE / "study" / f"{name}.py" for name in ("pipeline", "launch", "sweep")):
        assert not [name for name in imports(ast.parse(path.read_text())) if name.startswith("qrl.steps")], path


@pytest.mark.process
def test_the_command_line_starts_without_anything_heavy():
    import subprocess
    import sys

    for modules, heavy in (
        ("qrl.cli", HEAVY),
        ("qrl.study.pipeline, qrl.train.machine, qrl.steps.compare, qrl.steps.promote", {"torch"}),
    ):
        code = f"import sys, {modules}; print({heavy!r} & {{name.partition('.')[0] for name in sys.modules}})"
        output = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=PACKAGE.parent)
        assert output.strip() == "set()"


@pytest.mark.parametrize("step", ["train", "quantize", "evaluate", "diagnose", "compare"])
def test_a_cache_key_covers_every_file_of_the_steps_own_room(step):
    """An import that the key's search does not see would leave a file out, and its changes would go unnoticed."""
    room_files = {path for path in FILES if room(path) == step}
    assert room_files <= set(sources.files(step)) and PACKAGE / "steps" / f"{step}.py" in sources.files(step)


def test_what_cache_keys_leave_out_exists():
    assert all((PACKAGE / name).exists() for name in sources.NO_RESULT)
