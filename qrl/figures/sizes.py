"""The loss of every method by model size."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from qrl.figures.canvas import (
    BLUE,
    GREEN,
    GREY,
    INK,
    LEGEND,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    TICK_CHARACTERS,
    canvas,
    finish,
    shortened,
)

if TYPE_CHECKING:
    from qrl.compare.sizes import Sizes

_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, RED, SKY, GREY)
_MARKERS = ("o", "s", "^", "D")
_STEP = 0.015  # between two methods, in decades


def sizes(measured: Sizes, title: str, path: str | Path) -> None:
    """Draw accuracy of grpo at full precision − that of every method over the parameters, with 95 % intervals."""
    methods = [method for method in measured.methods if method.loss]
    figure, axes = canvas(8.4, 4.6 + 0.2 * (len(methods) // 3))
    for i, method in enumerate(methods):
        losses = list(method.loss.values())
        shift = 10 ** ((i - (len(methods) - 1) / 2) * _STEP)  # on a logarithmic axis, a factor
        x = [measured.parameters[model] * shift for model in method.loss]
        y = np.array([loss.estimate for loss in losses])
        errors = [y - [loss.low for loss in losses], [loss.high for loss in losses] - y]
        axes.errorbar(
            x,
            y,
            yerr=errors,
            lw=1.2,
            ms=6,
            capsize=3,
            label=shortened(method.name, 2 * TICK_CHARACTERS),
            color=_COLOURS[i % len(_COLOURS)],
            marker=_MARKERS[i // len(_COLOURS) % len(_MARKERS)],
        )
    axes.axhline(0, color=INK, lw=1)
    axes.set_xscale("log")
    labels = [f"{shortened(model)}\n{count:,}" for model, count in measured.parameters.items()]
    axes.set_xticks(list(measured.parameters.values()), labels, size=9)
    axes.minorticks_off()
    axes.margins(x=0.12)
    axes.set_xlabel("parameters")
    axes.set_ylabel("loss of accuracy against full precision, in points")
    axes.legend(**LEGEND, ncols=3, fontsize=9)
    note = f"n = {measured.n} held-out questions, paired. Bars: 95 % intervals over {measured.over}."
    finish(figure, title, note, path)
