"""Train several methods under several seeds on one model or on several, and rank them; all share their questions.

The first recipe is GRPO in full precision, quantized afterwards under its own schemes. The others train with QLoRA,
with quantized weights (QAT) or by distillation, which starts from the first recipe's model of the same seed and has it
for a teacher. Some are controls: each distillation into quantized weights gets the same further steps without
quantization; supervised fine-tuning (SFT) and rejection sampling (RAFT) are quantized as GRPO is, and then the base is
too. Each step is launched below the sweep's run and reused by its key, as in `pipeline.study`.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import click

from qrl import names
from qrl import recipe as recipes
from qrl.errors import BadInput, GateRefused, QrlError
from qrl.recipe import Recipe
from qrl.study import preflight
from qrl.study.arms import WITHOUT_QUANTIZATION, Arm, controls, label, load, replaced, scheme_of, stages_of
from qrl.study.environments import begin_builds, begin_warming, check_checkout, look_ahead
from qrl.study.launch import DryRun, Launcher
from qrl.study.pipeline import Model, Models, StudySteps
from qrl.study.report import SweepOutcome
from qrl.study.warming import WarmProcesses
from qrl.tracking import addresses
from qrl.tracking.keys import SECTIONS
from qrl.tracking.places import side_by_side

BASE_CELL = f"{names.BASE}:{names.FULL}"


@dataclass(frozen=True)
class _Target:
    """One model of a sweep, after its checks."""

    name: str  # in tables; empty if the sweep has one model only
    arms_by_seed: dict[int, list[Arm]]
    device: str
    base_digest: str
    parameters: int

    @property
    def first_arm(self) -> Arm:
        """The first method, under the first seed."""
        return next(iter(self.arms_by_seed.values()))[0]

    @property
    def methods(self) -> list[Recipe]:
        """The recipes of all methods, under the first seed."""
        return [arm.recipe for arm in next(iter(self.arms_by_seed.values()))]


def study(
    first_recipe: str,
    other_recipes: tuple[str, ...],
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
        first_recipe, other_recipes, overrides: as in `arms.load`.
        seeds: of the training runs.
        models: by the name that tables give them; default: the recipe's own.
        register: promote the best quantized cell of each model, through its gates.
        yes: as in `pipeline.study`.

    Raises:
        BadInput: as in `pipeline.study`, or two models would be registered under one name.
        QrlError: the first method failed on a model, after everything else is done.
        GateRefused: a gate refused a best cell, after everything else is done.
    """
    from qrl import registry
    from qrl.registry import starting
    from qrl.study import report
    from qrl.tracking import runs, store

    check_checkout("sweep")
    models = {name: starting.version_of(model) for name, model in (models or {}).items()}
    overrides_by_model = {name: overrides | {"model": model} for name, model in models.items()} or {"": overrides}
    arms_by_model = {}
    for name, model_overrides in overrides_by_model.items():
        arms_by_model[name] = {seed: load(first_recipe, other_recipes, model_overrides, seed) for seed in seeds}
    if register:
        _check_registered_names(arms_by_model)
    any_model_arms = next(iter(arms_by_model.values()))
    _print_changes(first_recipe, any_model_arms[seeds[0]], overrides)

    # Everything that can be refused is refused for all models before an environment is built for one.
    targets, dry_runs = [], []
    for name, arms_by_seed in arms_by_model.items():
        target = _check_model(name, arms_by_seed, overrides_by_model[name], first_recipe, yes=yes)
        targets.append(target)
        if register and store.is_there():
            store.prepare()
            warning = registry.check_base(target.first_arm.recipe, target.base_digest)
            report.warn([warning] if warning else [])
        dry_runs.append(_look_ahead(target))
    for target, dry_run in zip(targets, dry_runs, strict=True):
        preflight.rehearse(target.first_arm.recipe, target.device, dry_run, yes=yes)
    for dry_run in dry_runs:
        begin_builds(dry_run)

    store.prepare()
    start = time.monotonic()
    outcomes = [SweepOutcome(target.name, target.parameters) for target in targets]
    methods = targets[0].methods
    params = {"device": targets[0].device, "seeds": ",".join(map(str, seeds)), "arms": ",".join(map(label, methods))}
    if models:
        params["models"] = ",".join(models.values())
    with (
        WarmProcesses() as warm_processes,
        runs.step("sweep", methods[0], sections=tuple(SECTIONS), params=params) as run,
    ):
        warm_processes.begin()
        for target, dry_run in zip(targets, dry_runs, strict=True):
            begin_warming(warm_processes, target.device, dry_run)
        steps_per_model = len(seeds) * _steps_per_seed(methods) + register
        launcher = Launcher({}, run.info.run_id, len(targets) * steps_per_model)
        for target, outcome in zip(targets, outcomes, strict=True):
            try:
                _run_model(target, outcome, seeds, launcher, register=register)
            except QrlError as error:
                if not models:
                    raise
                outcome.error = str(error)
                click.secho(f"      model {target.name}: {error}", fg="red", err=True)
        report.sweep_tables(launcher, outcomes, methods[0], time.monotonic() - start)
        _raise_failures(outcomes)


def _check_registered_names(arms_by_model: Mapping[str, Mapping[int, list[Arm]]]) -> None:
    """Raise BadInput if `--register` would store two models under one name."""
    from qrl import registry

    model_of: dict[str, str] = {}  # by registered name
    for arms_by_seed in arms_by_model.values():
        recipe = next(iter(arms_by_seed.values()))[0].recipe
        name = registry.registered_name(recipe)
        if name in model_of:
            raise BadInput(
                f"--register would store {model_of[name]} and {recipe.model} both as '{name}': rename a folder."
            )
        model_of[name] = recipe.model


def _print_changes(first_recipe: str, arms: list[Arm], overrides: dict[str, str]) -> None:
    """Print what the arms change in the first recipe, and which of their own settings an option replaces."""
    first, *others = arms
    for arm in others:
        if arm.typed["recipe"] == first_recipe:  # a change of the first recipe, no recipe that stands alone
            changes = [f"{key}={text}" for key, text in arm.typed.items() if first.typed.get(key) != text]
            click.echo(f"      {arm.name} is {first_recipe} with {', '.join(changes)}", err=True)
    for arm in others:
        for key, value in replaced(arm, overrides).items():
            conflict = f"{arm.name} would train with {key}={value}, but {key}={overrides[key]} holds for every method"
            click.secho(f"      {conflict}: leave the option out, or write it into --recipe.", fg="yellow", err=True)


def _check_model(
    name: str, arms_by_seed: dict[int, list[Arm]], overrides: dict[str, str], first_recipe: str, *, yes: bool
) -> _Target:
    """Check that all methods can train and store one model, and return it."""
    from qrl.train.footprint import Shape

    methods = [arm.recipe for arm in next(iter(arms_by_seed.values()))]
    schemes = [scheme_of(recipe) for recipe in methods if recipe.train.qat != "none"]
    file_formats = {recipe.quantize.format for recipe in methods if recipe.train.qat.endswith(".yaml")}
    if len(file_formats) > 1:
        raise BadInput(
            f"Two methods have different formats under the one name {names.RTN_FILE}: sweep one of them at a time."
        )
    _check_layers(methods)
    typed = {"recipe": first_recipe, **overrides}
    device, base_digest = preflight.check(methods[0], typed, beside=schemes, yes=yes)
    parameters = Shape.of(addresses.folder(methods[0].model)).parameters
    return _Target(name, arms_by_seed, device, base_digest, parameters)


def _check_layers(methods: list[Recipe]) -> None:
    """Raise BadInput if two methods store other linears in one scheme: its cells have one name, and are compared."""
    layers_of: dict[str, tuple[str, ...]] = {}
    for recipe in methods:
        is_first = recipe is methods[0]
        own_schemes = () if recipe.train.qat == "none" else (scheme_of(recipe),)
        for scheme in recipe.quantize.schemes if is_first else own_schemes:
            if layers_of.setdefault(scheme, recipe.quantize.layers) != recipe.quantize.layers:
                raise BadInput(
                    f"Two methods store different linears in the one scheme {scheme} (quantize.layers): sweep one of "
                    "them at a time."
                )


def _look_ahead(target: _Target) -> DryRun:
    """Return what the store lacks of the first method's results; the others use the core environment's formats."""

    def walk(dry_run: Launcher) -> None:
        for arms in target.arms_by_seed.values():
            recipe = arms[0].recipe
            steps = StudySteps(recipe, dry_run, target.device)
            training = steps.train(target.base_digest, None)
            models = steps.quantize({names.GRPO: training.model})
            steps.evaluate({BASE_CELL: Model(recipe.model, target.base_digest)} | models)

    return look_ahead("sweep", walk)


def _steps_per_seed(methods: list[Recipe]) -> int:
    """Return how many steps one seed takes on one model, for the numbers in the terminal."""
    others = methods[1:]
    scheme_groups = len(side_by_side(methods[0].quantize.schemes))
    trained_controls = set(controls(methods).values()) - set(map(label, methods))

    first_method = 2 + scheme_groups  # train, a quantize for each environment, and evaluate for all methods
    train_and_quantize = 2 * len(others)
    more_of_sft = sum(scheme_groups - 1 for recipe in methods if _is_control(recipe))  # it has all schemes of the first
    return first_method + train_and_quantize + len(trained_controls) + more_of_sft


def _run_model(
    target: _Target, outcome: SweepOutcome, seeds: tuple[int, ...], launcher: Launcher, *, register: bool
) -> None:
    """Run all methods under all seeds on one model, rank them, and register the best cell if wanted."""
    from qrl.study import report

    for seed, arms in target.arms_by_seed.items():
        _SeedRun(seed, arms, launcher, target.device, target.base_digest, outcome).run()
    outcome.ranked = report.rank_cells(outcome, seeds)
    if register:
        outcome.unregistered = _register(target, outcome, seeds[0], launcher)


def _register(target: _Target, outcome: SweepOutcome, seed: int, launcher: Launcher) -> QrlError | None:
    """Promote the best quantized cell of a model, as one seed made it, and the cells that its gate looks at.

    Returns:
        Why it was not registered; the tables come first. None if it was, or if no cell counts.
    """
    from qrl import registry

    best = outcome.ranked.methods.best if outcome.ranked else None
    if best is None:
        return None
    stages = stages_of(best.variant, best.scheme)
    stage_names = [stage.name for stage in stages]
    evaluation_runs = [outcome.cells[stage.cell][seed] for stage in stages]
    parameters = {
        "stage": ",".join(stage_names),
        "cell": ",".join(evaluation_runs),
        "model": target.first_arm.recipe.model,
        "registered_name": registry.registered_name(target.first_arm.recipe),
        "promote.stages": ",".join(stage.typed for stage in stages),
    }
    title = f"{' → '.join(stage_names)}, the best of {target.name or 'the sweep'}"
    try:
        launcher.below(target.first_arm.typed).promote(title, parameters)
    except QrlError as error:
        return error
    return None


def _raise_failures(outcomes: list[SweepOutcome]) -> None:
    """Raise what failed on some models, now that the tables of the others are there."""
    failures = [f"{outcome.model} ({outcome.error})" for outcome in outcomes if outcome.error]
    if failures:
        count = f"{len(failures)} of {len(outcomes)} models"
        raise QrlError(f"The sweep has no results for {count}: {'; '.join(failures)}")
    errors = [outcome.unregistered for outcome in outcomes if outcome.unregistered]
    if errors:
        sentences = " ".join(map(str, errors))
        if all(isinstance(error, GateRefused) for error in errors):
            raise GateRefused(sentences)
        raise QrlError(sentences)


@dataclass
class _SeedRun:
    """All methods under one seed, on one model."""

    seed: int
    arms: list[Arm]
    launcher: Launcher
    device: str
    base_digest: str
    outcome: SweepOutcome
    models: Models = field(default_factory=dict)  # to evaluate, by variant:scheme

    def run(self) -> None:
        """Train and quantize every method, and evaluate all of their cells in one step."""
        first, *others = self.arms
        steps = self._steps(first)
        base = Model(first.recipe.model, self.base_digest)
        grpo = self._train(steps, first.recipe, None)

        # Controls are compared with GRPO under the same schemes, so the base is stored in them too.
        models = {names.GRPO: grpo}
        if any(_is_control(arm.recipe) for arm in others):
            models[names.BASE] = base
        self.models = {BASE_CELL: base} | steps.quantize(models)

        for arm in others:
            try:
                self._run_arm(arm, base, grpo)
            except QrlError as error:  # a method that cannot be trained is a result too
                self._note_failure([label(arm.recipe)], error)
                click.secho(f"      {label(arm.recipe)}: {error}", fg="red", err=True)
        for cell, result in steps.evaluate(self.models, self._note_failure).items():
            self.outcome.cells.setdefault(cell, {})[self.seed] = result.run_id

    def _run_arm(self, arm: Arm, base: Model, grpo: Model) -> None:
        """Train one method, and its control if it has one; with QAT, store base and GRPO in the method's format too."""
        from qrl.tracking import addresses

        recipe = arm.recipe
        arm_label = label(recipe)
        teacher = None
        changes = {}
        if recipe.train.teacher:  # the sweep's own GRPO model replaces the recipe's teacher
            teacher = grpo
            changes = {"model": str(addresses.folder(grpo.address)), "train.teacher": grpo.address}

        self._train_control(arm, teacher, changes)
        trained = self._train(self._steps(arm, changes), recipe, teacher)
        if _is_control(recipe):  # in the schemes of the first recipe, as grpo and base are
            self.models |= self._steps(self.arms[0]).quantize({arm_label: trained})
            return
        if recipe.train.qat == "none":
            self.models[f"{arm_label}:{names.FULL}"] = trained
            return

        scheme = scheme_of(recipe)
        quantize = recipe.quantize.model_copy(update={"schemes": (scheme,)})
        steps = self._steps(arm._replace(recipe=recipe.model_copy(update={"quantize": quantize})))
        stored = steps.quantize({names.BASE: base, names.GRPO: grpo, arm_label: trained})
        self.models |= {cell: model for cell, model in stored.items() if cell.endswith(f":{scheme}")}
        self.outcome.schemes[arm_label] = scheme

    def _train_control(self, arm: Arm, teacher: Model | None, changes: dict[str, str]) -> None:
        """Train what a distilled method is compared with, unless another method has had the same control."""
        arm_label = label(arm.recipe)
        control = controls(arm.recipe for arm in self.arms).get(arm_label, arm_label)
        cell = f"{control}:{names.FULL}"
        if control == arm_label or cell in self.models:
            return
        steps = self._steps(arm, changes | WITHOUT_QUANTIZATION)
        self.models[cell] = self._train(steps, steps.recipe, teacher, control)

    def _train(self, steps: StudySteps, recipe: Recipe, teacher: Model | None, variant: str = "") -> Model:
        """Return what a method trained, and note its run under `variant`, by default the method's label."""
        teacher_digest = teacher.digest if teacher else None
        # A student of the sweep's GRPO model starts from it, so the teacher's weights are its base.
        training = steps.train(teacher_digest or self.base_digest, teacher_digest)
        if training.model.digest == self.base_digest:  # a distilled control may end as its teacher, where it began
            raise QrlError(
                f"{recipe.train.title} under seed {self.seed} changed no weight, so there is nothing to compare. "
                "If rewards were equal in every group, use questions that the base answers now and then."
            )
        self.outcome.trained.setdefault(variant or label(recipe), {})[self.seed] = training.run_id
        return training.model

    def _steps(self, arm: Arm, changes: dict[str, str] | None = None) -> StudySteps:
        """Return one method's steps, launched with its recipe as typed, and with `changes` of it."""
        recipe = arm.recipe
        typed = arm.typed
        if changes:
            typed = arm.typed | changes
            recipe = recipes.load(typed["recipe"], {key: text for key, text in typed.items() if key != "recipe"})
        return StudySteps(recipe, self.launcher.below(typed), self.device)

    def _note_failure(self, labels: list[str], error: QrlError) -> None:
        self.outcome.failed.append(f"{', '.join(labels)}, seed {self.seed}: {error}")


def _is_control(recipe: Recipe) -> bool:
    """Whether a method is a control of GRPO: fine-tuning on worked solutions, or on right completions."""
    return recipe.train.algorithm != "grpo"
