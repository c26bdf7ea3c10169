"""Train several methods under several seeds, and rank them. Every method is a recipe; all share prompts and questions.

The first recipe is GRPO in full precision, quantized afterwards under its own schemes. The others train with QLoRA,
with quantized weights (QAT) or by distillation, which starts from the first recipe's model of the same seed and has it
for a teacher. Each step is launched below the sweep's run and reused by its key, as in `pipeline.study`.
"""

import copy
import time
from dataclasses import dataclass, field
from operator import attrgetter

import click

from qrl import names
from qrl import recipe as recipes
from qrl.errors import BadInput, QrlError
from qrl.recipe import Recipe
from qrl.study import preflight
from qrl.study.environments import begin_builds, check_checkout, look_ahead
from qrl.study.launch import Launcher
from qrl.study.pipeline import Model, Models, StudySteps
from qrl.study.report import SweepOutcome
from qrl.tracking.keys import SECTIONS

FIRST = "tiny-ptq"
QAT = ("qat-int8", "qat-int8-attention", "qat-int4", "qat-nvfp4-a16", "qat-nvfp4-a4")
ARMS = ("tiny-qlora", *QAT, "qad-int4", "qad-nvfp4-a4")
SHARED = ("model", "task", "data", "prompt", "chat", "device", "evaluate", "quantize.calibration_samples")  # by all
Arm = tuple[str, Recipe]  # a method: the recipe's name or file, and the recipe


def load(first: str, others: tuple[str, ...], overrides: dict[str, str], seed: int) -> list[Arm]:
    """Return the methods' recipes under one seed, the first one first.

    Args:
        first: recipe of GRPO in full precision.
        others: recipes of the other methods.
        overrides: as typed, for every method.
        seed: of all of them.

    Raises:
        BadInput: a recipe does not load, the first one is not full-precision GRPO, two train a variant of one name, or
            recipes differ in a setting that all must share.
    """
    arms = [(name, recipes.load(name, overrides | {"seed": str(seed)})) for name in (first, *others)]
    start = arms[0][1]
    if start.train.variant != names.GRPO or start.train.adapter:
        says = f"Recipe {first} trains {label(start)}"
        raise BadInput(f"{says}, but methods are measured from GRPO in full precision: give such a recipe as --recipe.")
    trained_by: dict[str, str] = {}
    for name, arm in arms:
        if other := trained_by.get(label(arm)):
            raise BadInput(f"Recipes {other} and {name} both train {label(arm)}: name one recipe per method.")
        trained_by[label(arm)] = name
        for key in SHARED:
            value_of = attrgetter(key)
            if (expected := value_of(start)) != (value := value_of(arm)):
                raise BadInput(
                    f"Recipes {first} and {name} differ in {key} ({expected!r} and {value!r}): methods are compared on "
                    "the same questions only."
                )
    return arms


def parse_seeds(text: str, seed: str | None) -> tuple[int, ...]:
    """Return the seeds that `--seeds` lists by comma; `seed` is the value of `--seed`, which a sweep does not accept.

    Raises:
        BadInput: an item is not a whole number or is repeated, or `--seed` is present.
    """
    if seed is not None:
        raise BadInput("sweep has no --seed, but --seeds 0,1,2: give the seed there.")
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts) or len(set(parts)) < len(parts):
        raise BadInput(f"--seeds is '{text}', but must be whole numbers by comma, each once, such as 0,1,2.")
    return tuple(map(int, parts))


def label(recipe: Recipe) -> str:
    """Return the name of a method's weights: the variant, or the adapter's method, which a study calls grpo."""
    return recipe.train.method if recipe.train.adapter else recipe.train.variant


def study(
    first: str, others: tuple[str, ...], seeds: tuple[int, ...], overrides: dict[str, str], *, yes: bool = False
) -> None:
    """Run every method under every seed, and print and log the table that ranks them.

    A method that fails is reported in the table, and the others continue. Arguments as in `load`, and `yes` as in
    `pipeline.study`.
    """
    from qrl.study import report
    from qrl.tracking import runs, store

    check_checkout("sweep")
    arms = {seed: load(first, others, overrides, seed) for seed in seeds}
    methods = [recipe for _, recipe in arms[seeds[0]]]
    own_schemes = [_scheme(recipe) for recipe in methods if recipe.train.qat != "none"]
    if len({recipe.quantize.format for recipe in methods if recipe.train.qat.endswith(".yaml")}) > 1:
        raise BadInput(
            f"Two methods have different formats under the one name {names.RTN_FILE}: sweep one of them at a time."
        )
    device, base = preflight.check(methods[0], {"recipe": first, **overrides}, beside=own_schemes, yes=yes)

    def walk(dry_run: Launcher) -> None:
        for (_, grpo), *_ in arms.values():  # the other methods use the core environment's formats
            steps = StudySteps(grpo, dry_run, device)
            models = steps.quantize({names.GRPO: steps.train(base, None)})
            steps.evaluate({f"{names.BASE}:{names.FULL}": (grpo.model, base)} | models)

    ahead = look_ahead("sweep", walk)
    preflight.rehearse(methods[0], device, ahead, yes=yes, methods=len(methods))
    begin_builds(ahead)
    store.prepare()
    began, outcome = time.monotonic(), SweepOutcome()
    params = {"device": device, "seeds": ",".join(map(str, seeds)), "arms": ",".join(map(label, methods))}
    with runs.step("sweep", methods[0], sections=tuple(SECTIONS), params=params) as run:
        count = len(seeds) * (2 * len(others) + 2 + len(methods[0].quantize.schemes))
        launcher = Launcher({}, run.info.run_id, count)
        for seed, of_seed in arms.items():
            _Seed(seed, of_seed, overrides, launcher, device, base, outcome).run()
        report.sweep_table(launcher, outcome, seeds, time.monotonic() - began)


@dataclass
class _Seed:
    """All methods under one seed."""

    seed: int
    arms: list[Arm]
    overrides: dict[str, str]
    launcher: Launcher
    device: str
    base: str  # digest
    outcome: SweepOutcome
    models: Models = field(default_factory=dict)  # to evaluate, by variant:scheme

    def run(self) -> None:
        (name, start), *others = self.arms
        steps = self._steps(name, start)
        base, grpo = (start.model, self.base), self._train(steps, start, None)
        self.models = {f"{names.BASE}:{names.FULL}": base} | steps.quantize({names.GRPO: grpo})
        for name, arm in others:
            try:
                self._arm(name, arm, base, grpo)
            except QrlError as error:  # a method that cannot be trained is a result too
                self._failed([label(arm)], error)
                click.secho(f"      {label(arm)}: {error}", fg="red", err=True)
        for cell, result in steps.evaluate(self.models, self._failed).items():
            self.outcome.cells.setdefault(cell, {})[self.seed] = result.run_id

    def _arm(self, name: str, arm: Recipe, base: Model, grpo: Model) -> None:
        """Train one method; with QAT, store its model, base and GRPO in the format that it trained in."""
        from qrl.tracking import addresses

        teacher, more = None, {}
        if arm.train.teacher:  # the sweep's own GRPO model replaces the recipe's teacher
            teacher, more = grpo, {"model": str(addresses.folder(grpo[0])), "train.teacher": grpo[0]}
        trained = self._train(self._steps(name, arm, more), arm, teacher)
        if arm.train.qat == "none":
            self.models[f"{label(arm)}:{names.FULL}"] = trained
            return
        scheme = _scheme(arm)
        own = arm.model_copy(update={"quantize": arm.quantize.model_copy(update={"schemes": (scheme,)})})
        stored = self._steps(name, own).quantize({names.BASE: base, names.GRPO: grpo, label(arm): trained})
        self.models |= {cell: model for cell, model in stored.items() if cell.endswith(f":{scheme}")}
        self.outcome.schemes[label(arm)] = scheme

    def _train(self, steps: StudySteps, arm: Recipe, teacher: Model | None) -> Model:
        digest = teacher[1] if teacher else None
        trained = steps.train(digest or self.base, digest)
        self.outcome.trained.setdefault(label(arm), {})[self.seed] = steps.trained.run_id
        return trained

    def _steps(self, name: str, arm: Recipe, more: dict[str, str] | None = None) -> StudySteps:
        """Return one method's steps, launched with its recipe as typed."""
        changed = {"recipe": name, **self.overrides, "seed": str(self.seed), **(more or {})}
        if more:
            arm = recipes.load(name, {key: text for key, text in changed.items() if key != "recipe"})
        launcher = copy.copy(self.launcher)  # they share the count of steps and the results
        launcher.overrides = changed
        return StudySteps(arm, launcher, self.device)

    def _failed(self, labels: list[str], error: QrlError) -> None:
        self.outcome.failed.append(f"{', '.join(labels)}, seed {self.seed}: {error}")


def _scheme(arm: Recipe) -> str:
    """Return the scheme that stores what an arm trained; raise BadInput unless both name one file."""
    if not arm.train.qat.endswith(".yaml"):
        return f"{names.ROUNDED_PREFIX}{arm.train.qat}"
    if arm.quantize.format != arm.train.qat:
        wanted = f"set quantize.format = {arm.train.qat} too"
        raise BadInput(f"Recipe {label(arm)} trains in a format of a file, but is stored in another: {wanted}.")
    return names.RTN_FILE
