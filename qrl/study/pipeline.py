"""The order of a study, and where each step runs. Steps are launched as project runs, never imported."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from qrl import names, process, source
from qrl.errors import BadInput, GateRefused, QrlError
from qrl.recipe import Recipe
from qrl.study.launch import DryRun, Launcher, Result, launch, local_path
from qrl.tracking import keys, projects
from qrl.tracking.keys import ROOT

NEEDS = {
    "awq": "awq",
    "vllm": "vllm",
    "vllm_cpu": "vllm",
}  # folder under projects/ → the package that only its environment has
PLACE = "QRL_PLACE"  # set by the MLproject files under projects/: which environment this process runs in
Models = dict[str, tuple[str, str]]  # variant or "variant:scheme" → address and digest


def environment_for(step: str, choice: str, device: str = "auto") -> Path | None:
    """The folder whose environment a step needs, or None where this process is in it already.

    Args:
        step: `train`, `quantize`, `evaluate`, `benchmark` or `serve`; every other step runs in the core environment.
        choice: the scheme, or the engine.
        device: the recipe's device, where the engine is left to us.
    """
    wanted = None
    if step == "quantize" and choice == names.AWQ:
        wanted = "awq"
    if (
        step == "train" and choice == "vllm" and process.world_size() == 1
    ):  # several processes were started where they are to run
        wanted = "vllm"
    here = os.environ.get(PLACE)
    engines = here in (
        "vllm",
        "vllm_cpu",
    )  # whoever sent us chose for this machine, and asking torch again would take seconds
    if not engines and (
        (step == "serve" and choice in ("auto", "vllm")) or (step in ("evaluate", "benchmark") and choice == "vllm")
    ):
        from qrl.engine import device as devices

        on_gpu = devices.choose(device) == "cuda"
        if on_gpu or choice == "vllm":
            wanted = "vllm" if on_gpu else "vllm_cpu"
    return ROOT / "projects" / wanted if wanted and here != wanted else None


def check_reachable(step: str, folder: Path | None) -> None:
    """Refuses a step in another environment where nobody builds that one: without `mlflow run --env-manager`, steps share this Python.

    Args:
        step: entry point.
        folder: from `environment_for`.

    Raises:
        BadInput: this Python lacks what the step needs.
    """
    if folder is None or folder.name not in NEEDS or projects.env_manager(os.environ.get("MLFLOW_RUN_ID")) != "local":
        return
    package, python = NEEDS[folder.name], shutil.which("python", path=local_path()) or sys.executable
    asked = f"import importlib.util, sys; sys.exit(importlib.util.find_spec('{package}') is None)"
    if subprocess.run([python, "-c", asked], env=os.environ | {PLACE: folder.name}, check=False).returncode:
        raise BadInput(
            f"`{step}` needs the environment of projects/{folder.name}, but {python} has no package {package}: start it as "
            f"`mlflow run . -e {'main' if step == 'study' else step} … --env-manager uv`, which builds that environment, or choose what needs none."
        )


def check_environments(step: str, recipe: Recipe, walk: Callable[[Launcher], object]) -> None:
    """Refuses a study before it begins where a step that is still to run needs an environment that nobody builds.

    Steps that are finished already need none. Only where an environment is missing is the store asked for them.

    Args:
        step: entry point.
        recipe: of which steps run elsewhere.
        walk: obtains the study's results, as far as they matter here, from the launcher that it is given.

    Raises:
        BadInput: as `check_reachable`.
    """
    from qrl.tracking import store

    schemes = (environment_for("quantize", scheme) for scheme in recipe.quantize.schemes)
    places = {
        environment_for("train", recipe.rollout.engine),
        environment_for("evaluate", recipe.evaluate.engine, recipe.device),
        *schemes,
    }
    try:
        for folder in places:
            check_reachable(step, folder)
    except BadInput:
        if not store.is_there():
            raise
        store.prepare()
        walk(DryRun(lambda folder: check_reachable(step, folder)))


def check_schemes(recipe: Recipe, base: Path) -> None:
    """Tells before anything is trained what could not be stored after it: a scheme's settings, or a model that it does not fit.

    Args:
        recipe: the schemes' section.
        base: the model's checkpoint folder.

    Raises:
        BadInput: which scheme, and why.
    """
    from qrl import quantize
    from qrl.quantize import settings as choices

    for scheme in recipe.quantize.schemes:
        settings = choices.of(scheme, recipe.quantize, recipe.seed)
        if (
            recipe.model not in source.SHIPPED
        ):  # which fits all of them; looking takes the seconds that torch's import does
            quantize.check_fit(base, settings)


def hand_over(folder: Path, step: str, parameters: dict[str, str]) -> None:
    """Runs this very step in another environment, under the run that it already has, if it has one."""
    from qrl.tracking import signals, store

    check_reachable(step, folder)
    signals.guard()
    store.prepare()
    launch(folder, step, parameters, run_id=os.environ.pop("MLFLOW_RUN_ID", None), name=step)


def study(recipe: Recipe, overrides: dict[str, str]) -> None:
    """Runs the whole study, reusing finished steps, and prints the table, the verdict and what to do next.

    Args:
        recipe: the resolved settings.
        overrides: recipe name and overrides as given, handed to every step so that each run says how to repeat it alone.
    """
    from qrl import checkpoint, registry
    from qrl import evaluate as evaluation
    from qrl.engine import device as devices
    from qrl.quantize import settings as choices
    from qrl.study import report
    from qrl.tasks import prompt
    from qrl.tracking import addresses, runs, store
    from qrl.train import rollout

    prompt.check(recipe.task, recipe.prompt)
    registry.registered_name(recipe)  # what the last step would refuse
    report.warn(
        choices.unheeded(recipe.quantize, recipe.quantize.schemes, overrides) + evaluation.unheeded(recipe.evaluate)
    )
    base = checkpoint.check(source.locate(recipe.model))
    check_schemes(recipe, base.path)
    device = devices.choose(recipe.device)
    rollout.check(recipe.rollout, device, recipe.train)
    teacher = checkpoint.check(addresses.folder(recipe.train.teacher)).digest if recipe.train.teacher else None
    check_environments("study", recipe, lambda ahead: StudySteps(recipe, ahead, device).cells(base.digest, teacher))
    store.prepare()
    began = time.monotonic()
    with runs.step("study", recipe, sections=tuple(keys.SECTIONS), params={"device": device}) as run:
        steps = 5 + len(recipe.quantize.schemes) + (recipe.train.adapter)
        launcher = Launcher(overrides, run.info.run_id, steps)
        order = StudySteps(recipe, launcher, device)
        models, cells = order.cells(base.digest, teacher)
        diagnosed = order.diagnose(base.digest, models[f"{recipe.train.variant}:{names.FULL}"], models)
        compared = order.compare(cells)
        report.show(recipe, launcher, compared, diagnosed, order.trained)
        try:
            stage = order.promote(cells)
        except GateRefused:
            report.close(recipe, launcher, time.monotonic() - began, stage=None)
            raise
        report.close(recipe, launcher, time.monotonic() - began, stage=stage)


class StudySteps:
    """What each step of a study needs, and what it gives to the next."""

    def __init__(self, recipe: Recipe, launcher: Launcher, device: str) -> None:
        self.recipe, self.launcher, self.device = recipe, launcher, device

    def cells(self, base: str, teacher: str | None) -> tuple[Models, dict[str, Result]]:
        """The models of a study and their evaluations, by `variant:scheme`; arguments as `train` takes them."""
        trained = self.train(base, teacher)
        models = self.quantize({names.BASE: (self.recipe.model, base), self.recipe.train.variant: trained})
        return models, self.evaluate(models)

    def train(self, base: str, teacher: str | None) -> tuple[str, str]:
        """The trained model, merged where it was trained as an adapter: address and digest.

        Args:
            base: digest of the model that training starts from.
            teacher: digest of the model that is distilled, if one is.
        """
        key = keys.trained(self.recipe, base, self.device, teacher=teacher)
        settings = self.recipe.train
        how = ("distillation" if settings.teacher else "GRPO") + (
            "" if settings.qat == "none" else f" in {settings.qat}"
        )
        title = (
            f"train: {how}, {settings.steps} steps of {settings.prompts_per_step} × {settings.generations} completions"
        )
        made = self.trained = self._one(
            title, "train", key, folder=environment_for("train", self.recipe.rollout.engine)
        )
        if settings.adapter:
            adapter = f"runs:/{made.run_id}/adapter"
            key = keys.merged(self.recipe, base, adapter, self.device)
            over = f", over what {settings.storage} unpacks to" if settings.packed else ""
            made = self._one(f"merge: adapter into full precision{over}", "merge", key, {"adapter": adapter})
        return made.outputs.models["model"], made.outputs.values["digest"]

    def quantize(self, models: Models) -> Models:
        """Every variant under every scheme, full precision included, by `variant:scheme`."""
        cells = {f"{variant}:{names.FULL}": model for variant, model in models.items()}
        for scheme in self.recipe.quantize.schemes:
            wanted = {
                variant: keys.quantized(self.recipe, scheme, digest, self.device)
                for variant, (_, digest) in models.items()
            }
            made = self.launcher.obtain(
                f"quantize: {scheme}, {' and '.join(models)}",
                "quantize",
                wanted,
                lambda missing, scheme=scheme: {
                    "scheme": scheme,
                    "models": ",".join(f"{variant}={models[variant][0]}" for variant in missing),
                },
                environment_for("quantize", scheme) or ROOT,
            )
            for variant, result in made.items():
                cells[f"{variant}:{scheme}"] = (result.outputs.models["model"], result.outputs.values["digest"])
        return cells

    def evaluate(
        self, models: Models, failed: Callable[[list[str], QrlError], None] | None = None
    ) -> dict[str, Result]:
        """The evaluation of every cell, by `variant:scheme`; `failed` as `Launcher.obtain` takes it."""
        wanted = {
            cell: keys.cell(self.recipe, *cell.split(":"), digest, self.device) for cell, (_, digest) in models.items()
        }
        return self.launcher.obtain(
            f"evaluate: {len(models)} cells on {self.recipe.evaluate.n} held-out questions",
            "evaluate",
            wanted,
            lambda missing: {"cells": ",".join(f"{cell}={models[cell][0]}" for cell in missing)},
            environment_for("evaluate", self.recipe.evaluate.engine, self.device) or ROOT,
            failed,
        )

    def diagnose(self, base: str, trained: tuple[str, str], models: Models) -> Result:
        """What training did to the weights, and what every scheme keeps of it; the trained variant is `grpo` here, whatever its label."""
        quantized = {}
        for cell, model in models.items():
            variant, scheme = cell.split(":")
            if scheme != names.FULL:
                quantized[f"{variant if variant == names.BASE else names.GRPO}:{scheme}"] = model
        key = keys.diagnosis(self.recipe, base, trained[1], {cell: digest for cell, (_, digest) in quantized.items()})
        parameters = {"base": self.recipe.model, "trained": trained[0]}
        parameters["quantized"] = ",".join(f"{cell}={address}" for cell, (address, _) in quantized.items())
        return self._one("diagnose: weights before and after training", "diagnose", key, parameters)

    def compare(self, cells: dict[str, Result]) -> Result:
        """The table of cells."""
        run_ids = [cell.run_id for cell in cells.values()]
        key = keys.comparison(self.recipe, run_ids)
        return self._one("compare: deltas and gain survival", "compare", key, {"cells": ",".join(run_ids)})

    def promote(self, cells: dict[str, Result]) -> str:
        """Versions of the registry, each through its gate; the last stage. Never reused: a stage may have moved since.

        Stage awq takes the cell grpo:awq and no other scheme's: in a study without it that stage stays as it was.
        """
        earned = {
            "base": f"{names.BASE}:{names.FULL}",
            "grpo": f"{names.GRPO}:{names.FULL}",
            "awq": f"{names.GRPO}:{names.AWQ}",
        }
        chosen = {stage: cells[cell].run_id for stage, cell in earned.items() if cell in cells}
        parameters = {"stage": ",".join(chosen), "cell": ",".join(chosen.values())}
        left = "".join(
            f"; {stage} stays as it is, for there is no cell {cell}"
            for stage, cell in earned.items()
            if stage not in chosen
        )
        self.launcher.run(f"promote: {' → '.join(chosen)}{left}", "promote", parameters)
        return list(chosen)[-1]

    def _one(
        self, title: str, step: str, key: str, parameters: dict[str, str] | None = None, folder: Path | None = None
    ) -> Result:
        return self.launcher.obtain(title, step, {step: key}, lambda missing: parameters or {}, folder or ROOT)[step]
