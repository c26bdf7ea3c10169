"""Who may import whom: each layer only from those above it, rooms of layer 3 never from each other nor from MLflow."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import qrl
from qrl.tracking import reuse

PACKAGE = Path(qrl.__file__).parent
LAYERS = [
    {"names", "errors", "process", "workspace", "stats", "recipe", "plan"},
    {"checkpoint", "source", "tiny", "tasks", "formats", "engine", "figures"},
    {"train", "quantize", "evaluate", "diagnose", "compare", "serve", "benchmark"},
    {"tracking", "registry"},
    {"steps"},
    {"study"},
    {"cli", "__main__"},
]
ROOMS = LAYERS[2]
KNOWS_MLFLOW = {"tracking", "registry", "study"}  # the study's launcher calls mlflow.projects.run
HEAVY = {"torch", "transformers", "trl", "mlflow", "scipy", "matplotlib", "plotly", "datasets", "bitsandbytes", "peft"}
NO_RESULT = {"errors", "tracking", "workspace", "process", "source"}  # keep, find and launch results, and change none
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def layer(name: str) -> int:
    return next(i for i, names in enumerate(LAYERS) if name in names)


def statements(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """A tree's imports, at whatever depth; TYPE_CHECKING blocks do not run."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        yield from statements(node)


def imports(tree: ast.AST) -> list[str]:
    """Dotted names that a tree imports; `from qrl import a` counts as qrl.a."""
    found = []
    for node in statements(tree):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names]
        else:
            found += [node.module] if node.module != "qrl" else [f"qrl.{name.name}" for name in node.names]
    return found


def files(node: ast.Import | ast.ImportFrom) -> set[Path]:
    """The package's files that one import statement names, the package's own and its steps' `__init__.py` left out."""
    if not isinstance(node, ast.ImportFrom) or node.module.partition(".")[0] != "qrl":
        return set()
    folder = PACKAGE.joinpath(*node.module.split(".")[1:])
    named = [folder.with_suffix(".py"), folder / "__init__.py"]
    named += [folder / name.name / "__init__.py" for name in node.names] + [
        folder / f"{name.name}.py" for name in node.names
    ]
    return {path for path in named if path.is_file()} - {PACKAGE / "__init__.py", PACKAGE / "steps" / "__init__.py"}


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
    for path in (PACKAGE / "study" / f"{name}.py" for name in ("pipeline", "launch", "sweep")):
        assert not [name for name in imports(ast.parse(path.read_text())) if name.startswith("qrl.steps")], path


def test_the_command_line_starts_without_anything_heavy():
    import subprocess
    import sys

    code = f"import sys; from qrl import cli; print({HEAVY!r} & {{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("step", ["train", "merge", "quantize", "evaluate", "diagnose", "compare"])
def test_a_cache_key_covers_every_file_that_its_step_imports(step):
    """But record.py, which logs a made checkpoint, outcome.py, which says where, and the table that only the figure of `plan` reads."""
    sources = {path for path in reuse.sources_of(step) if path.suffix == ".py"}
    assert PACKAGE / "steps" / f"{'train' if step == 'merge' else step}.py" in sources
    for path in sources:
        reached = set().union(*map(files, statements(ast.parse(path.read_text())))) - sources
        left = {other.relative_to(PACKAGE).as_posix() for other in reached if room(other) not in NO_RESULT}
        assert left <= {"steps/record.py", "steps/outcome.py", "plan/table.py"}, (
            f"{path} imports what {step}'s key does not cover"
        )
