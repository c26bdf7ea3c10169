"""A recipe's fields as options of the command line: what is typed for one overrides the recipe."""

from __future__ import annotations

import math

import click


class Finite(click.FloatRange):
    """A number within bounds; click's own takes NaN, which lies within any, and infinity."""

    def convert(self, value, param, ctx) -> float:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class RecipeCommand(click.Command):
    """A command whose options are its own inputs plus the fields of the recipe's sections that it reads.

    They are made when the command is asked for them: reading recipes takes longer than the rest of `--help`.
    """

    def __init__(self, *args, sections: tuple[str, ...] = (), auto: str = "tiny", **kwargs):
        super().__init__(*args, **kwargs)
        self.sections, self.auto = sections, auto  # auto: the recipe that is started from where nothing is named

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Its own inputs, `--recipe`, and every field with its value in the recipe that `auto` means: accepted everywhere, shown where it matters."""
        from qrl import recipe

        other = ", instruct for a model of yours, math for such a task" if self.auto == "tiny" else ""
        which = f"Settings to start from: {', '.join(recipe.names())}, or a YAML file; auto: {self.auto}{other}."
        values = recipe.load(self.auto).flat()
        options = ["--recipe", "recipe_name"]
        found = [click.Option(options, default=recipe.DEFAULT, show_default=True, metavar="NAME|FILE.yaml", help=which)]
        for key, (annotation, description) in recipe.fields().items():
            hidden = "." in key and key.split(".", maxsplit=1)[0] not in self.sections
            metavar = recipe.type_name(annotation)
            here = "" if values[key] in ("null", "") else f"  [{self.auto}: {values[key]}]"
            found.append(
                click.Option([f"--{key}", _identifier(key)], metavar=metavar, help=description + here, hidden=hidden)
            )
        return [*self.params, *found, *super().get_params(ctx)[len(self.params) :]]

    def invoke(self, ctx: click.Context):
        from qrl import recipe

        given = {key: ctx.params.pop(_identifier(key)) for key in recipe.fields()}
        overrides = {key: text for key, text in given.items() if text is not None}
        name = ctx.params.pop("recipe_name")
        ctx.params["settings"] = recipe.load(name, overrides)
        ctx.obj = {"recipe": name, **overrides}  # as typed, to hand on to the steps of a study
        return super().invoke(ctx)


def _identifier(key: str) -> str:
    return "recipe_field_" + key.replace(".", "__")
