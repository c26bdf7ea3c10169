"""The methods of a sweep, which it calls arms: their recipes, their labels, their controls, and the stages of a winner.

The first arm is GRPO in full precision. Another arm is a recipe that stands alone, if it has the first one's questions;
otherwise it is a change of the first recipe, so that both differ in the method only.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from qrl import names
from qrl import recipe as recipes
from qrl.errors import BadInput
from qrl.recipe import Recipe

FIRST = "tiny-ptq"
QAT = ("qat-int8", "qat-int8-attention", "qat-int4", "qat-nvfp4-a16", "qat-nvfp4-a4")
ARMS = ("tiny-qlora", *QAT, "qad-int4", "qad-nvfp4-a4")
# Settings that all methods share.
SHARED = ("model", "task", "data", "prompt", "chat", "device", "evaluate", "quantize.calibration_samples")
WITHOUT_QUANTIZATION = {
    "train.qat": "none",
    "train.qat_layers": "",
    "train.qat_calibration": "task",
}  # changes of a distilled arm's control


class Arm(NamedTuple):
    """A method."""

    name: str  # of its recipe, or the file
    recipe: Recipe
    typed: dict[str, str]  # with which its steps are launched


@dataclass(frozen=True)
class Stage:
    """A stage on the way to the best cell of a sweep."""

    name: str
    cell: str  # variant:scheme
    made_from: str = ""  # the stage that its weights come from; empty: the recipe's default
    loss_to: str = ""  # the stage that its loss is measured against; empty: the recipe's default

    @property
    def typed(self) -> str:
        """The stage as `promote.stages` types it, such as `int4=qat-int4:rtn-int4;made_from=base;loss_to=grpo`."""
        text = f"{self.name}={self.cell}"
        if self.made_from:
            text += f";made_from={self.made_from}"
        if self.loss_to:
            text += f";loss_to={self.loss_to}"
        return text


def load(first_name: str, other_names: tuple[str, ...], overrides: dict[str, str], seed: int) -> list[Arm]:
    """Return the methods' recipes under one seed, the first one first.

    Args:
        first_name: recipe of GRPO in full precision.
        other_names: recipes of the other methods.
        overrides: as typed, for every method.
        seed: of all of them.

    Raises:
        BadInput: a recipe does not load, the first one is not full-precision GRPO, two train a variant of one name, or
            recipes differ in a setting that all must share.
    """
    typed = overrides | {"seed": str(seed)}
    first = Arm(first_name, recipes.load(first_name, typed), {"recipe": first_name, **typed})
    arms = [first, *(_load_other(name, first, typed) for name in other_names)]

    if first.recipe.train.variant != names.GRPO or first.recipe.train.adapter:
        raise BadInput(
            f"Recipe {first_name} trains {label(first.recipe)}, but methods are measured from GRPO in full precision: "
            "give such a recipe as --recipe."
        )

    arm_names: dict[str, str] = {}  # by label
    for arm in arms:
        arm_label = label(arm.recipe)
        if arm_label in arm_names:
            raise BadInput(
                f"Recipes {arm_names[arm_label]} and {arm.name} both train {arm_label}: name one recipe per method."
            )
        arm_names[arm_label] = arm.name
        _check_shared(first, arm)
    return arms


def _load_other(name: str, first: Arm, typed: dict[str, str]) -> Arm:
    """Return another method: its recipe as it is, if that is whole and shares the first one's questions.

    Another recipe is a change of the first one. If it extends a whole one, the change is what it adds to that.
    """
    recipe = recipes.load(name, typed)
    if recipes.is_whole(name) and all(attrgetter(key)(recipe) == attrgetter(key)(first.recipe) for key in SHARED):
        return Arm(name, recipe, {"recipe": name, **typed})
    changes = recipes.change(name) | typed
    return Arm(name, recipes.load(first.name, changes), {"recipe": first.name, **changes})


def _check_shared(first: Arm, arm: Arm) -> None:
    for key in SHARED:
        expected = attrgetter(key)(first.recipe)
        value = attrgetter(key)(arm.recipe)
        if value != expected:
            raise BadInput(
                f"Recipes {first.name} and {arm.name} differ in {key} ({expected!r} and {value!r}): methods are "
                "compared on the same questions only."
            )


def replaced(arm: Arm, overrides: dict[str, str]) -> dict[str, object]:
    """Return the training settings that an arm's recipe sets and a typed option replaces: the recipe's, by key."""
    typed_keys = [key for key in recipes.change(arm.name) if key in overrides and key.startswith("train.")]
    if not typed_keys:
        return {}
    without_overrides = recipes.load(arm.name, {})
    replaced_values = {}
    for key in typed_keys:
        value = attrgetter(key)(without_overrides)
        if value != attrgetter(key)(arm.recipe):
            replaced_values[key] = value
    return replaced_values


def parse_models(models: list[str]) -> dict[str, str]:
    """Return the models by the names that tables give them: the last part of an address, or all of it.

    Raises:
        BadInput: a model is repeated.
    """
    if len(set(models)) < len(models):
        raise BadInput(f"--models is '{','.join(models)}', which repeats a model: give each once.")
    short_names = [model.rstrip("/").rpartition("/")[2] for model in models]
    if len(set(short_names)) < len(models):
        return {model: model for model in models}
    return dict(zip(short_names, models, strict=True))


def parse_seeds(text: str, seed: str | None) -> tuple[int, ...]:
    """Return the seeds that `--seeds` lists by comma; `seed` is the value of `--seed`, which a sweep does not accept.

    Raises:
        BadInput: an item is not a whole number or is repeated, or `--seed` is present.
    """
    if seed is not None:
        raise BadInput("sweep has no --seed, but --seeds 0,1,2: give the seed there.")
    items = [item.strip() for item in text.split(",")]
    if not all(item.isdecimal() for item in items) or len(set(items)) < len(items):
        raise BadInput(f"--seeds is '{text}', but must be whole numbers by comma, each once, such as 0,1,2.")
    return tuple(map(int, items))


def label(recipe: Recipe) -> str:
    """Return the name of a method's weights: the variant, or the adapter's method, which a study calls grpo."""
    return recipe.train.method if recipe.train.adapter else recipe.train.variant


def stages_of(variant: str, scheme: str) -> list[Stage]:
    """Return the stages that lead to a cell of a sweep: base, GRPO in full precision, and the cell's own."""
    cell = f"{variant}:{scheme}"
    scheme_name = scheme.replace("+", "-")  # a stage is an alias in the registry, which allows no plus
    format_name = scheme_name.removeprefix(names.ROUNDED_PREFIX)

    if variant == names.GRPO:
        name = scheme_name if scheme_name == names.AWQ else f"ptq-{scheme_name}"
        last = Stage(name, cell)
    elif variant.startswith(names.QAD_PREFIX):
        last = Stage(f"distilled-{format_name}", cell, made_from=names.GRPO, loss_to=names.GRPO)
    else:
        name = variant if scheme_name == names.FULL else format_name
        last = Stage(name, cell, made_from=names.BASE, loss_to=names.GRPO)
    return [Stage(names.BASE, f"{names.BASE}:{names.FULL}"), Stage(names.GRPO, f"{names.GRPO}:{names.FULL}"), last]


def scheme_of(recipe: Recipe) -> str:
    """Return the scheme that stores what an arm trained; raise BadInput unless both name one file."""
    scheme = names.rounded(recipe.train.qat)
    if scheme == names.RTN_FILE and recipe.quantize.format != recipe.train.qat:
        raise BadInput(
            f"Recipe {label(recipe)} trains in a format of a file, but is stored in another: "
            f"set quantize.format = {recipe.train.qat} too."
        )
    return scheme


def controls(methods: Iterable[Recipe]) -> dict[str, str]:
    """Return the variant of each distilled method's control, by the method's label.

    It is `distilled` if all methods share it, and otherwise `distilled-ARM+ARM`, which names those that do. A method
    that distils without quantization is the control of those that train alike.
    """
    groups: dict[str, list[str]] = {}  # labels of the arms that share a control, by what decides their training
    for recipe in methods:
        if recipe.train.teacher:
            groups.setdefault(_distillation(recipe), []).append(label(recipe))

    control_of = {}
    for arm_labels in groups.values():
        is_plain = len(groups) == 1 or names.DISTILLED in arm_labels
        control = names.DISTILLED if is_plain else f"{names.DISTILLED}-{'+'.join(arm_labels)}"
        control_of.update(dict.fromkeys(arm_labels, control))
    return control_of


def _distillation(recipe: Recipe) -> str:
    """Return what decides a distillation's training, apart from quantization and the teacher, which a sweep sets."""
    fields = type(recipe.train).model_fields.items()
    without_qat = {key: field.default for key, field in fields if key.startswith("qat")}
    train = recipe.train.model_copy(update=without_qat | {"teacher": ""})
    return repr(recipe.model_copy(update={"train": train}).key_settings("train", "rollout", "watch"))
