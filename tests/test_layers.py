"""Who may import whom: each layer only from those above it, rooms of layer 3 never from each other nor from MLflow."""

import ast
from pathlib import Path

import pytest

import qrl

PACKAGE = Path(qrl.__file__).parent
LAYERS = [
    {"names", "errors", "stats", "verdict", "plan", "recipe", "gate", "process", "workspace"},
    {"tasks", "checkpoint", "formats", "tiny", "source", "engine", "figures"},
    {"train", "quantize", "evaluate", "diagnose", "compare", "serve", "benchmark"},
    {"tracking", "registry"},
    {"keys"},
    {"steps"},
    {"launch", "pipeline", "report"},
    {"cli", "__main__"},
]
ROOMS = LAYERS[2]
KNOWS_MLFLOW = {"tracking", "registry", "launch"}  # launch calls mlflow.projects.run
HEAVY = {"torch", "transformers", "trl", "mlflow", "scipy", "matplotlib", "plotly", "datasets", "bitsandbytes", "peft"}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def layer(name: str) -> int:
    return next(i for i, names in enumerate(LAYERS) if name in names)


def imports(tree: ast.AST) -> list[str]:
    """Dotted names that a tree imports; `from qrl import a` counts as qrl.a. TYPE_CHECKING blocks do not run."""
    found = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [node.module] if node.module != "qrl" else [f"qrl.{name.name}" for name in node.names]
        found += imports(node)
    return found


def test_every_file_has_a_layer():
    assert {room(path) for path in FILES} == set().union(*LAYERS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_up_only(path):
    own = room(path)
    found = imports(ast.parse(path.read_text()))
    for name in {name.split(".")[1] for name in found if name.startswith("qrl.")} - {own, "__file__", "__version__"}:
        assert layer(name) <= layer(own), f"{path} imports qrl.{name}, which lies below it"
        assert not (own in ROOMS and name in ROOMS), f"{path} imports its neighbour qrl.{name}"
    if own not in KNOWS_MLFLOW:
        assert not [name for name in found if name.partition(".")[0] == "mlflow"], f"{path} imports mlflow"


def test_the_pipeline_launches_steps_and_never_imports_them():
    for name in LAYERS[6]:
        assert not [found for found in imports(ast.parse((PACKAGE / f"{name}.py").read_text())) if "steps" in found]


def test_the_command_line_starts_without_anything_heavy():
    import subprocess
    import sys

    code = f"import sys; from qrl import cli; print({HEAVY!r} & {{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    assert done.stdout.strip() == "set()"
