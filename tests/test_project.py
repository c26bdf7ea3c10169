"""The project's files keep their promises: entry points, parameters, pins."""

import ast
import csv
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner

import qrl
from qrl import cli, process, recipe
from qrl.serve import engines
from qrl.study import launch
from tests.tracking import team

ROOT = Path(qrl.__file__).parents[1]
PYRIGHT = "1.1.414"
MLPROJECT = yaml.safe_load((ROOT / "MLproject").read_text())
FOLDERS = sorted(path.parent for path in (ROOT / "projects").glob("*/MLproject"))
GRADERS = ("math-verify", "latex2sympy2-extended", "antlr4-python3-runtime")
OLDER = {"verl": {"antlr4-python3-runtime": "4.9.3"}}  # hydra, which verl reads its configuration with, needs it
TOP_LEVEL = {"mlruns", "projects", "qrl", "tests", "MLproject", "conda.yaml", "pyproject.toml"}
TOP_LEVEL |= {"README.md", "CHANGELOG.md", "LICENSE"}
SUPPLY = ROOT / ".github" / "supply"
STARTED = r'"server",\s+"--'  # in a list of words, as every start of MLflow's server has them


def pins(path: Path) -> dict[str, str]:
    lines = next(part["pip"] for part in yaml.safe_load(path.read_text())["dependencies"] if isinstance(part, dict))
    return dict(line.split("==") for line in lines)


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return listed.stdout.splitlines()


def test_every_entry_point_is_a_command_in_the_order_of_the_command_line():
    entry_points = [{"main": "study"}.get(name, name) for name in MLPROJECT["entry_points"]]
    assert entry_points == [name for name in cli.cli.list_commands(None) if name in entry_points] + ["test"]
    known = set(cli.cli.commands) | {"main", "test"}
    assert set(MLPROJECT["entry_points"]) <= known
    for name, entry in MLPROJECT["entry_points"].items():
        command = {"main": "study"}.get(name, name)
        assert name == "test" or f"python -m qrl {command}" in entry["command"]
        assert entry["command"].startswith("exec "), "a shell in between would swallow signals"


def test_mlproject_declares_no_field_of_a_recipe():
    for name, entry in MLPROJECT["entry_points"].items():
        declared = set(entry.get("parameters", {}))
        assert declared <= {"recipe", "stage", "only", "workers"}, name
        assert not declared & set(recipe.fields())
        assert "path" not in str(entry.get("parameters", {})), "type: path refuses hub ids"


@pytest.mark.parametrize(
    "command",
    sorted(set(cli.cli.commands) - {"doctor", "grade", "job", "jobs", "plan", "recipes", "schemes", "submit"}),
)
def test_every_field_of_a_recipe_is_an_option_of_every_step(command):
    parameters = cli.cli.commands[command].get_params(click.Context(cli.cli.commands[command]))
    options = {option for parameter in parameters for option in parameter.opts}
    assert {f"--{key}" for key in recipe.fields()} <= options


def test_pip_installs_the_core_environment_and_the_tests_packages_as_an_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installed, extra = (
        dict(line.split("==") for line in lines)
        for lines in (project["dependencies"], project["optional-dependencies"]["test"])
    )
    assert not set(installed) & set(extra)
    assert installed | extra == pins(ROOT / "conda.yaml")
    assert set(extra) == {"pytest", "pytest-xdist", "pytest-rerunfailures", "hypothesis", "statsmodels"}


@pytest.mark.parametrize("name", ["core", "awq", "vllm", "verl"])
def test_a_lock_has_every_pin_with_hashes_and_accepted_findings_have_reasons(name):
    environment = "conda.yaml" if name == "core" else f"projects/{name}/conda.yaml"
    lock, pinned = (SUPPLY / f"{name}.lock").read_text(), pins(ROOT / environment)
    locked = dict(reversed(locked_versions(name)))
    assert {package: locked.get(re.sub(r"\[.*", "", package.lower())) for package in pinned} == pinned
    assert len(locked) > 100 and lock.count("\n    --hash=sha256:") > len(locked)
    lines = (SUPPLY / "accepted.txt").read_text().splitlines()
    assert all(re.match(r"(CVE|GHSA|PYSEC)-[\w-]+ +\S+ +\w.*\.$", line) for line in lines if line and line[0] != "#")


@pytest.mark.parametrize("name", ["awq", "vllm", "verl"])
def test_where_hashes_are_required_a_step_with_its_own_environment_takes_its_own_lock(name, monkeypatch):
    monkeypatch.setenv("UV_CONSTRAINT", str(SUPPLY / "core.lock"))
    with launch.variables(ROOT / "projects" / name):
        assert os.environ["UV_CONSTRAINT"] == str(SUPPLY / "core.lock")
    monkeypatch.setenv("UV_REQUIRE_HASHES", "true")
    with launch.variables(ROOT / "projects" / name):
        assert os.environ["UV_CONSTRAINT"] == str(SUPPLY / f"{name}.lock")


def test_no_process_of_ours_and_none_that_it_starts_reads_pickles(monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "true")
    process.prepare_process()
    assert os.environ["MLFLOW_ALLOW_PICKLE_DESERIALIZATION"] == "false"
    for engine in engines.MODULES:
        assert engines.environment(engine, None)["MLFLOW_ALLOW_PICKLE_DESERIALIZATION"] == "false"


def test_what_our_processes_import_is_compiled_once_whatever_the_image_says(monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    process.prepare_process()
    assert "PYTHONDONTWRITEBYTECODE" not in os.environ and not sys.dont_write_bytecode


def locked_versions(name: str) -> list[tuple[str, str]]:
    """Return package and version, as often as they are locked: for Python 3.11 first, then for later ones."""
    return re.findall(r"^([\w.-]+)==([^ ;]+)", (SUPPLY / f"{name}.lock").read_text(), re.MULTILINE)


def test_the_bill_of_materials_and_the_licences_are_those_of_the_lock():
    """`.github/supply/run sbom` and `licences` make them, the second from an environment installed from the lock."""
    locked, bill = locked_versions("core"), json.loads((SUPPLY / "sbom.json").read_text())
    assert bill["bomFormat"] == "CycloneDX"
    assert sorted((each["name"], each["version"]) for each in bill["components"]) == sorted(locked)
    locked = dict(reversed(locked))
    with (SUPPLY / "licences.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    listed = {re.sub(r"[-_.]+", "-", row["Name"].lower()): row["Version"] for row in rows}
    assert {name: version for name, version in listed.items() if locked.get(name) != version} == {}
    assert {re.sub(r"[-_.]+", "-", name.lower()) for name in pins(ROOT / "conda.yaml")} <= set(listed)
    assert all(row["License"] for row in rows)
    assert {row["Name"] for row in rows if row["License"] == "UNKNOWN"} == {"cuda-toolkit", "huey", "skops", "torchao"}


def starts_of_servers() -> list[tuple[str, str]]:
    """Return where MLflow's server is started: a function or a document's code block, and its text."""
    found = []
    for name in tracked():
        text = (ROOT / name).read_text(encoding="utf-8", errors="ignore") if name.endswith((".py", ".md")) else ""
        if name.endswith(".md"):
            blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
            found += [(name, block) for block in blocks if "mlflow server" in block]
        elif re.search(STARTED, text):
            functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
            parts = [(f"{name} {node.name}", ast.get_source_segment(text, node)) for node in functions]
            found += [(where, part) for where, part in parts if re.search(STARTED, part)]
    return found


def test_every_server_that_we_start_executes_nothing_of_an_artifact():
    """`mlflow ui`, which a study prints, needs no such variable: MLflow's server itself loads no model."""
    found = starts_of_servers()
    assert {where.split()[0] for where, _ in found} >= {"tests/tracking/team.py", "qrl/tracking/README.md"}
    assert len(found) >= 4
    unsafe = [where for where, text in found if not re.search("SAFE|MLFLOW_ALLOW_PICKLE_DESERIALIZATION=false", text)]
    assert not unsafe
    assert team.SAFE["MLFLOW_ALLOW_PICKLE_DESERIALIZATION"] == "false"


def test_the_version_is_written_once():
    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in metadata["project"]["dynamic"] and "version" not in metadata["project"]
    assert metadata["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "qrl.__version__"}
    assert CliRunner().invoke(cli.cli, ["--version"]).output.strip() == f"qrl, version {qrl.__version__}"


def test_environments_hold_exact_pins_and_share_their_tooling():
    core = pins(ROOT / "conda.yaml")
    for folder in FOLDERS:
        theirs = pins(folder / "conda.yaml")
        for package in ("mlflow", "click", "pydantic", "scipy", "pyarrow"):
            assert theirs[package] == core[package], f"{folder.name}: {package}"
        grades = folder.name != "awq"  # evaluate or train run there, whatever the task
        for package in (*GRADERS, "pebble") if grades else ():
            assert theirs[package] == (core | OLDER.get(folder.name, {}))[package], f"{folder.name}: {package}"
        assert not list(folder.glob("*.py"))
        assert yaml.safe_load((folder / "MLproject").read_text())["entry_points"]


def test_whatever_grades_answers_has_every_tasks_grader():
    core = pins(ROOT / "conda.yaml")
    grading = [
        each
        for each in FOLDERS
        if {"evaluate", "train"} & set(yaml.safe_load((each / "MLproject").read_text())["entry_points"])
    ]
    assert len(grading) == 3
    for folder in grading:
        theirs = pins(folder / "conda.yaml")
        for package in ("datasets", *GRADERS, "pebble"):
            assert theirs[package] == (core | OLDER.get(folder.name, {}))[package], f"{folder.name}: {package}"


def test_nothing_else_lies_at_the_top_level():
    top = {path.split("/")[0] for path in tracked()}
    assert {name for name in top if not name.startswith(".")} <= TOP_LEVEL
    assert "uv.lock" not in top  # it would switch MLflow's uv manager to `uv sync`


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("uvx") is None, reason="pyright runs through uvx: pip install uv")
def test_types_hold_in_the_folders_that_pyproject_names():
    words = ["uvx", "--from", f"pyright[nodejs]=={PYRIGHT}", "pyright", "--pythonpath", sys.executable]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_a_compiler_the_one_package_that_needs_it_says_how_to_get_one(tmp_path):
    uv = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]
    command = shlex.split(uv["extra-build-variables"]["pypcre"]["CC"])
    (tmp_path / "sh").symlink_to(shutil.which("sh"))

    def compiled() -> subprocess.CompletedProcess:
        words = [*command, "-c", "a b.c"]
        return subprocess.run(words, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False)

    without = compiled()
    assert without.returncode == 1 and "apt install gcc" in without.stderr and without.stderr.count("\n") == 1
    (tmp_path / "clang").write_text('#!/bin/sh\necho "$0 $#: $2"\n')
    (tmp_path / "clang").chmod(0o755)
    assert compiled().stdout.endswith("clang 2: a b.c\n")
