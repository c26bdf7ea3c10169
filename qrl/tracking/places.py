"""Which project's environment a step runs in: the core one, or a folder's below projects/."""

from collections.abc import Iterable
from pathlib import Path

from qrl import names
from qrl.recipe import Recipe
from qrl.tracking.keys import ROOT

FOLDERS = {  # step, scheme or engine → folder on a GPU, folder on a CPU; None: the core environment
    ("train", "vllm"): ("vllm", "vllm"),
    ("train", "verl"): ("verl", "verl"),
    ("quantize", names.AWQ): ("awq", "awq"),
    ("evaluate", "vllm"): ("vllm", "vllm_cpu"),
    ("benchmark", "vllm"): ("vllm", "vllm_cpu"),
    ("serve", "vllm"): ("vllm", "vllm_cpu"),
    ("serve", "auto"): ("vllm", None),
}


def side_by_side(schemes: Iterable[str]) -> list[tuple[str, ...]]:
    """Return schemes in groups that share an environment, so that one step can make a group."""
    groups: dict[tuple | None, list[str]] = {}
    for scheme in schemes:
        groups.setdefault(FOLDERS.get(("quantize", scheme)), []).append(scheme)
    return [tuple(group) for group in groups.values()]


def trained_by(recipe: Recipe) -> str:
    """Return what decides the environment of a recipe's training: its trainer, or else the engine of its rollouts."""
    return recipe.rollout.engine if recipe.train.trainer == "trl" else recipe.train.trainer


def of_step(step: str, recipe: Recipe, device: str) -> list[tuple[str, Path]]:
    """Return the jobs that a study makes of a step: what each one makes, if it is a part, and the project it runs.

    Args:
        step: entry point; `merge` has no job where no adapter is trained.
        recipe: the resolved settings.
        device: "cpu" or "cuda", of the machine that runs the step.
    """
    if step == "merge" and not recipe.train.adapter:
        return []
    if step == "quantize":
        groups = side_by_side(recipe.quantize.schemes)
        return [(",".join(group), _folder(step, group[0], device)) for group in groups]
    choice = {"train": trained_by(recipe), "evaluate": recipe.evaluate.engine}.get(step, "")
    return [("", _folder(step, choice, device))]


def _folder(step: str, choice: str, device: str) -> Path:
    gpu_folder, cpu_folder = FOLDERS.get((step, choice), (None, None))
    name = gpu_folder if device == "cuda" else cpu_folder
    return ROOT / "projects" / name if name else ROOT
