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


def print_adapter(address: str) -> None:
    """Print an adapter; it is merged next."""
    _print(f"Adapter {address}", "merge", {"adapter": address})


def print_model(recipe: Recipe, address: str) -> None:
    """Print a trained model in full precision; it is quantized next, and the model before training with it."""
    qat = recipe.train.qat
    if qat == "none":
        options = {"scheme": recipe.quantize.schemes[0]}
    else:
        options = {"scheme": names.rounded(qat)}
        if options["scheme"] == names.RTN_FILE:
            options["quantize.format"] = qat
    options["models"] = _listed({names.BASE: recipe.model, recipe.train.variant: address})
    _print(f"Model   {address}, {recipe.train.variant} in full precision", "quantize", options)


def print_quantized(sources: Mapping[str, str], stored: Mapping[str, str]) -> None:
    """Print quantized models, by `variant:scheme`; they are evaluated next, with their sources, by variant."""
    full = {f"{variant}:{names.FULL}": address for variant, address in sources.items()}
    _print(f"Models  {_listed(stored)}", "evaluate", {"cells": _listed(full | stored)})


def print_diagnosed(base: str, trained: str, quantized: str | None) -> None:
    """Evaluate the models of a diagnosis next: `quantized` lists some by `variant:scheme`."""
    full = _listed({f"{names.BASE}:{names.FULL}": base, f"{names.GRPO}:{names.FULL}": trained})
    _print("", "evaluate", {"cells": ",".join(filter(None, (full, quantized)))})


def print_evaluated(recipe: Recipe, models: Mapping[str, str], run_ids: Mapping[str, str]) -> None:
    """Print evaluation runs, by `variant:scheme`, as `models`.

    Two variants in full precision are compared next, and base is promoted; any other cell is evaluated next with base.
    """
    result = "\n".join(f"Run     {run_id}, {cell}" for cell, run_id in run_ids.items())
    base = f"{names.BASE}:{names.FULL}"
    comparable_run_ids = comparable_cells(run_ids)
    if comparable_run_ids:
        _print(result, "compare", {"cells": ",".join(comparable_run_ids.values())})
    elif base in run_ids:
        refusal = _refusal(recipe, cells.read(run_ids[base]))
        if refusal:
            _print_result(f"{result}\n{refusal}")
        else:
            _print(result, "promote", {"stage": names.BASE, "cell": run_ids[base]})
    else:
        _print(result, "evaluate", {"cells": _listed({base: recipe.model, **models})})


def comparable_cells(run_ids: Mapping[str, str]) -> dict[str, str]:
    """Return the cells that `compare` can put into one table, by `variant:scheme`; none without base and another.

    They are those of the variants that have a cell at full precision, under the schemes that all of these have.
    """
    variants = [cell.partition(":")[0] for cell in run_ids if cell.endswith(f":{names.FULL}")]
    if names.BASE not in variants or len(variants) < 2:
        return {}

    comparable_run_ids = {}
    schemes = dict.fromkeys(cell.partition(":")[2] for cell in run_ids)
    for scheme in schemes:
        labels = [f"{variant}:{scheme}" for variant in variants]
        if all(label in run_ids for label in labels):
            comparable_run_ids |= {label: run_ids[label] for label in labels}
    return comparable_run_ids


def print_compared(recipe: Recipe, run_ids: Sequence[str]) -> None:
    """Promote next the cells that have a stage, by the runs of their evaluations; under several seeds, the first."""
    evaluated = {}
    for run_id in reversed(run_ids):
        with contextlib.suppress(BadInput):  # rows that somebody else logged
            cell = cells.read(run_id)
            evaluated[f"{cell.variant}:{cell.scheme}"] = cell

    run_of_stage = {}
    for stage in recipe.promote.declared:
        cell = evaluated.get(stage.cell)
        if cell is None:
            continue
        refusal = _refusal(recipe, cell)
        if refusal:  # later stages are made from this one
            _print_result(f"Stage {stage.stage} is out of reach. {refusal}")
            break
        run_of_stage[stage.stage] = cell.run_id
    if run_of_stage:
        _print("", "promote", {"stage": ",".join(run_of_stage), "cell": ",".join(run_of_stage.values())})


def _refusal(recipe: Recipe, cell: cells.Evaluated) -> str:
    """Return why every gate must refuse a cell, whatever it is compared with; empty if none must."""
    label = names.cell_name(cell.variant, cell.scheme)
    if cell.n < recipe.promote.min_n:
        return (
            f"{label} answered {cell.n} questions, and gates admit no cell with fewer than {recipe.promote.min_n} "
            "(promote.min_n): evaluate it with a larger evaluate.n to promote it."
        )
    if cell.broken or cell.unhealthy:
        return f"{label} is not healthy, and gates admit no such cell: see the limits of health that it broke."
    return ""


def print_promoted(name: str, stage: str) -> None:
    """Serve a stage next, of the registered model `name`."""
    _print("", "serve", serve_options(name, stage))


def serve_options(name: str, stage: str) -> dict[str, str]:
    """Return the options with which `serve` serves a stage of a registered model."""
    options = {"stage": stage}
    if name != recipes.Recipe().model:  # the shipped model, which `serve` serves by default
        options["registered_name"] = name
    return options


def _listed(models: Mapping[str, str]) -> str:
    return ",".join(f"{label}={address}" for label, address in models.items())


def _print_result(result: str) -> None:
    if not runs.is_launched():
        click.echo(result)


def _print(result: str, step: str, options: Mapping[str, str]) -> None:
    if runs.is_launched():
        return
    if result:
        click.echo(result)
    click.echo(f"Next, with the same settings:\n{process.command(step, options)}")
