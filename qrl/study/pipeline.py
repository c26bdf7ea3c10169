"""The order of a study's steps. Each step is launched as a project run of its own, never imported.

`StudySteps` has a method a step: it names the result that it wants by a cache key, and gets the run that made it, now
or in an earlier study. The same methods walk through a `DryRun` first, which only looks up what the store lacks.
"""

import contextlib
import itertools
import time
from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

from qrl import checkpoint, cluster, evaluate, names, source, tasks
from qrl.errors import BadInput, GateRefused, Objections, QrlError
from qrl.formats import groups
from qrl.recipe import Recipe
from qrl.study import preflight
from qrl.study.build import environment_for
from qrl.study.environments import begin_builds, begin_warming, check_checkout, look_ahead
from qrl.study.launch import DryRun, Failed, Launcher, Result, Step
from qrl.study.warming import WarmProcesses
from qrl.tracking import addresses, keys
from qrl.tracking.places import side_by_side, trained_by
from qrl.train import parallel


class Model(NamedTuple):
    """A model as steps name it to each other."""

    address: str
    digest: str


class Training(NamedTuple):
    """What a training left."""

    model: Model  # merged, if it was trained as an adapter
    run_id: str  # of the training itself, which has the curves


Models = dict[str, Model]  # by variant or by variant:scheme


def study(recipe: Recipe, overrides: dict[str, str], *, yes: bool = False, begun: WarmProcesses | None = None) -> str:
    """Run the whole study, reuse finished steps, and print the table, the verdict and what to do next.

    Args:
        recipe: the resolved settings.
        overrides: recipe name and overrides as typed; every step gets them, so its run shows how to repeat it alone.
        yes: start although the machine, the sizes or the base's trial speak against it; only warn of them.
        begun: warm processes that the caller has begun; default: none.

    Returns:
        The id of the study's run.

    Raises:
        BadInput: the study cannot succeed as it is set up, or should not begin without `yes`.
        QrlError: a step failed.
        GateRefused: a gate refused a stage, after everything else is done.
    """
    from qrl.study import report
    from qrl.tracking import runs, store

    start = time.monotonic()
    check_checkout("study")
    title = f"study of {source.short_name(recipe.model)} on {tasks.label(recipe.task)}"
    with begun or WarmProcesses() as warm_processes:
        warm_processes.begin()
        device, base, teacher, dry_run = _check(recipe, overrides, warm_processes, yes=yes)
        if dry_run:
            begin_builds(dry_run)

        store.prepare()
        with runs.step(
            "study", recipe, sections=tuple(keys.SECTIONS), params={"device": device}, run_name=title
        ) as run:
            # Train, evaluate, diagnose, compare and promote; a quantize for each environment; merge for an adapter.
            step_count = 5 + len(side_by_side(recipe.quantize.schemes)) + recipe.train.adapter
            launcher = Launcher(overrides, run.info.run_id, step_count)
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
            except GateRefused as refusal:
                stage = steps.earned(cells)
                report.close(recipe, launcher, time.monotonic() - start, stage=stage, refused=str(refusal))
                raise
            report.close(recipe, launcher, time.monotonic() - start, stage=stage)
            return run.info.run_id


def _check(
    recipe: Recipe, overrides: dict[str, str], warm_processes: WarmProcesses, *, yes: bool
) -> tuple[str, str, str | None, DryRun | None]:
    """Check all that can be known before anything is trained, and raise every objection at once.

    The steps' environments are warmed up meanwhile, beside the base's trial.

    Returns:
        The device, the digests of the base and of the teacher, if there is one, and what the store lacks.
    """
    from qrl import registry
    from qrl.study import report

    objections = Objections()
    registered_name = objections.keep(registry.registered_name, recipe)  # the last step would refuse a bad name
    device, base = preflight.check(recipe, overrides, yes=yes, objections=objections)
    teacher = None
    teacher_address = recipe.train.teacher
    if teacher_address:
        teacher = objections.keep(lambda: checkpoint.check(addresses.folder(teacher_address)).digest)

    dry_run = None
    if base:
        dry_run = objections.keep(
            look_ahead, "study", lambda launcher: StudySteps(recipe, launcher, device).cells(base, teacher)
        )
    if registered_name and dry_run and not dry_run.empty:  # the last step would refuse a stage of another cell too
        objections.keep(registry.check_stages, registered_name, recipe.promote.declared)
        warning = objections.keep(registry.check_base, recipe, base)
        report.warn([warning] if warning else [])
    if dry_run and not objections.sentences:
        begin_warming(warm_processes, device, dry_run)
    preflight.rehearse(recipe, device, dry_run, yes=yes, objections=objections)
    return device, base, teacher, dry_run


class StudySteps:
    """The steps of one study: what each one needs, and what it gives to the next."""

    def __init__(self, recipe: Recipe, launcher: Launcher, device: str) -> None:
        self.recipe = recipe
        self.launcher = launcher
        self.device = device

    @cached_property
    def group_size(self) -> int:
        """The size of groups that every variant is stored in, since all have the base's layers."""
        return groups.of(addresses.folder(self.recipe.model), self.recipe.quantize.group_size)

    def cells(self, base: str, teacher: str | None) -> tuple[Models, dict[str, Result]]:
        """Return the study's models and their evaluations, by `variant:scheme`; `base` and `teacher` are digests."""
        training = self.train(base, teacher)
        variants = {names.BASE: Model(self.recipe.model, base), self.recipe.train.variant: training.model}
        models = self.quantize(variants)
        return models, self.evaluate(models)

    def train(self, base: str, teacher: str | None) -> Training:
        """Return the trained model, merged if it was trained as an adapter; `base` and `teacher` are digests."""
        settings = self.recipe.train
        nodes = cluster.chosen()
        gpus = nodes.resources("train").gpus if nodes else None
        cluster_processes = nodes.processes() if nodes else 1
        processes = max(cluster_processes, parallel.processes(settings, self.device, gpus))
        key = keys.trained(
            self.recipe, base, self.device, teacher=teacher, processes=processes, group_size=self.group_size
        )
        number_format = "" if settings.qat == "none" else f" in {settings.qat}"
        title = f"{settings.title}{number_format}, {settings.steps} steps of {settings.batch}"
        training = self._one("train", title, key)
        if not settings.adapter:
            return Training(_model(training), training.run_id)

        adapter = f"runs:/{training.run_id}/adapter"
        target = f"the base unpacked from {settings.storage}" if settings.packed else "the full-precision base"
        key = keys.merged(self.recipe, base, adapter, self.device)
        merged = self._one("merge", f"adapter into {target}", key, {"adapter": adapter})
        return Training(_model(merged), training.run_id)

    def quantize(self, models: Models) -> Models:
        """Return every variant under every scheme, full precision included, by `variant:scheme`."""
        schemes = self.recipe.quantize.schemes
        results = {}
        for group in side_by_side(schemes):
            for step in self._quantize_steps(group, models):
                results |= self.launcher.obtain(step)

        quantized = {f"{variant}:{names.FULL}": model for variant, model in models.items()}
        for scheme, variant in itertools.product(schemes, models):
            cell = f"{variant}:{scheme}"
            quantized[cell] = _model(results[cell])
        return quantized

    def _quantize_steps(self, group: tuple[str, ...], models: Models) -> list[Step]:
        """Return the steps that quantize models under schemes of one environment.

        A step makes all variants that it is given under all of its schemes. So schemes share a step only if the same
        variants are missing under them, lest a finished result be made again.
        """
        schemes_by_missing: dict[tuple[str, ...], list[str]] = {}
        for scheme in group:
            missing_cells = self.launcher.lacking("quantize", self._quantized_keys([scheme], models))
            variants = tuple(cell.partition(":")[0] for cell in missing_cells)
            schemes_by_missing.setdefault(variants, []).append(scheme)

        def parameters(missing_cells: list[str]) -> dict[str, str]:
            pairs = [cell.split(":") for cell in missing_cells]
            variants = dict.fromkeys(variant for variant, _ in pairs)
            schemes = dict.fromkeys(scheme for _, scheme in pairs)
            return {"scheme": ",".join(schemes), "models": _listed(models, variants)}

        folder = environment_for("quantize", group[0])
        steps = []
        for schemes in schemes_by_missing.values():
            title = f"{', '.join(schemes)} of {' and '.join(models)}"
            steps.append(Step("quantize", title, self._quantized_keys(schemes, models), parameters, folder))
        return steps

    def _quantized_keys(self, schemes: Iterable[str], models: Models) -> dict[str, str]:
        """Return the cache keys of models under schemes, by `variant:scheme`."""
        cache_keys = {}
        for scheme, (variant, model) in itertools.product(schemes, models.items()):
            key = keys.quantized(self.recipe, scheme, model.digest, self.device, group_size=self.group_size)
            cache_keys[f"{variant}:{scheme}"] = key
        return cache_keys

    def evaluate(self, models: Models, failed: Failed | None = None) -> dict[str, Result]:
        """Return the evaluation of every cell, by `variant:scheme`; `failed` as in `Launcher.obtain`."""
        for scheme in evaluate.kv_schemes(self.recipe):  # the same checkpoints, in cells of their own
            stored = {cell: model for cell, model in models.items() if cell.endswith(f":{names.stored(scheme)}")}
            models = models | {f"{cell}{names.KV_FP8}": model for cell, model in stored.items()}
        cache_keys = {}
        for cell, model in models.items():
            variant, scheme = cell.split(":")
            cache_keys[cell] = keys.cell(self.recipe, variant, scheme, model.digest, self.device)
        title = f"{len(models)} cells on {preflight.describe_questions(self.recipe)}"
        folder = environment_for("evaluate", self.recipe.evaluate.engine, self.device)
        step = Step("evaluate", title, cache_keys, lambda missing: {"cells": _listed(models, missing)}, folder)
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
        digests = {cell: model.digest for cell, model in quantized.items()}
        key = keys.diagnosis(self.recipe, base, trained.digest, digests)
        parameters = {"base": self.recipe.model, "trained": trained.address, "quantized": _listed(quantized, quantized)}
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

        cell_runs = {}  # by stage
        unchanged = ""
        for stage in self.recipe.promote.declared:
            if stage.cell in cells:
                cell_runs[stage.stage] = cells[stage.cell].run_id
            else:
                unchanged += f"; {stage.stage} is unchanged: no cell {stage.cell}"
        parameters = {
            "stage": ",".join(cell_runs),
            "cell": ",".join(cell_runs.values()),
            "model": self.recipe.model,
            "registered_name": registry.registered_name(self.recipe),  # reused cells may have other ones
        }
        self.launcher.promote(f"{' → '.join(cell_runs)}{unchanged}", parameters)
        return list(cell_runs)[-1]

    def earned(self, cells: dict[str, Result]) -> str | None:
        """Return the last stage that one of the study's cells holds; None if none does."""
        from qrl import registry

        registered_name = registry.registered_name(self.recipe)
        last_stage = None
        for stage in self.recipe.promote.declared:
            with contextlib.suppress(BadInput):  # the stage has no version
                gate = registry.resolve(registered_name, stage.stage).gate(stage.stage)
                if gate and stage.cell in cells and gate.run == cells[stage.cell].run_id:
                    last_stage = stage.stage
        return last_stage

    def _one(self, name: str, title: str, key: str, parameters: dict[str, str] | None = None) -> Result:
        """Return the result of a step that has only one."""
        folder = environment_for(name, trained_by(self.recipe))  # other than None for `train` alone
        step = Step(name, title, {name: key}, lambda missing: parameters or {}, folder)
        return self.launcher.obtain(step)[name]


def _model(result: Result) -> Model:
    return Model(result.outputs.models["model"], result.outputs.values["digest"])


def _listed(models: Models, labels: Iterable[str]) -> str:
    """Return models as options list them: LABEL=ADDRESS, by comma."""
    return ",".join(f"{label}={models[label].address}" for label in labels)
