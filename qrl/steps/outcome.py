"""What a step that was asked for alone says at its end: where its outcome is, as the next step takes it."""

from __future__ import annotations

from collections.abc import Mapping

import click

from qrl.tracking import runs

SAME = "with the same recipe"


def model(address: str, variant: str, scheme: str) -> None:
    """A model in full precision: it can be stored in few bits, and asked."""
    then = f"`evaluate --cells {variant}:{scheme}={address}` or `quantize --models {variant}={address}`, {SAME}"
    _tell({"Model": f"{address}, {variant} in full precision", "Next": then})


def adapter(address: str) -> None:
    """An adapter, which is no model yet."""
    _tell({"Adapter": address, "Next": f"`merge --adapter {address}`, {SAME}"})


def cells(stored: Mapping[str, str]) -> None:
    """Models by `variant:scheme`."""
    listed = ",".join(f"{cell}={address}" for cell, address in stored.items())
    _tell({"Models": listed, "Next": f"`evaluate --cells {listed}`, {SAME}"})


def evaluated(asked: Mapping[str, str]) -> None:
    """Evaluation runs by `variant:scheme`."""
    first, *more = asked.values()
    then = f"`compare --cells {','.join(asked.values())}`" if more else f"`promote --stage STAGE --cell {first}`"
    if more and len({cell.partition(":")[0] for cell in asked}) == 1:  # nothing to compare with
        then += ", the runs of another variant beside them"
    _tell({"Runs": ", ".join(f"{cell} {run_id}" for cell, run_id in asked.items()), "Next": then})


def _tell(said: Mapping[str, str]) -> None:
    if not runs.is_launched():  # a study hands it on by itself
        click.echo("\n".join(f"{label:8}{text}" for label, text in said.items()))
