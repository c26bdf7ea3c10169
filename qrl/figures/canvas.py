"""The canvas of PNGs: titles that state the finding, colours safe for the colour-blind, files that appear whole."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from qrl.names import BASE
from qrl.workspace import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#222222"
FAINT = "#6b6b6b"
GRID = "#e4e4e4"
GREY = "#7f7f7f"
BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
PURPLE = "#CC79A7"
SKY = "#56B4E9"
RED = "#D55E00"
VARIANTS = (GREY, BLUE, ORANGE, GREEN, PURPLE)  # base is grey, the first trained variant blue
LABEL_CHARACTERS = 24  # of a variant or scheme in a figure; longer ones leave no space for the panel
TICK_CHARACTERS = 16  # of one among several below or next to a panel
LEGEND = {"frameon": False, "loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2}  # above the panel


def canvas(width: float, height: float, rows: int = 1, heights: list[float] | None = None) -> tuple[Figure, Any]:
    """Return a figure with one panel above the other, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    grid = figure.subplots(rows, 1, sharex=rows > 1, height_ratios=heights)
    for axes in np.atleast_1d(grid):
        dress(axes)
    return figure, grid


def dress(axes: Axes) -> None:
    """Give a panel the look that all panels share."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, length=3)
    axes.grid(color=GRID, lw=0.8)
    axes.set_axisbelow(True)


def base_first(variants: Iterable[str]) -> list[str]:
    """Return the variants in the order of their colours: base, then the others by name."""
    return [BASE, *sorted(set(variants) - {BASE})]


def by_variant(frame: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame, str, float]]:
    """Yield each variant, its rows, its colour, and its offset from the middle of all variants, in steps of 1."""
    variants = base_first(frame["variant"])
    middle = (len(variants) - 1) / 2
    for i, variant in enumerate(variants):
        rows = frame[frame["variant"] == variant]
        yield variant, rows, VARIANTS[i % len(VARIANTS)], i - middle


def shortened(label: str, limit: int = LABEL_CHARACTERS) -> str:
    """Return a label with at most `limit` characters, an ellipsis in the middle: names often differ at their end."""
    if len(label) <= limit:
        return label
    end = (limit - 1) // 3
    start = limit - 1 - end
    return f"{label[:start]}…{label[-end:]}"


def wrapped(title: str, width: float) -> str:
    """Break a title into lines that fit, and keep its intervals whole.

    Args:
        title: in one line.
        width: of the figure, in inches.
    """
    unbroken = re.sub(r"\[[^]]*\]", lambda interval: interval[0].replace(" ", "\u00a0"), title)
    return textwrap.fill(unbroken, width=int(9.1 * width), break_on_hyphens=False)


def finish(figure: Figure, title: str, note: str, path: str | Path) -> None:
    """Put the title above and the note below, and write the file, whole or not at all."""
    title = wrapped(title, figure.get_figwidth())  # matplotlib would let it run out of the figure
    figure.suptitle(title, x=0.01, ha="left", size=13, weight="bold", color=INK)
    figure.supxlabel(note, x=0.01, ha="left", size=8.5, color=FAINT)
    with write_atomically(Path(path)) as partial:
        figure.savefig(partial, format="png", dpi=150)
