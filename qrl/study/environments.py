"""How a step gets to the environment that it needs: the same rules for a command and for a study's steps.

`build` knows which step needs which environment. A command that needs another one than its own is handed over: MLflow
runs the same entry point again in the project that has it. Bad input is therefore refused before that.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

from qrl import process
from qrl.errors import BadInput
from qrl.study import build
from qrl.study.build import PLACE
from qrl.study.launch import DryRun, Launcher, launch, local_path, variables
from qrl.study.warming import WarmProcesses
from qrl.tracking import projects
from qrl.tracking.keys import ROOT
from qrl.workspace import write_atomically

PATH_FILE = "qrl-checkout.pth"  # in an environment: the checkout whose package is imported there


def check_reachable(step: str, folder: Path | None) -> None:
    """Check that the environment in `folder` exists or will be built, for a command that began as entry point `step`.

    Raises:
        BadInput: this Python, which all steps share without `--env-manager`, lacks the environment's package.
    """
    if folder in (None, ROOT) or _manager() != "local":
        return
    package = build.package(folder)
    python = shutil.which("python", path=local_path()) or sys.executable
    program = f"import importlib.util, sys; sys.exit(importlib.util.find_spec('{package}') is None)"
    is_missing = subprocess.run([python, "-c", program], env=os.environ | {PLACE: folder.name}, check=False).returncode
    if is_missing:
        entry = "main" if step == "study" else step
        raise BadInput(
            f"`{step}` needs the environment of projects/{folder.name}, but {python} has no package {package}: "
            f"run {process.environment_command(entry)}, which builds that environment, or choose a "
            "scheme or an engine that needs none, such as --quantize.schemes nf4,awq-ct."
        )


def _manager() -> str:
    return projects.env_manager(os.environ.get("MLFLOW_RUN_ID"))


def look_ahead(step: str, walk: Callable[[Launcher], object]) -> DryRun:
    """Find, before a study begins, what it has still to make, and check that its steps' environments can be built.

    Args:
        step: the entry point.
        walk: obtains the study's results from the launcher that it is given, here a `DryRun`.

    Raises:
        BadInput: an environment is missing, as in `check_reachable`; finished steps need none.
    """
    from qrl.tracking import store

    has_store = store.is_there()
    if has_store:
        store.prepare()
    dry_run = DryRun(empty=not has_store)
    walk(dry_run)
    for folder in dict.fromkeys(dry_run.folders):
        check_reachable(step, folder)
    return dry_run


def begin_builds(dry_run: DryRun) -> None:
    """Begin to build the environments that the steps still to run need, beside the steps before them."""
    for folder in dict.fromkeys(dry_run.folders):
        with variables(folder):
            build.begin(folder, _manager())


def begin_warming(warm_processes: WarmProcesses, device: str, dry_run: DryRun) -> None:
    """Start processes that import what the steps still to run need in environments that are there already."""
    warm_processes.add(device, dry_run.folders, _manager())


def check_checkout(step: str) -> None:
    """Check that this package is in a checkout: a wheel has neither MLproject nor the environments' files.

    Raises:
        BadInput: it was installed from a wheel.
    """
    if not (ROOT / "MLproject").is_file():
        raise BadInput(
            f"`{step}` needs MLproject, conda.yaml and projects/, which only a checkout of the project has, but this "
            f"qrl is installed in {ROOT}: clone the project and run `python -m qrl {step}` in its folder, or install "
            "it from there with `pip install -e .`."
        )


def put_on_path() -> None:
    """Let `import qrl` work from any folder in an environment that MLflow built; it holds third-party packages alone.

    Checkouts with equal requirements share an environment: there, the one that ran last is found from other folders.
    In a checkout's own folder Python finds that one first. Environments that somebody else made stay as they are.
    """
    packages = Path(sysconfig.get_path("purelib"))
    is_installed = any(packages.glob("qrl-*.dist-info"))
    if is_installed or sys.prefix == sys.base_prefix or not Path(sys.prefix).name.startswith("mlflow-"):
        return
    path_file = packages / PATH_FILE
    with contextlib.suppress(OSError):  # of another user, say: nothing that runs needs the file
        if not path_file.is_file() or path_file.read_text() != f"{ROOT}\n":
            with write_atomically(path_file) as partial:
                partial.write_text(f"{ROOT}\n")


def hand_over(folder: Path, step: str, parameters: dict[str, str]) -> None:
    """Run this very step in another environment, under the run that it already has, if it has one."""
    from qrl.tracking import signals, store

    check_reachable(step, folder)
    signals.guard()
    store.prepare()
    launch(folder, step, parameters, run_id=os.environ.pop("MLFLOW_RUN_ID", None))
