"""The figures of the sweep: the loss by bits, and the excess of grpo's loss by scheme."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from contrasts import BASE, CLIFF, CONTROLS, GRPO, MARGIN, PARAMETERS, Answers, against, loss

from qrl import names
from qrl.stats import Estimate

matplotlib.use("Agg")

import matplotlib.pyplot as plt


def excess_by_scheme(answers: Answers, title: str, out: Path) -> None:
    """Draw, for every scheme, how much more it costs grpo than the base and both controls."""
    found = {other: against(answers, other) for other in (BASE, *CONTROLS)}
    schemes = [scheme for scheme in answers.schemes() if any(scheme in values for values in found.values())]
    figure, axis = plt.subplots(figsize=(7, 1.2 + 0.32 * len(schemes)))
    for shift, (other, values) in zip((-0.22, 0.0, 0.22), found.items(), strict=True):
        places = [place + shift for place, scheme in enumerate(schemes) if scheme in values]
        held = [values[scheme] for scheme in schemes if scheme in values]
        if held:
            middle = [value.estimate for value in held]
            axis.errorbar(middle, places, xerr=_reach(held), fmt="o", ms=3, capsize=2, label=f"against {other}")
    axis.axvspan(-MARGIN, MARGIN, color="grey", alpha=0.15, lw=0)
    axis.axvline(0, color="grey", lw=0.5)
    axis.set_yticks(range(len(schemes)), schemes)
    axis.invert_yaxis()
    axis.set_xlabel(
        "accuracy that quantization costs grpo, minus what it costs the other (mean over sizes, 95 % intervals)"
    )
    axis.xaxis.label.set_size(8)
    axis.set_title(title, fontsize=9)
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    _saved(figure, out)


def loss_by_bits(answers: Answers, title: str, out: Path) -> None:
    """Draw the loss by bits before and after training, a panel per size."""
    figure, axes = plt.subplots(
        1, len(answers.sizes), figsize=(3 * len(answers.sizes), 3.2), sharey=True, squeeze=False
    )
    for axis, size in zip(axes[0], answers.sizes, strict=True):
        for shift, variant in ((-0.06, BASE), (0.0, names.SFT), (0.06, GRPO)):
            values = [answers.contrast(loss(size, variant, scheme)) for scheme in CLIFF]
            places = [place + shift for place, value in enumerate(values) if value]
            held = [value for value in values if value]
            if held:
                middle = [value.estimate for value in held]
                axis.errorbar(places, middle, _reach(held), marker="o", ms=3, capsize=2, label=variant)
        axis.set_xticks(range(len(CLIFF)), ["8", "4", "3", "2"])
        axis.set_xlabel("bits of the weights")
        axis.set_title(f"{size}, {PARAMETERS[size] / 1e6:.3g} M", fontsize=9)
        axis.axhline(0, color="grey", lw=0.5)
    axes[0, 0].set_ylabel("accuracy lost to quantization")
    axes[0, 0].legend(fontsize=7)
    figure.suptitle(title, fontsize=9)
    _saved(figure, out)


def _reach(values: Sequence[Estimate]) -> np.ndarray:
    """Return the distances to both ends of the intervals, as error bars take them."""
    return np.array([[value.estimate - value.low, value.high - value.estimate] for value in values]).T


def _saved(figure, out: Path) -> None:
    figure.tight_layout()
    figure.savefig(out, dpi=150)
    plt.close(figure)
