"""The order of a study's steps. Each step is launched as a project run of its own, never imported."""

import contextlib
import itertools
import time
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from qrl import checkpoint, cluster, evaluate, names, source, tasks
from qrl.errors import BadInput, GateRefused, Objections, QrlError
from qrl.formats import groups
from qrl.recipe import Recipe
from qrl.study import preflight
from qrl.study.build import environment_for, side_by_side, trained_by
from qrl.study.environments import begin_builds, check_checkout, look_ahead
from qrl.study.launch import Failed, Launcher, Result, Step
from qrl.tracking import keys
from qrl.train import parallel

Model = tuple[str, str]  # address and digest
Models = dict[str, Model]  # by variant or by variant:scheme


def study(recipe: Recipe, overrides: dict[str, str], *, yes: bool = False) -> str:
    """Run the whole study, reuse finished steps, and print the table, the verdict and what to do next.

    Args:
        recipe: the resolved settings.
        overrides: recipe name and overrides as typed; every step gets them, so its run shows how to repeat it alone.
        yes: start although the machine, the sizes or the base's trial speak against it; only warn of them.

    Returns:
        The id of the study's run.

    Raises:
        BadInput: the study cannot succeed as it is set up, or should not begin without `yes`.
        QrlError: a step failed.
        GateRefused: a gate refused a stage, after everything else is done.
    """
    from qrl import registry
    from qrl.study import report
    from qrl.tracking import addresses, runs, store

    began = time.monotonic()
    check_checkout("study")
    objections = Objections()  # all that can be known before a model is loaded
    name = objections.check(registry.registered_name, recipe)  # the last step would refuse a bad name
    device, base = preflight.check(recipe, overrides, yes=yes, objections=objections)
    taught_by = recipe.train.teacher
    teacher = objections.check(lambda: checkpoint.check(addresses.folder(taught_by)).digest) if taught_by else None
    ahead = None
    if base:
        ahead = objections.check(
            look_ahead, "study", lambda dry_run: StudySteps(recipe, dry_run, device).cells(base, teacher)
        )
    if name and ahead and not ahead.empty:  # the last step would refuse a stage of another cell too
        objections.check(registry.check_declared, name, recipe.promote.declared)
    preflight.rehearse(recipe, device, ahead, yes=yes, objections=objections)
    begin_builds(ahead)
    store.prepare()
    shown = f"study of {Path(recipe.model).name} on {tasks.label(recipe.task)}"
    with runs.step("study", recipe, sections=tuple(keys.SECTIONS), params={"device": device}, run_name=shown) as run:
        launcher = Launcher(
            overrides, run.info.run_id, 5 + len(side_by_side(recipe.quantize.schemes)) + recipe.train.adapter
        )
        steps = StudySteps(recipe, launcher, device)
        try:
            models, cells = steps.cells(base, teacher)
            steps.diagnose(base, models[f"{recipe.train.variant}:{names.FULL}"], models)
            steps.compare(cells)
        except QrlError:
            report.leave(launcher)
            raise
        report.show(recipe, launcher)
        try:
            stage = steps.promote(cells)
        except GateRefused as refused:
            stage = steps.earned(cells)
            report.close(recipe, launcher, time.monotonic() - began, stage=stage, refused=str(refused))
            raise
        report.close(recipe, launcher, time.monotonic() - began, stage=stage)
        return run.info.run_id


class StudySteps:
    """The steps of one study: what each one needs, and what it gives to the next."""

    def __init__(self, recipe: Recipe, launcher: Launcher, device: str) -> None:
        self.recipe, self.launcher, self.device = recipe, launcher, device

    @cached_property
    def group_size(self) -> int:
        """The size of groups that every variant is stored in, since all have the base's layers."""
        return groups.of(source.locate(self.recipe.model), self.recipe.quantize.group_size)

    def cells(self, base: str, teacher: str | None) -> tuple[Models, dict[str, Result]]:
        """Return the study's models and their evaluations, by `variant:scheme`; `base` and `teacher` are digests."""
        trained = self.train(base, teacher)
        models = self.quantize({names.BASE: (self.recipe.model, base), self.recipe.train.variant: trained})
        return models, self.evaluate(models)

    def train(self, base: str, teacher: str | None) -> Model:
        """Return the trained model, merged if it was trained as an adapter; `base` and `teacher` are digests."""
        settings = self.recipe.train
        method = settings.title + ("" if settings.qat == "none" else f" in {settings.qat}")
        nodes = cluster.chosen()
        gpus = nodes.resources("train").gpus if nodes else None
        count = max(nodes.processes() if nodes else 1, parallel.processes(settings, self.device, gpus))
        inputs = {"teacher": teacher, "processes": count, "group_size": self.group_size}
        key = keys.trained(self.recipe, base, self.device, **inputs)
        result = self.trained = self._one("train", f"{method}, {settings.steps} steps of {settings.batch}", key)
        if settings.adapter:
            adapter = f"runs:/{result.run_id}/adapter"
            into = f"the base unpacked from {settings.storage}" if settings.packed else "the full-precision base"
            key = keys.merged(self.recipe, base, adapter, self.device)
            result = self._one("merge", f"adapter into {into}", key, {"adapter": adapter})
        return _model(result)

    def quantize(self, models: Models) -> Models:
        """Return every variant under every scheme, full precision included, by `variant:scheme`."""
        recipe, results = self.recipe, {}

        def parameters(missing: list[str]) -> dict[str, str]:
            variants, schemes = (
                dict.fromkeys(part) for part in zip(*(cell.split(":") for cell in missing), strict=True)
            )
            return {"scheme": ",".join(schemes), "models": _listed(models, variants)}

        def wanted(schemes: Iterable[str]) -> dict[str, str]:
            pairs = itertools.product(schemes, models.items())
            return {
                f"{variant}:{scheme}": keys.quantized(recipe, scheme, digest, self.device, group_size=self.group_size)
                for scheme, (variant, (_, digest)) in pairs
            }

        for group in side_by_side(recipe.quantize.schemes):
            lacking: dict[tuple, list[str]] = {}  # variants that are still to be quantized → in which schemes
            for scheme in group:
                missing = self.launcher.lacking("quantize", wanted([scheme]))
                lacking.setdefault(tuple(cell.partition(":")[0] for cell in missing), []).append(scheme)
            for schemes in lacking.values():
                title, folder = f"{', '.join(schemes)} of {' and '.join(models)}", environment_for("quantize", group[0])
                results |= self.launcher.obtain(Step("quantize", title, wanted(schemes), parameters, folder))
        cells = {f"{variant}:{names.FULL}": model for variant, model in models.items()}
        made = (f"{variant}:{scheme}" for scheme in recipe.quantize.schemes for variant in models)
        return cells | {cell: _model(results[cell]) for cell in made}

    def evaluate(self, models: Models, failed: Failed | None = None) -> dict[str, Result]:
        """Return the evaluation of every cell, by `variant:scheme`; `failed` as in `Launcher.obtain`."""
        for scheme in evaluate.kv_schemes(self.recipe):  # the same checkpoints, in cells of their own
            plain = {cell: model for cell, model in models.items() if cell.endswith(f":{names.stored(scheme)}")}
            models = models | {f"{cell}{names.KV_FP8}": model for cell, model in plain.items()}
        title = f"{len(models)} cells on {preflight.asked(self.recipe)}"
        wanted = {cell: keys.cell(self.recipe, *cell.split(":"), models[cell][1], self.device) for cell in models}
        folder = environment_for("evaluate", self.recipe.evaluate.engine, self.device)
        step = Step("evaluate", title, wanted, lambda missing: {"cells": _listed(models, missing)}, folder)
        return self.launcher.obtain(step, failed)

    def diagnose(self, base: str, trained: Model, models: Models) -> Result:
        """Return how training moved the weights, and what every scheme keeps of the update.

        The trained variant is called `grpo` here, whatever its label.
        """
        quantized: Models = {}
        for cell, model in models.items():
            variant, scheme = cell.split(":")
            if scheme != names.FULL:
                quantized[f"{variant if variant == names.BASE else names.GRPO}:{scheme}"] = model
        key = keys.diagnosis(self.recipe, base, trained[1], {cell: digest for cell, (_, digest) in quantized.items()})
        parameters = {"base": self.recipe.model, "trained": trained[0], "quantized": _listed(quantized, quantized)}
        return self._one("diagnose", "weights before and after training", key, parameters)

    def compare(self, cells: dict[str, Result]) -> Result:
        """Return the comparison of all cells."""
        run_ids = [cell.run_id for cell in cells.values()]
        key = keys.comparison(self.recipe, run_ids)
        return self._one("compare", "gains and gain survival", key, {"cells": ",".join(run_ids)})

    def promote(self, cells: dict[str, Result]) -> str:
        """Promote the study's cells to their stages, each through its gate, and return the last stage.

        Never reused, since a stage may have moved. A stage whose cell the study lacks stays as it is.
        """
        from qrl import registry

        declared = {stage.stage: stage.cell for stage in self.recipe.promote.declared}
        chosen = {stage: cells[cell].run_id for stage, cell in declared.items() if cell in cells}
        absent = {stage: cell for stage, cell in declared.items() if stage not in chosen}
        unchanged = [f"; {stage} is unchanged: no cell {cell}" for stage, cell in absent.items()]
        parameters = {"stage": ",".join(chosen), "cell": ",".join(chosen.values()), "model": self.recipe.model}
        parameters["registered_name"] = registry.registered_name(self.recipe)  # reused cells may have other ones
        self.launcher.promote(f"{' → '.join(chosen)}{''.join(unchanged)}", parameters)
        return list(chosen)[-1]

    def earned(self, cells: dict[str, Result]) -> str | None:
        """Return the last stage that one of the study's cells holds; None where none does."""
        from qrl import registry

        name, held = registry.registered_name(self.recipe), []
        for stage in self.recipe.promote.declared:
            with contextlib.suppress(BadInput):  # no version there
                gate = registry.resolve(name, stage.stage).gate(stage.stage)
                if gate and stage.cell in cells and gate.run == cells[stage.cell].run_id:
                    held.append(stage.stage)
        return held[-1] if held else None

    def _one(self, name: str, title: str, key: str, parameters: dict[str, str] | None = None) -> Result:
        folder = environment_for(name, trained_by(self.recipe))  # other than None for `train` alone
        step = Step(name, title, {name: key}, lambda missing: parameters or {}, folder)
        return self.launcher.obtain(step)[name]


def _model(result: Result) -> Model:
    return result.outputs.models["model"], result.outputs.values["digest"]


def _listed(models: Models, labels: Iterable[str]) -> str:
    return ",".join(f"{label}={models[label][0]}" for label in labels)
