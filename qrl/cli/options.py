"""A recipe's fields as options of the command line: what is typed for a field overrides the recipe."""

import itertools
import math
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
from click.core import ParameterSource

from qrl.errors import BadInput

# A flag that can have a value too, since `mlflow run` passes -P rank=true on as `--rank true`.
SWITCH = {"is_flag": False, "flag_value": True, "type": bool, "metavar": "[BOOL]"}

_OURS = re.compile(r"models:/|runs:/|\b[0-9a-f]{32}\b")  # addresses in the store
_RECIPE, _ALL = "qrl.recipe", "qrl.all"  # what `--help` shows: whose values, and whether every field
_PLACES = {"model", "registered_name", "device"}  # settings in which cells to compare may differ


@dataclass(frozen=True)
class Typed:
    """What the user typed, to be repeated in the steps that a command launches."""

    overrides: dict[str, str]  # `recipe`, and fields of the recipe
    options: dict[str, str]  # the command's own options
    device: str  # of the resolved recipe

    def run(self, step: str, choice: str, check: Callable[[], object], here: Callable[[], object]) -> None:
        """Do the work `here`, or `check` and hand it to the environment that the scheme or engine, `choice`, needs."""
        from qrl.study import build, environments

        if folder := build.environment_for(step, choice, self.device):
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

    def __init__(
        self,
        *args,
        sections: tuple[str, ...] = (),
        first: tuple[str, ...] = ("model", "seed", "device"),
        auto: str = "tiny",
        checkout: bool = False,
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        self.sections, self.checkout = sections, checkout  # sections, or single fields, that it reads
        self.first = first  # the fields that `--help` shows
        self.auto = auto  # the recipe where none is named

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words of a command; note for `--help` which recipe they would run."""
        from qrl import recipe  # takes longer than the rest of `--help`

        words = [part for word in args for part in (word.split("=", 1) if word.startswith("--") else [word])]
        typed = {option.removeprefix("--"): value for option, value in itertools.pairwise(words)}
        name = typed.get("recipe", recipe.DEFAULT)
        if name == recipe.DEFAULT and self.auto == "tiny" and {"-h", "--help", "--help-all"} & set(args):
            from qrl.study import auto

            name = auto.recipe_for(name, typed)
            name = recipe.default(typed) if name == recipe.DEFAULT else name
        ctx.meta[_RECIPE] = self.auto if name == recipe.DEFAULT else name
        return super().parse_args(ctx, args)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the command's own options, `--recipe`, and every field with its value in the recipe that would run."""
        from qrl import recipe

        name, all_shown = ctx.meta.get(_RECIPE, self.auto), ctx.meta.get(_ALL, False)
        try:
            values = recipe.load(name).flat()
        except BadInput:  # which is reported when the command is invoked
            name, values = self.auto, recipe.load(self.auto).flat()
        which = "Recipe to start from: a name from `qrl recipes`, or a YAML file. auto: by model, task and device."
        options = [click.Option(["--recipe", "recipe_name"], default="auto", metavar="NAME|FILE.yaml", help=which)]
        for key, (annotation, description) in recipe.fields().items():
            value = "" if values[key] in ("null", "") else f"  [{Path(name).stem}: {values[key]}]"
            words = {"metavar": recipe.type_name(annotation), "help": description + value}
            hidden = not self._reads(key) or not (all_shown or key in self.first)
            options.append(click.Option([f"--{key}", _identifier(key)], **words, hidden=hidden))
        show_all = {"is_flag": True, "is_eager": True, "expose_value": False, "callback": _show_all}
        options.append(click.Option(["--help-all"], **show_all, help="Show this with every option, and exit."))
        last = [param for param in self.params if param.name == "yes"]
        own = [param for param in self.params if param not in last]
        return [*own, *options, *last, *super().get_params(ctx)[len(self.params) :]]

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
        if self.auto == "tiny" and not inherited:
            from qrl.study import auto

            name = auto.recipe_for(name, overrides)
        settings = ctx.params["settings"] = recipe.load(name, inherited | overrides)
        if "prompt" in overrides:  # a file's contents, which its later steps then share
            overrides["prompt"] = settings.prompt
        ctx.obj = Typed({"recipe": name, **overrides}, own, settings.device)
        if not ctx.params.get("out"):  # with --out a command needs no store
            _settle_jobs()
        return super().invoke(ctx)

    def _reads(self, key: str) -> bool:
        """Return whether this command reads a field, as far as its sections say."""
        return "." not in key or not {key, key.split(".", maxsplit=1)[0]}.isdisjoint((*self.sections, "chat"))

    def _inherited(self, own: dict[str, str], overrides: dict[str, str]) -> dict[str, str]:
        """Return the settings of the run that made the result given in an option, and print which they are."""
        text = " ".join(own.values())
        if not _OURS.search(text):
            return {}
        from qrl import recipe
        from qrl.study import build
        from qrl.tracking import origin, runs

        if runs.is_launched() or not (origins := origin.find(text)):  # a study names every setting itself
            return {}
        newest, *others = origins
        base = recipe.default(newest.values | overrides)
        usual = {key: value for key, value in recipe.load(base).flat().items() if self._reads(key)}
        read = {key: value for key, value in newest.values.items() if key in usual and key not in overrides}
        changed = [f"{key}={value}" for key, value in read.items() if value != usual[key]]
        differing = {key for other in others for key in read if other.values.get(key, read[key]) != read[key]}
        which = ", ".join(changed) or f"those of recipe {base}, as far as this step uses them"
        notes = [f"Settings of run {newest.run_id[:8]} ({newest.step}): {which}"]
        if differing - _PLACES:
            notes.append(f"the other runs differ in {', '.join(sorted(differing - _PLACES))}")
        if edited := newest.edited(newest.values | overrides):
            notes.append(f"{', '.join(edited)} is not what that run read, so results are of another task or reward")
        if build.PLACE not in os.environ:  # printed before the step was handed over
            click.echo("; ".join(notes), err=True)
        return dict(newest.values)


def _settle_jobs() -> None:
    """Give the store's jobs that died on a Slurm cluster their end, where Slurm can be asked."""
    if not shutil.which("scontrol"):
        return
    from qrl.cluster import jobs
    from qrl.tracking import store

    if store.is_there():
        store.prepare()
        jobs.settle_all("slurm:%")


def _show_all(ctx: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if wanted:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


def listed(option: str, text: str) -> list[str]:
    """Return the items of a comma-separated list; spaces and a trailing comma, as copying leaves them, are ignored.

    Raises:
        BadInput: there is no item.
    """
    from qrl.recipe import lists

    return lists.parse_items(option, text)


def named(option: str, text: str | None) -> dict[str, str]:
    """Return `a=x,b=y` as a mapping; empty if the option is not given.

    Raises:
        BadInput: an item has no `=`, or a name is repeated.
    """
    from qrl.recipe import lists

    return {} if text is None else lists.parse_pairs(option, text)


def _identifier(key: str) -> str:
    return "recipe_field_" + key.replace(".", "__")
