"""What a step prints at its end: its result, and on the last line the command that uses it next. Silent within a study.

The command needs no setting of the recipe: a step takes them from the run of a result that it is given.
"""

import contextlib
from collections.abc import Mapping, Sequence

import click

from qrl import names, process
from qrl import recipe as recipes
from qrl.errors import BadInput
from qrl.recipe import Recipe
from qrl.tracking import cells, runs


def adapter(address: str) -> None:
    """Print an adapter; it is merged next."""
    _print(f"Adapter {address}", "merge", {"adapter": address})


def model(recipe: Recipe, address: str) -> None:
    """Print a trained model in full precision; it is quantized next, and the model before training with it."""
    qat = recipe.train.qat
    how = {"scheme": recipe.quantize.schemes[0] if qat == "none" else names.rounded(qat)}
    how |= {"quantize.format": qat} if how["scheme"] == names.RTN_FILE and qat != "none" else {}
    models = {names.BASE: recipe.model, recipe.train.variant: address}
    result = f"Model   {address}, {recipe.train.variant} in full precision"
    _print(result, "quantize", how | {"models": _listed(models)})


def quantized(sources: Mapping[str, str], stored: Mapping[str, str]) -> None:
    """Print quantized models, by `variant:scheme`; they are evaluated next, with their sources, by variant."""
    full = {f"{variant}:{names.FULL}": address for variant, address in sources.items()}
    _print(f"Models  {_listed(stored)}", "evaluate", {"cells": _listed(full | stored)})


def diagnosed(base: str, trained: str, quantized: str | None) -> None:
    """Evaluate the models of a diagnosis next: `quantized` lists some by `variant:scheme`."""
    full = _listed({f"{names.BASE}:{names.FULL}": base, f"{names.GRPO}:{names.FULL}": trained})
    _print("", "evaluate", {"cells": ",".join(filter(None, (full, quantized)))})


def evaluated(recipe: Recipe, models: Mapping[str, str], run_ids: Mapping[str, str]) -> None:
    """Print evaluation runs, by `variant:scheme`, as `models`.

    Two variants in full precision are compared next, and base is promoted; any other cell is evaluated beside base.
    """
    result = "\n".join(f"Run     {run_id}, {cell}" for cell, run_id in run_ids.items())
    base = f"{names.BASE}:{names.FULL}"
    if together := comparable(run_ids):
        _print(result, "compare", {"cells": ",".join(together.values())})
    elif base in run_ids:
        _print(result, "promote", {"stage": names.BASE, "cell": run_ids[base]})
    else:
        _print(result, "evaluate", {"cells": _listed({base: recipe.model, **models})})


def comparable(run_ids: Mapping[str, str]) -> dict[str, str]:
    """Return the cells that `compare` can put into one table, by `variant:scheme`; none without base and another.

    They are those of the variants that have a cell at full precision, under the schemes that all of these have.
    """
    variants = [cell.partition(":")[0] for cell in run_ids if cell.endswith(f":{names.FULL}")]
    if names.BASE not in variants or len(variants) < 2:
        return {}
    schemes = dict.fromkeys(cell.partition(":")[2] for cell in run_ids)
    whole = [scheme for scheme in schemes if all(f"{variant}:{scheme}" in run_ids for variant in variants)]
    cells = [f"{variant}:{scheme}" for scheme in whole for variant in variants]
    return {cell: run_ids[cell] for cell in cells}


def compared(recipe: Recipe, run_ids: Sequence[str]) -> None:
    """Promote next the cells that have a stage, by the runs of their evaluations; under several seeds, the first."""
    by_cell = {}
    for run_id in reversed(run_ids):
        with contextlib.suppress(BadInput):  # rows that somebody else logged
            cell = cells.read(run_id)
            by_cell[f"{cell.variant}:{cell.scheme}"] = run_id
    declared = {stage.stage: stage.cell for stage in recipe.promote.declared}
    earned = {stage: by_cell[cell] for stage, cell in declared.items() if cell in by_cell}
    if earned:
        _print("", "promote", {"stage": ",".join(earned), "cell": ",".join(earned.values())})


def promoted(name: str, stage: str) -> None:
    """Serve a stage next, of the registered model `name`."""
    _print("", "serve", serving(name, stage))


def serving(name: str, stage: str) -> dict[str, str]:
    """Return the options with which `serve` serves a stage of a registered model."""
    shipped = recipes.Recipe().model
    return {"stage": stage} | ({} if name == shipped else {"registered_name": name})


def _listed(models: Mapping[str, str]) -> str:
    return ",".join(f"{label}={address}" for label, address in models.items())


def _print(result: str, step: str, options: Mapping[str, str]) -> None:
    if not runs.is_launched():
        if result:
            click.echo(result)
        click.echo(f"Next, with the same settings:\n{process.command(step, options)}")
