"""The command line: one command per step, options made from the recipe, exit codes."""

from qrl.cli.commands import cli
from qrl.cli.ending import main

__all__ = ["cli", "main"]
