"""The figures of the sweep: the loss by bits, and the excess of grpo's loss by scheme."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from contrasts import BASE, CLIFF, CONTROLS, GRPO, MARGIN, PARAMETERS, SFT
from findings import CLIFF_LOSS, Findings

from qrl.stats import Estimate

matplotlib.use("Agg")

import matplotlib.pyplot as plt


def excess_by_scheme(found: Findings, title: str, out: Path) -> None:
    """Draw, for every scheme, how much more it costs grpo than the base and both controls."""
    by_other = {other: found.excesses[other] for other in (BASE, *CONTROLS)}
    schemes = [scheme for scheme in found.answers.schemes() if any(scheme in held for held in by_other.values())]
    figure, axis = plt.subplots(figsize=(8, 1.4 + 0.3 * len(schemes)))
    for shift, (other, excesses) in zip((-0.22, 0.0, 0.22), by_other.items(), strict=True):
        places = [place + shift for place, scheme in enumerate(schemes) if scheme in excesses]
        held = [excesses[scheme].value for scheme in schemes if scheme in excesses]
        if held:
            middle = [value.estimate for value in held]
            axis.errorbar(middle, places, xerr=_reach(held), fmt="o", ms=3, capsize=2, label=f"minus {other}'s")
    axis.axvspan(-MARGIN, MARGIN, color="grey", alpha=0.15, lw=0, label=f"±{MARGIN}")
    axis.axvline(0, color="grey", lw=0.5)
    axis.set_yticks(range(len(schemes)), schemes)
    axis.invert_yaxis()
    answers = found.answers
    over = f"{len(answers.sizes)} sizes, {answers.runs} seeds, {answers.evidence.n:,} questions, 95 % intervals"
    axis.set_xlabel(f"accuracy that quantization costs grpo, minus what it costs another\n({over})", fontsize=8)
    axis.set_title(title, fontsize=9)
    axis.legend(fontsize=8)
    _saved(figure, out)


def loss_by_bits(found: Findings, title: str, out: Path) -> None:
    """Draw the loss by bits before and after training, a panel per size."""
    sizes = found.answers.sizes
    figure, axes = plt.subplots(1, len(sizes), figsize=(3 * len(sizes), 3.2), sharey=True, squeeze=False)
    for axis, size in zip(axes[0], sizes, strict=True):
        for shift, variant in ((-0.06, BASE), (0.0, SFT), (0.06, GRPO)):
            if cliff := found.cliffs.get((size, variant)):
                places, middle = np.arange(len(CLIFF)) + shift, [value.estimate for value in cliff.losses]
                axis.errorbar(places, middle, _reach(cliff.losses), marker="o", ms=3, capsize=2, label=variant)
        axis.set_xticks(range(len(CLIFF)), ["8", "4", "3", "2"])
        axis.set_xlabel("bits of the weights")
        axis.set_title(f"{size}, {PARAMETERS[size] / 1e6:.3g} M", fontsize=9)
        axis.axhline(0, color="grey", lw=0.5)
        axis.axhline(CLIFF_LOSS, color="grey", lw=0.5, ls=":")
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
