"""The methods of a sweep: a recipe each, which stands alone or is a change of the first one; and their names."""

from collections.abc import Iterable
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
WITHOUT_QUANTIZATION = {"train.qat": "none", "train.qat_calibration": "task"}  # changes of a distilled arm's control


class Arm(NamedTuple):
    """A method."""

    name: str  # of its recipe, or the file
    recipe: Recipe
    typed: dict[str, str]  # with which its steps are launched


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
    typed = overrides | {"seed": str(seed)}
    start = recipes.load(first, typed)
    arms = [Arm(first, start, {"recipe": first, **typed}), *(_arm(name, first, start, typed) for name in others)]
    if start.train.variant != names.GRPO or start.train.adapter:
        says = f"Recipe {first} trains {label(start)}"
        raise BadInput(f"{says}, but methods are measured from GRPO in full precision: give such a recipe as --recipe.")
    trained_by: dict[str, str] = {}
    for name, arm, _ in arms:
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


def _arm(name: str, first: str, start: Recipe, typed: dict[str, str]) -> Arm:
    """Return another method: its recipe as it is, if that is whole and shares the first one's questions.

    Another recipe is a change of the first one. Of a recipe that extends a whole one, it is what it adds to that.
    """
    own = recipes.load(name, typed)
    if recipes.is_whole(name) and all(attrgetter(key)(own) == attrgetter(key)(start) for key in SHARED):
        return Arm(name, own, {"recipe": name, **typed})
    changes = recipes.change(name) | typed
    return Arm(name, recipes.load(first, changes), {"recipe": first, **changes})


def replaced(arm: Arm, typed: dict[str, str]) -> dict[str, object]:
    """Return the training settings that an arm's recipe sets and a typed option replaces: its own values, by key."""
    asked = [key for key in recipes.change(arm.name) if key in typed and key.startswith("train.")]
    own = recipes.load(arm.name, {}) if asked else arm.recipe
    return {key: value for key in asked if (value := attrgetter(key)(own)) != attrgetter(key)(arm.recipe)}


def parse_models(models: list[str]) -> dict[str, str]:
    """Return the models by the names that tables give them: the last part of an address, or all of it.

    Raises:
        BadInput: a model is repeated.
    """
    if len(set(models)) < len(models):
        raise BadInput(f"--models is '{','.join(models)}', which repeats a model: give each once.")
    short = [model.rstrip("/").rpartition("/")[2] for model in models]
    return dict(zip(short if len(set(short)) == len(short) else models, models, strict=True))


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


def stages_of(variant: str, scheme: str) -> list[str]:
    """Return the stages that lead to a cell of a sweep, as `promote.stages` types them; the last one is the cell's."""
    cell, scheme = f"{variant}:{scheme}", scheme.replace("+", "-")
    form = scheme.removeprefix(names.ROUNDED_PREFIX)
    before = [f"{names.BASE}={names.BASE}:{names.FULL}", f"{names.GRPO}={names.GRPO}:{names.FULL}"]
    if variant == names.GRPO:
        return [*before, f"{scheme if scheme == names.AWQ else f'ptq-{scheme}'}={cell}"]
    if variant.startswith(names.QAD_PREFIX):
        return [*before, f"distilled-{form}={cell};made_from={names.GRPO};loss_to={names.GRPO}"]
    own = variant if scheme == names.FULL else form
    return [*before, f"{own}={cell};made_from={names.BASE};loss_to={names.GRPO}"]


def scheme_of(arm: Recipe) -> str:
    """Return the scheme that stores what an arm trained; raise BadInput unless both name one file."""
    scheme = names.rounded(arm.train.qat)
    if scheme == names.RTN_FILE and arm.quantize.format != arm.train.qat:
        wanted = f"set quantize.format = {arm.train.qat} too"
        raise BadInput(f"Recipe {label(arm)} trains in a format of a file, but is stored in another: {wanted}.")
    return scheme


def controls(methods: Iterable[Recipe]) -> dict[str, str]:
    """Return the variant of each distilled method's control, by the method's label.

    It is `distilled` if all methods share it, and otherwise `distilled-ARM+ARM`, which names those that do. A method
    that distils without quantization is the control of those that train alike.
    """
    alike: dict[str, list[str]] = {}
    for recipe in methods:
        if recipe.train.teacher:
            alike.setdefault(_distillation(recipe), []).append(label(recipe))
    shared = names.DISTILLED
    return {
        arm: shared if len(alike) == 1 or shared in arms else f"{shared}-{'+'.join(arms)}"
        for arms in alike.values()
        for arm in arms
    }


def _distillation(recipe: Recipe) -> str:
    """Return what decides a distillation's training beside quantization, and beside the teacher, which a sweep sets."""
    fields = type(recipe.train).model_fields.items()
    plain = {key: field.default for key, field in fields if key.startswith("qat")} | {"teacher": ""}
    train = recipe.train.model_copy(update=plain)
    return repr(recipe.model_copy(update={"train": train}).key_settings("train", "rollout", "watch"))
