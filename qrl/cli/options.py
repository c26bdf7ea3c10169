"""A recipe's fields as options of the command line: what is typed for a field overrides the recipe."""

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass

import click
from click.core import ParameterSource

from qrl.errors import BadInput

# A flag that can have a value too, since `mlflow run` passes -P rank=true on as `--rank true`.
SWITCH = {"is_flag": False, "flag_value": True, "type": bool, "metavar": "[BOOL]"}

_OURS = re.compile(r"models:/|runs:/|\b[0-9a-f]{32}\b")  # addresses in the store
_PLACES = {"model", "registered_name", "device"}  # settings in which cells to compare may differ


@dataclass(frozen=True)
class Typed:
    """What the user typed, to be repeated in the steps that a command launches."""

    overrides: dict[str, str]  # `recipe`, and fields of the recipe
    options: dict[str, str]  # the command's own options
    device: str  # of the resolved recipe

    def run(self, step: str, choice: str, check: Callable[[], object], here: Callable[[], object]) -> None:
        """Do the work `here`, or `check` and hand it to the environment that the scheme or engine, `choice`, needs."""
        from qrl.study import environments

        if folder := environments.environment_for(step, choice, self.device):
            check()
            environments.hand_over(folder, step, self.overrides | self.options)
        else:
            here()


class Finite(click.FloatRange):
    """A number within bounds; click's own type accepts NaN, which is within any bounds, and infinity."""

    def convert(self, value, param, ctx) -> float:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class RecipeCommand(click.Command):
    """A command with its own options and, made when the command is used, one option per field of the recipe.

    Every command accepts every field, since a study hands all of them to every step; `--help` shows those it reads.
    """

    def __init__(self, *args, sections: tuple[str, ...] = (), auto: str = "tiny", checkout: bool = False, **kwargs):
        super().__init__(*args, **kwargs)
        self.sections, self.auto, self.checkout = sections, auto, checkout  # auto: the recipe where none is named

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the command's own options, `--recipe`, and every field with its value in the recipe `auto`."""
        from qrl import recipe  # takes longer than the rest of `--help`

        others = ", or instruct for another model, or math for a task of that kind" if self.auto == "tiny" else ""
        which = f"Recipe to start from: {', '.join(recipe.names())}, or a YAML file; auto: {self.auto}{others}."
        options = [click.Option(["--recipe", "recipe_name"], default="auto", metavar="NAME|FILE.yaml", help=which)]
        values = recipe.load(self.auto).flat()
        for key, (annotation, description) in recipe.fields().items():
            hidden = "." in key and key.split(".", maxsplit=1)[0] not in self.sections
            value = "" if values[key] in ("null", "") else f"  [{self.auto}: {values[key]}]"
            words = {"metavar": recipe.type_name(annotation), "help": description + value, "hidden": hidden}
            options.append(click.Option([f"--{key}", _identifier(key)], **words))
        return [*self.params, *options, *super().get_params(ctx)[len(self.params) :]]

    def invoke(self, ctx: click.Context):
        """Call the command with the resolved recipe as `settings`, and with `Typed` as the context's object."""
        from qrl import recipe

        own = {}
        for option in self.params:
            value = ctx.params.get(option.name)
            if option.envvar and value:  # a secret goes on in its variable, since runs log parameters
                os.environ[option.envvar] = value
            elif ctx.get_parameter_source(option.name) is ParameterSource.COMMANDLINE and value not in (None, ""):
                own[option.opts[0].lstrip("-")] = str(value)
        fields = {key: ctx.params.pop(_identifier(key)) for key in recipe.fields()}
        overrides = {key: text for key, text in fields.items() if text is not None}
        name = ctx.params.pop("recipe_name")
        if self.checkout and not ctx.params.get("out"):
            from qrl.study import environments

            environments.check_checkout(self.name)
        inherited = self._inherited(own, overrides) if name == recipe.DEFAULT else {}
        settings = ctx.params["settings"] = recipe.load(name, inherited | overrides)
        ctx.obj = Typed({"recipe": name, **overrides}, own, settings.device)
        return super().invoke(ctx)

    def _inherited(self, own: dict[str, str], overrides: dict[str, str]) -> dict[str, str]:
        """Return the settings of the run that made the result given in an option, and print which they are."""
        text = " ".join(own.values())
        if not _OURS.search(text):
            return {}
        from qrl import recipe
        from qrl.study import environments
        from qrl.tracking import origin, runs

        if runs.is_launched() or not (found := origin.find(text)):  # a study names every setting itself
            return {}
        newest, *others = found
        base = recipe.default(newest.values | overrides)
        usual = recipe.load(base).flat(*self.sections)
        read = {key: value for key, value in newest.values.items() if key in usual and key not in overrides}
        changed = [f"{key}={value}" for key, value in read.items() if value != usual[key]]
        differing = {key for other in others for key in read if other.values.get(key, read[key]) != read[key]}
        which = ", ".join(changed) or f"those of recipe {base}"
        notes = [f"Settings of run {newest.run_id[:8]} ({newest.step}): {which}"]
        if differing - _PLACES:
            notes.append(f"the other runs differ in {', '.join(sorted(differing - _PLACES))}")
        if environments.PLACE not in os.environ:  # printed before the step was handed over
            click.echo("; ".join(notes), err=True)
        return dict(newest.values)


def listed(option: str, text: str) -> list[str]:
    """Return the items of a comma-separated list; spaces and a trailing comma, as copying leaves them, are ignored.

    Raises:
        BadInput: there is no item.
    """
    items = [part.strip() for part in text.split(",") if part.strip()]
    if not items:
        raise BadInput(f"{option} is '{text}', which names nothing: give one name, or several by comma.")
    return items


def _identifier(key: str) -> str:
    return "recipe_field_" + key.replace(".", "__")
