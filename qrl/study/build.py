"""Where a step runs, and its environment: built while the steps before it run, with a log of its own."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import click

from qrl import names, process
from qrl import recipe as recipes
from qrl.errors import BadInput, QrlError
from qrl.recipe import Recipe
from qrl.study import auto
from qrl.tracking.keys import ROOT
from qrl.workspace import WORK

PLACE = "QRL_PLACE"  # set by projects/*/MLproject: the folder whose environment this process runs in
FOLDERS = {  # step, scheme or engine → folder on a GPU, folder on a CPU; None: the core environment
    ("train", "vllm"): ("vllm", "vllm"),
    ("train", "verl"): ("verl", "verl"),
    ("quantize", names.AWQ): ("awq", "awq"),
    ("evaluate", "vllm"): ("vllm", "vllm_cpu"),
    ("benchmark", "vllm"): ("vllm", "vllm_cpu"),
    ("serve", "vllm"): ("vllm", "vllm_cpu"),
    ("serve", "auto"): ("vllm", None),
}
COSTS = {  # folder → what its environment costs once; downloads take longer
    "awq": "half a minute and 2.5 GB",
    "vllm": "minutes and more than 5 GB",
    "verl": "minutes and more than 5 GB",
    "vllm_cpu": "a minute and 3.4 GB",
}
MANAGERS = (
    "uv",
    "virtualenv",
)  # under `local` all steps share one environment; conda builds its own when a step begins
LINES = 15  # of a log, shown where a build failed

_running: dict[Path, subprocess.Popen] = {}  # by folder


def environment_for(step: str, choice: str, device: str = "auto") -> Path | None:
    """Return the folder whose environment a step needs, or None if this process runs it; a wheel has no such folders.

    Args:
        step: entry point.
        choice: the scheme (`quantize`), what `trained_by` returns (`train`), or the engine (other steps).
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
        folder = on_gpu if auto.device_of(device) == "cuda" else on_cpu
    return ROOT / "projects" / folder if folder else None


def side_by_side(schemes: Iterable[str]) -> list[tuple[str, ...]]:
    """Return schemes in groups, each of which one step makes: those that share an environment."""
    groups: dict[tuple | None, list[str]] = {}
    for scheme in schemes:
        groups.setdefault(FOLDERS.get(("quantize", scheme)), []).append(scheme)
    return [tuple(group) for group in groups.values()]


def together(schemes: str) -> tuple[str, ...]:
    """Return the schemes in a list by comma, which one step is to make.

    Raises:
        BadInput: one is repeated, or they do not share an environment.
    """
    listed = tuple(part.strip() for part in schemes.split(","))
    if len(set(listed)) < len(listed):
        raise BadInput(f"--scheme is '{schemes}', which repeats a scheme: name each once.")
    if len(groups := side_by_side(listed)) > 1:
        apart = " and ".join(",".join(group) for group in groups)
        raise BadInput(f"--scheme {apart} need different environments: run `quantize` once for each environment.")
    return listed


def trained_by(recipe: Recipe) -> str:
    """Return what decides the environment of a recipe's training: its trainer, or else the engine of its rollouts."""
    return recipe.rollout.engine if recipe.train.trainer == "trl" else recipe.train.trainer


def log(folder: Path) -> Path:
    """Return the file that the build of a folder's environment writes to."""
    return WORK / f"environment-{folder.name}.log"


def is_ready(folder: Path, manager: str) -> bool:
    """Return whether there is nothing to build ahead: no environment of its own, another manager's, or one built."""
    from qrl.tracking import projects

    return folder.name not in COSTS or manager not in MANAGERS or projects.is_built(folder, package(folder))


def package(folder: Path) -> str:
    """Return the name of a package that only this folder's environment has."""
    return folder.name.removesuffix("_cpu")


def begin(folder: Path, manager: str) -> None:
    """Begin to build the environment of a folder, unless it is ready."""
    if is_ready(folder, manager) or folder in _running:
        return
    log(folder).parent.mkdir(parents=True, exist_ok=True)
    program = "import sys; from qrl.tracking import projects; projects.build(*sys.argv[1:])"
    with log(folder).open("w") as written:
        how = {"cwd": ROOT, "stdin": subprocess.DEVNULL, "stdout": written, "stderr": subprocess.STDOUT}
        words = [str(folder), manager, package(folder)]
        _running[folder] = subprocess.Popen([sys.executable, "-c", program, *words], **how)


def wait(folder: Path, manager: str) -> None:
    """Wait for the environment of a folder, whose build begins now if it has not before.

    Raises:
        QrlError: it could not be built; the sentence ends with the log's path and its last lines.
    """
    begin(folder, manager)
    building = _running.pop(folder, None)
    if building is None:
        return
    if building.poll() is None:
        cost = f"which takes {COSTS[folder.name]} in all"
        click.echo(
            f"      The environment of projects/{folder.name} is being built, {cost}; log: {log(folder)}", err=True
        )
    try:
        code = building.wait()
    finally:
        building.terminate()  # does nothing to one that has ended
    if code:
        last = "\n".join(log(folder).read_text(errors="replace").splitlines()[-LINES:])
        raise QrlError(
            f"The environment of projects/{folder.name} could not be built (exit code {code}). Mend what its log says, "
            f"and run the same command again: finished steps are reused. {log(folder).resolve()} ends with:\n{last}"
        )


def announce(recipe: Recipe, name: str = "") -> None:
    """Print what a study will do, by the recipe of this name, and which environments it may build.

    It is called before anything slow is imported.
    """
    schemes, usual = recipe.quantize.schemes, recipes.load("tiny", {"seed": str(recipe.seed)})
    time = ", about 4 minutes on two cores" if recipe == usual else ""
    cells = 2 * (1 + len(schemes) + len(recipe.evaluate.kv_fp8))
    steps = f"train, quantize ({', '.join(schemes)}), evaluate {cells} cells, diagnose, compare, promote"
    by = f" by recipe {name}" if name else ""
    click.echo(f"Study of {recipe.model} on {recipe.task}{by}{time}: {steps}. Finished steps are reused.", err=True)
    if "MLFLOW_RUN_ID" not in os.environ:  # MLflow's command builds environments; others have only their own
        return
    chosen = {("quantize", scheme) for scheme in schemes} | {("train", trained_by(recipe))}
    for step, choice in sorted(chosen | {("evaluate", recipe.evaluate.engine)}):
        if folders := dict.fromkeys(filter(None, FOLDERS.get((step, choice), ()))):
            costs = " or ".join(f"{COSTS[name]}, log in {log(Path(name))}" for name in folders)
            built = f"{choice} has its own environment, built beside training if missing: {costs}"
            click.echo(f"      {built}", err=True)
