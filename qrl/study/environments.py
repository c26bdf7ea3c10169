"""How a step gets to the environment that it needs: the same rules for a command and for a study's steps.

Most steps run in the core environment (conda.yaml). `build.FOLDERS` lists the others: folders under projects/, each
with an environment of several gigabytes. Bad input is therefore refused before a step is handed over.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from qrl.errors import BadInput
from qrl.recipe import Recipe
from qrl.study import build
from qrl.study.build import PLACE, environment_for
from qrl.study.launch import DryRun, Launcher, launch, local_path, variables
from qrl.tracking import projects
from qrl.tracking.keys import ROOT


def check_reachable(step: str, folder: Path | None) -> None:
    """Check that the environment in `folder` is there or will be built, for a command that began as entry point `step`.

    Raises:
        BadInput: this Python, which all steps share without `--env-manager`, lacks the environment's package.
    """
    if folder in (None, ROOT) or _manager() != "local":
        return
    package = build.package(folder)
    python = shutil.which("python", path=local_path()) or sys.executable
    program = f"import importlib.util, sys; sys.exit(importlib.util.find_spec('{package}') is None)"
    if subprocess.run([python, "-c", program], env=os.environ | {PLACE: folder.name}, check=False).returncode:
        raise BadInput(
            f"`{step}` needs the environment of projects/{folder.name}, but {python} has no package {package}: "
            f"run `mlflow run . -e {'main' if step == 'study' else step} … --env-manager uv`, which builds that "
            "environment, or choose a scheme or an engine that needs none."
        )


def _manager() -> str:
    return projects.env_manager(os.environ.get("MLFLOW_RUN_ID"))


def prepare_environments(step: str, recipe: Recipe, walk: Callable[[Launcher], object]) -> None:
    """Begin to build the environments that a study's unfinished steps need, before it trains anything.

    Finished steps need none. The store is searched for them only where an environment is missing: `walk` obtains the
    study's results from the launcher it is given, here a `DryRun`.

    Raises:
        BadInput: an environment is missing and cannot be built, as in `check_reachable`.
    """
    from qrl.tracking import store

    folders = {environment_for("quantize", scheme) for scheme in recipe.quantize.schemes}
    folders.add(environment_for("train", recipe.rollout.engine))
    folders.add(environment_for("evaluate", recipe.evaluate.engine, recipe.device))
    manager = _manager()
    if manager == "local":
        try:
            for folder in folders:
                check_reachable(step, folder)
        except BadInput:
            if not store.is_there():
                raise
            store.prepare()
            walk(DryRun(lambda folder: check_reachable(step, folder)))
        return
    missing = {folder for folder in folders if folder and not build.is_ready(folder, manager)}
    if missing and store.is_there():
        store.prepare()
        needed: set[Path] = set()
        walk(DryRun(needed.add))
        missing &= needed
    for folder in missing:
        with variables(folder):
            build.begin(folder, manager)


def check_checkout(step: str) -> None:
    """Check that this package lies in a checkout: a wheel has neither MLproject nor the environments' files.

    Raises:
        BadInput: it was installed from a wheel.
    """
    if not (ROOT / "MLproject").is_file():
        raise BadInput(
            f"`{step}` needs MLproject, conda.yaml and projects/, which only a checkout of the project has, but this "
            f"qrl is installed in {ROOT}: clone the project and run `python -m qrl {step}` in its folder, or install "
            "it from there with `pip install -e .`."
        )


def hand_over(folder: Path, step: str, parameters: dict[str, str]) -> None:
    """Run this very step in another environment, under the run that it already has, if it has one."""
    from qrl.tracking import signals, store

    check_reachable(step, folder)
    signals.guard()
    store.prepare()
    launch(folder, step, parameters, run_id=os.environ.pop("MLFLOW_RUN_ID", None))
