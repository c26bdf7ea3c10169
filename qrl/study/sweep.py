"""Ways to a small model, side by side: seed 002's study. Every arm is a recipe; arms meet on the same prompts and questions.

The first recipe is GRPO in full precision, which its own schemes quantize afterwards. QLoRA, quantization-aware training and
distillation follow; a distillation's teacher, and what its student begins as, is the first recipe's model of the same seed.
Each step is launched below the study's run and found again by its key, as in `pipeline.study`.
"""

from __future__ import annotations

import time

import click

from qrl import names, source
from qrl import recipe as recipes
from qrl.errors import BadInput, QrlError
from qrl.recipe import Recipe
from qrl.study.launch import Launcher
from qrl.study.outcome import SweepOutcome
from qrl.study.pipeline import Models, StudySteps, check_environments, check_schemes
from qrl.tracking.keys import SECTIONS

FIRST = "tiny-ptq"
ARMS = (
    "tiny-qlora",
    "qat-int8",
    "qat-int8-attention",
    "qat-int4",
    "qat-nvfp4-a16",
    "qat-nvfp4-a4",
    "qad-int4",
    "qad-nvfp4-a4",
)
SHARED = (
    "model",
    "task",
    "data",
    "prompt",
    "device",
    "evaluate",
    "quantize.calibration_samples",
)  # what arms must have in common


def load(first: str, others: tuple[str, ...], given: dict[str, str], seed: int) -> list[tuple[str, Recipe]]:
    """The arms' recipes under one seed, by name, the first one first.

    Args:
        first: recipe of GRPO in full precision.
        others: recipes of the arms beside it.
        given: overrides as typed, for every arm.
        seed: of all of them.

    Raises:
        BadInput: a recipe that does not load, a first one that is no full-precision GRPO, two arms of one name, or arms that
            differ in what they must share.
    """
    found = [(name, recipes.load(name, given | {"seed": str(seed)})) for name in (first, *others)]
    start = found[0][1]
    if start.train.variant != names.GRPO or start.train.adapter:
        raise BadInput(
            f"Recipe {first} trains {label(start)}, but methods are measured from GRPO in full precision: name such a recipe first."
        )
    seen = {}
    for name, each in found:
        if label(each) in seen:
            raise BadInput(
                f"Recipes {seen[label(each)]} and {name} both train {label(each)}: name one recipe a method."
            )
        seen[label(each)] = name
        for key in SHARED:
            if (one := _value(start, key)) != (other := _value(each, key)):
                raise BadInput(
                    f"Recipes {first} and {name} differ in {key} ({one!r} and {other!r}): methods are compared on the same questions only."
                )
    return found


def numbers(text: str, seed: str | None) -> tuple[int, ...]:
    """Seeds by comma.

    Args:
        text: of `--seeds`.
        seed: of `--seed`, which methods do not take.

    Raises:
        BadInput: not whole numbers, one twice, or `--seed` given.
    """
    if seed is not None:
        raise BadInput("methods takes --seeds 0,1,2: give the seed there.")
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts) or len(set(parts)) < len(parts):
        raise BadInput(f"--seeds is '{text}', but must be whole numbers by comma, each once, such as 0,1,2.")
    return tuple(map(int, parts))


def label(recipe: Recipe) -> str:
    """What an arm's weights are called: the variant, or the adapter's method, which a study calls grpo."""
    return recipe.train.method if recipe.train.adapter else recipe.train.variant


def study(first: str, others: tuple[str, ...], seeds: tuple[int, ...], given: dict[str, str]) -> None:
    """Runs every arm under every seed, prints and logs the table of methods. Arms that fail are told, and the rest goes on.

    Args:
        first: recipe of GRPO in full precision.
        others: recipes of the arms beside it.
        seeds: of training and questions, one study each.
        given: overrides as typed, for every arm.
    """
    from qrl import checkpoint
    from qrl import evaluate as evaluation
    from qrl.engine import device as devices
    from qrl.quantize import settings as choices
    from qrl.study import report
    from qrl.tracking import runs, store

    arms = {seed: load(first, others, given, seed) for seed in seeds}
    start = arms[seeds[0]][0][1]
    rounded = [f"{names.ROUNDED_PREFIX}{each.train.qat}" for _, each in arms[seeds[0]] if each.train.qat != "none"]
    report.warn(
        choices.unheeded(start.quantize, start.quantize.schemes, given, rounded) + evaluation.unheeded(start.evaluate)
    )
    device, base = devices.choose(start.device), checkpoint.check(source.locate(start.model))
    check_schemes(start, base.path)

    def walk(ahead: Launcher) -> None:
        for (_, grpo), *_ in arms.values():  # the other arms store in formats of the core environment
            order = StudySteps(grpo, ahead, device)
            order.evaluate(order.quantize({names.GRPO: order.train(base.digest, None)}))

    check_environments("sweep", start, walk)
    store.prepare()
    began, outcome = time.monotonic(), SweepOutcome()
    params = {
        "device": device,
        "seeds": ",".join(map(str, seeds)),
        "arms": ",".join(label(each) for _, each in arms[seeds[0]]),
    }
    with runs.step("sweep", start, sections=tuple(SECTIONS), params=params) as run:
        launcher = Launcher({}, run.info.run_id, len(seeds) * (2 * len(others) + 2 + len(start.quantize.schemes)))
        for seed, found in arms.items():
            _Seed(seed, found, given, launcher, device, base.digest, outcome).run()
        report.sweep_table(launcher, outcome, seeds, time.monotonic() - began)


class _Seed:
    """All arms under one seed."""

    def __init__(
        self,
        seed: int,
        arms: list[tuple[str, Recipe]],
        given: dict[str, str],
        launcher: Launcher,
        device: str,
        base: str,
        outcome: SweepOutcome,
    ) -> None:
        self.seed, self.arms, self.given, self.launcher = seed, arms, given, launcher
        self.device, self.base, self.outcome = device, base, outcome
        self.models: Models = {}  # what is asked, by variant:scheme

    def run(self) -> None:
        (name, start), *others = self.arms
        base = (start.model, self.base)
        order = self._order(name, start)
        grpo = self._train(order, start, None)
        self.models = {f"{names.BASE}:{names.FULL}": base} | order.quantize({names.GRPO: grpo})
        for name, arm in others:
            try:
                self._arm(name, arm, base, grpo)
            except QrlError as error:  # a method that cannot be trained is a finding
                self.outcome.failed.append(f"{label(arm)}, seed {self.seed}: {error}")
                click.secho(f"      {label(arm)}: {error}", fg="red", err=True)
        self._evaluate(self._order(*self.arms[0]))

    def _arm(self, name: str, arm: Recipe, base: tuple[str, str], grpo: tuple[str, str]) -> None:
        """Trains an arm, and stores what came out, base and GRPO in the arm's own format."""
        from qrl.tracking import addresses

        teacher, more = None, {}
        if arm.train.teacher:  # a study's own teacher stands where a recipe names a place for one
            teacher, more = grpo, {"model": str(addresses.folder(grpo[0])), "train.teacher": grpo[0]}
        order = self._order(name, arm, more)
        trained = self._train(order, arm, teacher)
        if arm.train.qat == "none":
            self.models[f"{label(arm)}:{names.FULL}"] = trained
            return
        scheme = f"{names.ROUNDED_PREFIX}{arm.train.qat}"
        own = arm.model_copy(update={"quantize": arm.quantize.model_copy(update={"schemes": (scheme,)})})
        stored = self._order(name, own).quantize({names.BASE: base, names.GRPO: grpo, label(arm): trained})
        self.models |= {cell: model for cell, model in stored.items() if cell.endswith(f":{scheme}")}
        self.outcome.schemes[label(arm)] = scheme

    def _train(self, order: StudySteps, arm: Recipe, teacher: tuple[str, str] | None) -> tuple[str, str]:
        trained = order.train(teacher[1] if teacher else self.base, teacher[1] if teacher else None)
        self.outcome.trained.setdefault(label(arm), {})[self.seed] = order.trained.run_id
        return trained

    def _order(self, name: str, arm: Recipe, more: dict[str, str] | None = None) -> StudySteps:
        """The steps of one arm, launched with its recipe as typed."""
        changed = {"recipe": name, **self.given, "seed": str(self.seed), **(more or {})}
        if more:
            arm = recipes.load(name, {key: text for key, text in changed.items() if key != "recipe"})
        return StudySteps(arm, self.launcher.with_overrides(changed), self.device)

    def _evaluate(self, order: StudySteps) -> None:
        """Asks all cells at once; those that are unhealthy do not count, and are told."""
        for cell, result in order.evaluate(self.models, self._unhealthy).items():
            self.outcome.cells.setdefault(cell, {})[self.seed] = result.run_id

    def _unhealthy(self, cells: list[str], error: QrlError) -> None:
        self.outcome.failed.append(f"{', '.join(cells)}, seed {self.seed}: {error}")


def _value(recipe: Recipe, key: str):
    for part in key.split("."):
        recipe = getattr(recipe, part)
    return recipe
