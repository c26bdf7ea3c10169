"""What a step prints at its end: where its result is, and the command that uses it next. Silent within a study."""

from collections.abc import Mapping

import click

from qrl.tracking import runs

SAME = "with the same recipe"


def model(address: str, variant: str, scheme: str) -> None:
    """Print a full-precision model, which can be quantized and evaluated."""
    then = f"`evaluate --cells {variant}:{scheme}={address}` or `quantize --models {variant}={address}`, {SAME}"
    _print({"Model": f"{address}, {variant} in full precision", "Next": then})


def adapter(address: str) -> None:
    """Print an adapter, which is to be merged first."""
    _print({"Adapter": address, "Next": f"`merge --adapter {address}`, {SAME}"})


def cells(stored: Mapping[str, str]) -> None:
    """Print quantized models by `variant:scheme`."""
    listed = ",".join(f"{cell}={address}" for cell, address in stored.items())
    _print({"Models": listed, "Next": f"`evaluate --cells {listed}`, {SAME}"})


def evaluated(run_ids: Mapping[str, str]) -> None:
    """Print evaluation runs by `variant:scheme`."""
    first, *more = run_ids.values()
    then = f"`compare --cells {','.join(run_ids.values())}`" if more else f"`promote --stage STAGE --cell {first}`"
    if more and len({cell.partition(":")[0] for cell in run_ids}) == 1:
        then += ", with the runs of another variant to compare with"
    _print({"Runs": ", ".join(f"{cell} {run_id}" for cell, run_id in run_ids.items()), "Next": then})


def _print(lines: Mapping[str, str]) -> None:
    if not runs.is_launched():
        click.echo("\n".join(f"{label:8}{text}" for label, text in lines.items()))
