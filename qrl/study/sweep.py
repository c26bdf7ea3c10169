"""Train several methods under several seeds on one model or on several, and rank them; all share their questions.

The first recipe is GRPO in full precision, quantized afterwards under its own schemes. The others train with QLoRA,
with quantized weights (QAT) or by distillation, which starts from the first recipe's model of the same seed and has it
for a teacher. Some are controls: each distillation into quantized weights gets the same further steps without
quantization; supervised fine-tuning (SFT) is quantized as GRPO is, and then the base is too. Each step is launched
below the sweep's run and reused by its key, as in `pipeline.study`.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import click

from qrl import names, source
from qrl import recipe as recipes
from qrl.errors import BadInput, GateRefused, QrlError
from qrl.recipe import Recipe
from qrl.study import preflight
from qrl.study.arms import WITHOUT_QUANTIZATION, Arm, controls, label, load, replaced, scheme_of, stages_of
from qrl.study.build import side_by_side
from qrl.study.environments import begin_builds, check_checkout, look_ahead
from qrl.study.launch import DryRun, Launcher
from qrl.study.pipeline import Model, Models, StudySteps
from qrl.study.report import SweepOutcome
from qrl.tracking.keys import SECTIONS


@dataclass(frozen=True)
class _Target:
    """One model of a sweep, checked."""

    name: str  # in tables
    arms: dict[int, list[Arm]]  # by seed
    device: str
    base: str  # digest
    parameters: int

    @property
    def start(self) -> Recipe:
        """The first method's recipe, under the first seed."""
        return next(iter(self.arms.values()))[0].recipe

    @property
    def methods(self) -> list[Recipe]:
        return [arm.recipe for arm in next(iter(self.arms.values()))]


def study(
    first: str,
    others: tuple[str, ...],
    seeds: tuple[int, ...],
    overrides: dict[str, str],
    *,
    models: Mapping[str, str] | None = None,
    register: bool = False,
    yes: bool = False,
) -> None:
    """Run every method under every seed on every model, and print and log the tables that rank them.

    A method that fails is reported in the table, and the others continue. So is a model that fails.

    Args:
        first, others, overrides: as in `load`.
        seeds: of the training runs.
        models: by the name that tables give them; default: the recipe's own.
        register: promote the best quantized cell of each model, through its gates.
        yes: as in `pipeline.study`.

    Raises:
        BadInput: as in `pipeline.study`, or two models would be registered under one name.
        QrlError: the first method failed on a model, after everything else is done.
        GateRefused: a gate refused a best cell, after everything else is done.
    """
    from qrl.study import report
    from qrl.tracking import runs, store

    check_checkout("sweep")
    typed = {name: overrides | {"model": model} for name, model in (models or {}).items()} or {"": overrides}
    loaded = {name: {seed: load(first, others, given, seed) for seed in seeds} for name, given in typed.items()}
    if register:
        _check_names(loaded)
    _say_changes(first, next(iter(loaded.values()))[seeds[0]], overrides)
    targets, ahead = [], []
    for name, arms in loaded.items():
        targets.append(_check(name, arms, typed[name], first, yes=yes))
        ahead.append(_look_ahead(targets[-1]))
    for target, missing in zip(targets, ahead, strict=True):
        preflight.rehearse(target.start, target.device, missing, yes=yes, methods=len(target.methods))
    for missing in ahead:
        begin_builds(missing)
    store.prepare()
    began, outcomes = time.monotonic(), [SweepOutcome(target.name, target.parameters) for target in targets]
    methods = targets[0].methods
    params = {"device": targets[0].device, "seeds": ",".join(map(str, seeds)), "arms": ",".join(map(label, methods))}
    params |= {"models": ",".join(models.values())} if models else {}
    with runs.step("sweep", methods[0], sections=tuple(SECTIONS), params=params) as run:
        alone = set(controls(methods).values()) - set(map(label, methods))
        schemes = len(side_by_side(methods[0].quantize.schemes))
        per_seed = 2 * len(others) + 2 + schemes + len(alone) + sum(schemes - 1 for arm in methods if _is_sft(arm))
        launcher = Launcher({}, run.info.run_id, len(targets) * (len(seeds) * per_seed + register))
        for target, outcome in zip(targets, outcomes, strict=True):
            try:
                for seed, arms in target.arms.items():
                    _Seed(seed, arms, launcher, target.device, target.base, outcome).run()
                outcome.found = report.methods_of(outcome, seeds)
                if register:
                    outcome.unregistered = _register(target, outcome, seeds[0], launcher)
            except QrlError as error:
                if not models:
                    raise
                outcome.error = str(error)
                click.secho(f"      model {target.name}: {error}", fg="red", err=True)
        report.sweep_tables(launcher, outcomes, methods[0], time.monotonic() - began)
        if broken := [f"{outcome.model} ({outcome.error})" for outcome in outcomes if outcome.error]:
            raise QrlError(f"The sweep has no results for {len(broken)} of {len(outcomes)} models: {'; '.join(broken)}")
        if errors := [outcome.unregistered for outcome in outcomes if outcome.unregistered]:
            kind = GateRefused if all(isinstance(error, GateRefused) for error in errors) else QrlError
            raise kind(" ".join(map(str, errors)))


def _check_names(loaded: Mapping[str, Mapping[int, list[Arm]]]) -> None:
    from qrl import registry

    owners: dict[str, str] = {}
    for arms in loaded.values():
        recipe = next(iter(arms.values()))[0].recipe
        name = registry.registered_name(recipe)
        if other := owners.get(name):
            raise BadInput(f"--register would store {other} and {recipe.model} both as '{name}': rename a folder.")
        owners[name] = recipe.model


def _say_changes(first: str, arms: list[Arm], overrides: dict[str, str]) -> None:
    """Print what the arms change in the first recipe, unless they are recipes of their own, and what they cannot."""
    start = arms[0].typed
    for name, _, typed in arms[1:]:
        if typed["recipe"] == first:
            changed = ", ".join(f"{key}={text}" for key, text in typed.items() if start.get(key) != text)
            click.echo(f"      {name} is {first} with {changed}", err=True)
    for arm in arms[1:]:
        for key, own in replaced(arm, overrides).items():
            said = f"{arm.name} would train with {key}={own}, but {key}={overrides[key]} holds for every method"
            click.secho(f"      {said}: leave the option out, or write it into --recipe.", fg="yellow", err=True)


def _check(name: str, arms: dict[int, list[Arm]], typed: dict[str, str], first: str, *, yes: bool) -> _Target:
    from qrl.study.forecast import Shape

    methods = [recipe for _, recipe, _ in next(iter(arms.values()))]
    own_schemes = [scheme_of(recipe) for recipe in methods if recipe.train.qat != "none"]
    if len({recipe.quantize.format for recipe in methods if recipe.train.qat.endswith(".yaml")}) > 1:
        raise BadInput(
            f"Two methods have different formats under the one name {names.RTN_FILE}: sweep one of them at a time."
        )
    device, base = preflight.check(methods[0], {"recipe": first, **typed}, beside=own_schemes, yes=yes)
    return _Target(name, arms, device, base, Shape.of(source.locate(methods[0].model)).parameters)


def _look_ahead(target: _Target) -> DryRun:
    def walk(dry_run: Launcher) -> None:
        for (_, grpo, _), *_ in target.arms.values():  # the other methods use the core environment's formats
            steps = StudySteps(grpo, dry_run, target.device)
            models = steps.quantize({names.GRPO: steps.train(target.base, None)})
            steps.evaluate({f"{names.BASE}:{names.FULL}": (grpo.model, target.base)} | models)

    return look_ahead("sweep", walk)


def _register(target: _Target, outcome: SweepOutcome, seed: int, launcher: Launcher) -> QrlError | None:
    """Promote the best quantized cell of a model, as one seed made it, and the cells that its gate looks at.

    Returns:
        Why it was not registered; the tables come first. None if it was, or if no cell counts.
    """
    from qrl import registry

    best = outcome.found[1].best if outcome.found else None
    if best is None:
        return None
    stages = stages_of(best.variant, best.scheme)
    runs = [outcome.cells[stage.partition("=")[2].partition(";")[0]][seed] for stage in stages]
    chosen = [stage.partition("=")[0] for stage in stages]
    parameters = {"stage": ",".join(chosen), "cell": ",".join(runs), "model": target.start.model}
    parameters |= {"registered_name": registry.registered_name(target.start), "promote.stages": ",".join(stages)}
    own = launcher.below(next(iter(target.arms.values()))[0].typed)
    try:
        own.promote(f"{' → '.join(chosen)}, the best of {target.name or 'the sweep'}", parameters)
    except QrlError as error:
        return error
    return None


@dataclass
class _Seed:
    """All methods under one seed."""

    seed: int
    arms: list[Arm]
    launcher: Launcher
    device: str
    base: str  # digest
    outcome: SweepOutcome
    models: Models = field(default_factory=dict)  # to evaluate, by variant:scheme

    def run(self) -> None:
        first, *others = self.arms
        steps = self._steps(first)
        base, grpo = (first.recipe.model, self.base), self._train(steps, first.recipe, None)
        alike = {names.BASE: base} if any(_is_sft(arm.recipe) for arm in others) else {}
        self.models = {f"{names.BASE}:{names.FULL}": base} | steps.quantize({names.GRPO: grpo} | alike)
        for arm in others:
            try:
                self._arm(arm, base, grpo)
            except QrlError as error:  # a method that cannot be trained is a result too
                self._failed([label(arm.recipe)], error)
                click.secho(f"      {label(arm.recipe)}: {error}", fg="red", err=True)
        for cell, result in steps.evaluate(self.models, self._failed).items():
            self.outcome.cells.setdefault(cell, {})[self.seed] = result.run_id

    def _arm(self, arm: Arm, base: Model, grpo: Model) -> None:
        """Train one method; with QAT, store its model, base and GRPO in the format that it trained in."""
        from qrl.tracking import addresses

        recipe, teacher, more = arm.recipe, None, {}
        if recipe.train.teacher:  # the sweep's own GRPO model replaces the recipe's teacher
            teacher, more = grpo, {"model": str(addresses.folder(grpo[0])), "train.teacher": grpo[0]}
        control = controls(each.recipe for each in self.arms).get(label(recipe), label(recipe))
        if control != label(recipe) and (cell := f"{control}:{names.FULL}") not in self.models:
            steps = self._steps(arm, more | WITHOUT_QUANTIZATION)
            self.models[cell] = self._train(steps, steps.recipe, teacher, control)
        trained = self._train(self._steps(arm, more), recipe, teacher)
        if _is_sft(recipe):  # in the schemes of the first recipe, as grpo and base are
            self.models |= self._steps(self.arms[0]).quantize({label(recipe): trained})
            return
        if recipe.train.qat == "none":
            self.models[f"{label(recipe)}:{names.FULL}"] = trained
            return
        scheme = scheme_of(recipe)
        own = recipe.model_copy(update={"quantize": recipe.quantize.model_copy(update={"schemes": (scheme,)})})
        steps = self._steps(arm._replace(recipe=own))
        stored = steps.quantize({names.BASE: base, names.GRPO: grpo, label(recipe): trained})
        self.models |= {cell: model for cell, model in stored.items() if cell.endswith(f":{scheme}")}
        self.outcome.schemes[label(recipe)] = scheme

    def _train(self, steps: StudySteps, arm: Recipe, teacher: Model | None, name: str = "") -> Model:
        digest = teacher[1] if teacher else None
        trained = steps.train(digest or self.base, digest)
        if trained[1] == self.base:  # a distilled control may end as its teacher, where it began
            raise QrlError(
                f"{arm.train.title} under seed {self.seed} changed no weight, so there is nothing to compare. "
                "If rewards were equal in every group, use questions that the base answers now and then."
            )
        self.outcome.trained.setdefault(name or label(arm), {})[self.seed] = steps.trained.run_id
        return trained

    def _steps(self, arm: Arm, more: dict[str, str] | None = None) -> StudySteps:
        """Return one method's steps, launched with its recipe as typed."""
        typed, recipe = arm.typed | (more or {}), arm.recipe
        if more:
            recipe = recipes.load(typed["recipe"], {key: text for key, text in typed.items() if key != "recipe"})
        return StudySteps(recipe, self.launcher.below(typed), self.device)

    def _failed(self, labels: list[str], error: QrlError) -> None:
        self.outcome.failed.append(f"{', '.join(labels)}, seed {self.seed}: {error}")


def _is_sft(recipe: Recipe) -> bool:
    return recipe.train.algorithm == "sft"
