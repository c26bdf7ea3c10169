"""The sentence on checkpoints whose files name different ends of a turn."""

from collections.abc import Iterable
from pathlib import Path

import click

from qrl import tiny
from qrl.engine import hf
from qrl.tracking import runs


def tell(folders: Iterable[Path]) -> None:
    """Print which end each file of a checkpoint names and what is taken, once, unless a study has launched this step.

    Args:
        folders: of the checkpoints that a step reads. The first that disagrees speaks for all, since a study's models
            are made from one base.
    """
    if runs.is_launched():
        return
    for folder in folders:
        sentence = "" if folder == tiny.PATH else hf.describe_ends(folder)
        if sentence:
            click.secho(f"qrl: {sentence}", fg="yellow", err=True)
            return
