"""Imports: each layer only from those above it; rooms of layer 3 neither from each other nor from MLflow."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import qrl
from qrl.tracking import sources

PACKAGE = Path(qrl.__file__).parent
LAYERS = [
    {"names", "errors", "files", "process", "workspace", "stats", "recipe", "plan"},
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


def test_the_root_stays_small():
    assert len(list(PACKAGE.glob("*.py"))) <= 8, "a ninth file belongs into a room"


def test_every_file_has_a_layer():
    assert {room(path) for path in FILES} == set().union(*LAYERS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_up_only(path):
    own = room(path)
    modules = imports(ast.parse(path.read_text()))
    for name in {name.split(".")[1] for name in modules if name.startswith("qrl.")} - {
        own,
        "__file__",
        "__version__",
        "Room",
    }:
        assert layer(name) <= layer(own), f"{path} imports qrl.{name}, which lies below it"
        assert not (own in ROOMS and name in ROOMS), f"{path} imports its neighbour qrl.{name}"
    if own not in KNOWS_MLFLOW:
        assert not [name for name in modules if name.partition(".")[0] == "mlflow"], f"{path} imports mlflow"


def test_the_pipeline_launches_steps_and_never_imports_them():
    for path in (PACKAGE / "study" / f"{name}.py" for name in ("pipeline", "launch", "sweep")):
        assert not [name for name in imports(ast.parse(path.read_text())) if name.startswith("qrl.steps")], path


def test_the_command_line_starts_without_anything_heavy():
    import subprocess
    import sys

    for modules, heavy in (("qrl.cli", HEAVY), ("qrl.study.pipeline, qrl.steps.compare, qrl.steps.promote", {"torch"})):
        code = f"import sys, {modules}; print({heavy!r} & {{name.partition('.')[0] for name in sys.modules}})"
        how = {"text": True, "cwd": PACKAGE.parent}
        assert subprocess.check_output([sys.executable, "-c", code], **how).strip() == "set()"


@pytest.mark.parametrize("step", ["train", "quantize", "evaluate", "diagnose", "compare"])
def test_a_cache_key_covers_every_file_of_the_steps_own_room(step):
    """An import that the key's search does not see would leave a file out, and its changes would go unnoticed."""
    own = {path for path in FILES if room(path) == step}
    assert own <= set(sources.files(step)) and PACKAGE / "steps" / f"{step}.py" in sources.files(step)


def test_what_cache_keys_leave_out_exists():
    assert all((PACKAGE / name).exists() for name in sources.NO_RESULT)
