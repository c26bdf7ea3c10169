"""Which environment a step runs in, and how it gets there: the same rules for a command and for a study's steps.

Most steps run in the core environment (conda.yaml). FOLDERS lists the others: folders under projects/, each with an
environment of several gigabytes that MLflow builds. Bad input is therefore refused before a step is handed over.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from qrl import names, process
from qrl.errors import BadInput
from qrl.study.launch import DryRun, Launcher, launch, local_path
from qrl.tracking import projects
from qrl.tracking.keys import ROOT

PLACE = "QRL_PLACE"  # set by projects/*/MLproject: the folder whose environment this process runs in
FOLDERS = {  # step, scheme or engine → folder on a GPU, folder on a CPU; None: the core environment
    ("train", "vllm"): ("vllm", "vllm"),
    ("quantize", names.AWQ): ("awq", "awq"),
    ("evaluate", "vllm"): ("vllm", "vllm_cpu"),
    ("benchmark", "vllm"): ("vllm", "vllm_cpu"),
    ("serve", "vllm"): ("vllm", "vllm_cpu"),
    ("serve", "auto"): ("vllm", None),
}


def environment_for(step: str, choice: str, device: str = "auto") -> Path | None:
    """Return the folder whose environment a step needs, or None if this process runs it; a wheel has no such folders.

    Args:
        step: entry point.
        choice: the scheme (`quantize`) or the engine (other steps).
        device: the recipe's device; it decides between vLLM's two environments.
    """
    on_gpu, on_cpu = FOLDERS.get((step, choice), (None, None))
    here = os.environ.get(PLACE)
    if on_gpu is None or here in (on_gpu, on_cpu or on_gpu) or not (ROOT / "MLproject").is_file():
        return None
    if step == "train" and process.world_size() > 1:  # torchrun has started every process in its environment already
        return None
    folder = on_gpu
    if on_gpu != on_cpu:
        from qrl.engine import device as devices  # imports torch, which takes seconds

        folder = on_gpu if devices.choose(device) == "cuda" else on_cpu
    return ROOT / "projects" / folder if folder else None


def check_reachable(step: str, folder: Path | None) -> None:
    """Check that the environment in `folder` will be built, for a command that began as the entry point `step`.

    Raises:
        BadInput: this Python, which all steps share without `--env-manager`, lacks the environment's package.
    """
    if folder in (None, ROOT) or projects.env_manager(os.environ.get("MLFLOW_RUN_ID")) != "local":
        return
    package = folder.name.removesuffix("_cpu")  # only its environment has a package of this name
    python = shutil.which("python", path=local_path()) or sys.executable
    program = f"import importlib.util, sys; sys.exit(importlib.util.find_spec('{package}') is None)"
    if subprocess.run([python, "-c", program], env=os.environ | {PLACE: folder.name}, check=False).returncode:
        raise BadInput(
            f"`{step}` needs the environment of projects/{folder.name}, but {python} has no package {package}: "
            f"run `mlflow run . -e {'main' if step == 'study' else step} … --env-manager uv`, which builds that "
            "environment, or choose a scheme or an engine that needs none."
        )


def look_ahead(step: str, walk: Callable[[Launcher], object]) -> DryRun:
    """Find, before a study begins, what it has still to make, and check that its steps' environments can be built.

    Args:
        step: the entry point.
        walk: obtains the study's results from the launcher that it is given, here a `DryRun`.

    Raises:
        BadInput: an environment is missing, as in `check_reachable`; finished steps need none.
    """
    from qrl.tracking import store

    there = store.is_there()
    if there:
        store.prepare()
    ahead = DryRun(empty=not there)
    walk(ahead)
    for folder in dict.fromkeys(ahead.folders):
        check_reachable(step, folder)
    return ahead


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
