"""A page to draw on: titles that state what was found, colours that the colour-blind tell apart, files that appear whole."""

from __future__ import annotations

import os
import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, FAINT, GRID = "#222222", "#6b6b6b", "#e4e4e4"
GREY, BLUE, ORANGE, GREEN, PURPLE, SKY, RED = (
    "#7f7f7f",
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
)
VARIANTS = (GREY, BLUE, ORANGE, GREEN, PURPLE)  # base is grey, the first trained variant blue


def canvas(width: float, height: float, rows: int = 1, heights: list[float] | None = None) -> tuple[Figure, Any]:
    """A figure with one panel above the other, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    grid = figure.subplots(rows, 1, sharex=rows > 1, height_ratios=heights)
    for axes in np.atleast_1d(grid):
        dress(axes)
    return figure, grid


def dress(axes: Axes) -> None:
    """The look of every panel."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, length=3)
    axes.grid(color=GRID, lw=0.8)
    axes.set_axisbelow(True)


def wrapped(title: str, width: float) -> str:
    """A title in lines that fit, its intervals whole.

    Args:
        title: in one line.
        width: of the figure, in inches.
    """
    return textwrap.fill(
        re.sub(r"\[[^]]*\]", lambda found: found[0].replace(" ", "\u00a0"), title), width=int(9.1 * width)
    )


def finish(figure: Figure, axes: Axes, title: str, note: str, path: str | Path) -> None:
    """Title above, note below, file by rename."""
    title = wrapped(title, figure.get_figwidth())
    figure.suptitle(title, x=0.01, ha="left", size=13, weight="bold", color=INK)
    figure.supxlabel(note, x=0.01, ha="left", size=8.5, color=FAINT)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    figure.savefig(partial, format="png", dpi=150)
    os.replace(partial, path)
