"""A recipe's fields as options of the command line: what is typed for a field overrides the recipe."""

import itertools
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import click
from click.core import ParameterSource

from qrl.errors import BadInput

# A flag that can have a value too, since `mlflow run` passes -P rank=true on as `--rank true`.
SWITCH = {"is_flag": False, "flag_value": True, "type": bool, "metavar": "[BOOL]"}

_STORE_ADDRESS = re.compile(r"models:/|runs:/|\b[0-9a-f]{32}\b")  # of a model, an artifact or a run
# Keys of click's context for `--help`: the recipe that would run, and whether all fields are shown.
_RECIPE, _ALL = "qrl.recipe", "qrl.all"
_MAY_DIFFER = {"model", "registered_name", "device"}  # settings in which cells to compare may differ


@dataclass(frozen=True)
class Typed:
    """What the user typed, to be repeated in the steps that a command launches."""

    overrides: dict[str, str]  # `recipe`, and fields of the recipe
    options: dict[str, str]  # the command's own options
    device: str  # of the resolved recipe

    def run(self, step: str, choice: str, check: Callable[[], object], work: Callable[[], object]) -> None:
        """Do the work here, or check it and hand it to the environment that the scheme or engine, `choice`, needs."""
        from qrl.study import build, environments

        folder = build.environment_for(step, choice, self.device)
        if folder is None:
            work()
        else:
            check()
            environments.hand_over(folder, step, self.overrides | self.options)


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
        """Make a command of click's.

        Args:
            args, kwargs: click's own.
            sections: of the recipe, or single fields, that the command reads.
            first: the fields that `--help` shows.
            auto: the recipe if none is named.
            checkout: whether the command needs a checkout of the project, and not only the package.
        """
        super().__init__(*args, **kwargs)
        self.sections = sections
        self.first = first
        self.auto = auto
        self.checkout = checkout

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words of a command; note for `--help` which recipe they would run."""
        from qrl import recipe  # takes longer than the rest of `--help`

        words = itertools.pairwise(split_options(args))
        typed = {option.removeprefix("--"): value for option, value in words}
        name = typed.get("recipe", recipe.DEFAULT)
        wants_help = not {"-h", "--help", "--help-all"}.isdisjoint(args)
        if name == recipe.DEFAULT and self.auto == "tiny" and wants_help:
            from qrl.study import auto

            name = auto.recipe_for(name, typed)
            if name == recipe.DEFAULT:
                name = recipe.default(typed)
        ctx.meta[_RECIPE] = self.auto if name == recipe.DEFAULT else name
        return super().parse_args(ctx, args)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the command's own options, `--recipe`, and every field with its value in the recipe that would run."""
        from qrl import recipe

        name = ctx.meta.get(_RECIPE, self.auto)
        try:
            values = recipe.load(name).flat()
        except BadInput:  # which is reported when the command is invoked
            name = self.auto
            values = recipe.load(name).flat()
        about_recipe = (
            "Recipe to start from: a name from `qrl recipes`, or a YAML file. auto: by model, task and device."
        )
        options = [
            click.Option(["--recipe", "recipe_name"], default="auto", metavar="NAME|FILE.yaml", help=about_recipe)
        ]
        shows_all = ctx.meta.get(_ALL, False)
        for key, (annotation, description) in recipe.fields().items():
            value = "" if values[key] in ("null", "") else f"  [{Path(name).stem}: {values[key]}]"
            is_shown = self._reads(key) and (shows_all or key in self.first)
            options.append(
                click.Option(
                    [f"--{key}", _identifier(key)],
                    metavar=recipe.type_name(annotation),
                    help=description + value,
                    hidden=not is_shown,
                )
            )
        options.append(
            click.Option(
                ["--help-all"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_show_all,
                help="Show this with every option, and exit.",
            )
        )
        own_options = [param for param in self.params if param.name != "yes"]
        yes_option = [param for param in self.params if param.name == "yes"]  # after the fields
        click_options = super().get_params(ctx)[len(self.params) :]
        return [*own_options, *options, *yes_option, *click_options]

    def invoke(self, ctx: click.Context):
        """Call the command with the resolved recipe as `settings`, and with `Typed` as the context's object."""
        from qrl import recipe

        typed_options = self._typed_options(ctx)
        fields = {key: ctx.params.pop(_identifier(key)) for key in recipe.fields()}
        overrides = {key: text for key, text in fields.items() if text is not None}
        name = ctx.params.pop("recipe_name")
        if self.checkout and not ctx.params.get("out"):
            from qrl.study import environments

            environments.check_checkout(self.name)
            environments.put_on_path()
        if name != recipe.DEFAULT and "model" in overrides:
            from qrl.study import fit

            overrides |= fit.replacements(name, overrides)
        inherited = self._inherited(typed_options, overrides) if name == recipe.DEFAULT else {}
        if self.auto == "tiny" and not inherited:
            from qrl.study import auto

            name = auto.recipe_for(name, overrides)
        settings = recipe.load(name, inherited | overrides)
        if settings.model.startswith("models:/"):
            from qrl.registry import starting

            settings = starting.with_version(settings)
            overrides["model"] = settings.model  # the version, for the steps that this command launches
        ctx.params["settings"] = settings
        if "prompt" in overrides:  # a file's contents, which its later steps then share
            overrides["prompt"] = settings.prompt
        ctx.obj = Typed({"recipe": name, **overrides}, typed_options, settings.device)
        if not ctx.params.get("out"):  # with --out a command needs no store
            _settle_jobs()
        return super().invoke(ctx)

    def _typed_options(self, ctx: click.Context) -> dict[str, str]:
        """Return the command's own options as typed; a secret goes into its variable instead."""
        typed = {}
        for option in self.params:
            value = ctx.params.get(option.name)
            if option.envvar and value:  # runs log parameters, which a secret must not be
                os.environ[option.envvar] = value
            elif ctx.get_parameter_source(option.name) is ParameterSource.COMMANDLINE and value not in (None, ""):
                typed[option.opts[0].lstrip("-")] = str(value)
        return typed

    def _reads(self, key: str) -> bool:
        """Return whether this command reads a field, as far as its sections say."""
        if "." not in key:
            return True
        section = key.split(".", maxsplit=1)[0]
        return section == "chat" or section in self.sections or key in self.sections

    def _inherited(self, typed_options: dict[str, str], overrides: dict[str, str]) -> dict[str, str]:
        """Return the settings of the run that made the result given in an option, and print which they are."""
        model = overrides.get("model", "")
        starts_from_version = model.startswith("models:/")
        if not starts_from_version and not _STORE_ADDRESS.search(" ".join(typed_options.values())):
            return {}
        from qrl import recipe
        from qrl.study import build
        from qrl.tracking import origin, runs

        if runs.is_launched():  # a study names every setting itself
            return {}
        results = list(typed_options.values())
        if starts_from_version:
            from qrl.registry import starting

            results.append(starting.unverified_version_of(model))
        origins = origin.find(" ".join(results))
        if not origins:
            return {}
        newest, *others = origins
        recorded = dict(newest.values)
        if starts_from_version:  # a line of its own, with a name of its own
            recorded = {key: value for key, value in recorded.items() if key not in _MAY_DIFFER}
        base_name = recipe.default(recorded | overrides)
        base_values = {key: value for key, value in recipe.load(base_name).flat().items() if self._reads(key)}
        inherited = {key: value for key, value in recorded.items() if key in base_values and key not in overrides}
        changes = [f"{key}={value}" for key, value in inherited.items() if value != base_values[key]]
        settings = ", ".join(changes) or f"those of recipe {base_name}, as far as this step uses them"
        notes = [f"Settings of run {newest.run_id[:8]} ({newest.step}): {settings}"]

        differing = set()
        for other in others:
            differing |= {key for key, value in inherited.items() if other.values.get(key, value) != value}
        differing -= _MAY_DIFFER
        if differing:
            notes.append(f"the other runs differ in {', '.join(sorted(differing))}")
        edited = newest.edited(recorded | overrides)
        if edited:
            notes.append(f"{', '.join(edited)} is not what that run read, so results are of another task or reward")
        if build.PLACE not in os.environ:  # otherwise it was printed before the step was handed over
            click.echo("; ".join(notes), err=True)
        return recorded


def _settle_jobs() -> None:
    """Give the store's jobs that died on a Slurm cluster their end, where Slurm can be asked."""
    if not shutil.which("scontrol"):
        return
    from qrl.cluster import jobs
    from qrl.tracking import store

    if store.is_there():
        store.prepare()
        jobs.settle_all("slurm:%")


def _show_all(ctx: click.Context, _option: click.Parameter, is_given: bool) -> None:
    if is_given:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


def split_options(words: Iterable[str]) -> list[str]:
    """Return the words of a command with `--key=value` as two."""
    parts = []
    for word in words:
        parts += word.split("=", 1) if word.startswith("--") else [word]
    return parts


def parse_list(option: str, text: str) -> list[str]:
    """Return the items of a comma-separated list; spaces and a trailing comma, as copying leaves them, are ignored.

    Raises:
        BadInput: there is no item.
    """
    from qrl.recipe import lists

    return lists.parse_list(option, text)


def parse_pairs(option: str, text: str | None) -> dict[str, str]:
    """Return `a=x,b=y` as a mapping; empty if the option is not given.

    Raises:
        BadInput: an item has no `=`, or a name is repeated.
    """
    from qrl.recipe import lists

    return {} if text is None else lists.parse_pairs(option, text)


def _identifier(key: str) -> str:
    return "recipe_field_" + key.replace(".", "__")
