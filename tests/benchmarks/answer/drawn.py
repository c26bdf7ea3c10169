"""The figures of the sweep: the loss by bits, and the excess of grpo's loss by scheme."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from contrasts import BASE, CLIFF, CONTROLS, GRPO, MARGIN, PRIMARY, SFT
from findings import CLIFF_LOSS, Findings

from qrl.stats import Estimate

matplotlib.use("Agg")

import matplotlib.pyplot as plt


def excess_by_scheme(found: Findings, title: str, out: Path) -> None:
    """Draw how much more each scheme costs grpo than the base and both controls; 3 and 2 bits to the right."""
    schemes = [q for q in found.answers.schemes() if any(q in found.excesses[other] for other in (BASE, *CONTROLS))]
    low = [scheme for scheme in schemes if scheme.endswith(("int3", "int2"))]
    parts = [part for part in ([q for q in schemes if q not in low], low) if part]
    height = 1.5 + 0.3 * max(map(len, parts))
    figure, axes = plt.subplots(1, len(parts), figsize=(12, height), squeeze=False, layout="constrained")
    for axis, part in zip(axes[0], parts, strict=True):
        _draw(axis, part, found)
    answers = found.answers
    over = f"{len(answers.sizes)} sizes, {answers.runs} seeds, {answers.evidence.n:,} questions, 95 % intervals"
    figure.supxlabel(f"accuracy that quantization costs grpo, minus what it costs another ({over})", fontsize=9)
    axes[0, -1].legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    _saved(figure, out)


def _draw(axis, schemes: Sequence[str], found: Findings) -> None:
    for shift, other in zip((-0.22, 0.0, 0.22), (BASE, *CONTROLS), strict=True):
        excesses = found.excesses[other]
        places = [place + shift for place, scheme in enumerate(schemes) if scheme in excesses]
        held = [excesses[scheme].value for scheme in schemes if scheme in excesses]
        if held:
            middle = [value.estimate for value in held]
            axis.errorbar(middle, places, xerr=_reach(held), fmt="o", ms=3, capsize=2, label=f"minus {other}'s")
    axis.axvspan(-MARGIN, MARGIN, color="grey", alpha=0.15, lw=0, label=f"±{MARGIN}")
    axis.axvline(0, color="grey", lw=0.5)
    axis.set_yticks(range(len(schemes)), [f"{q} (primary)" if q == PRIMARY else q for q in schemes])
    axis.invert_yaxis()


def loss_by_bits(found: Findings, title: str, out: Path) -> None:
    """Draw the loss by bits before and after training, a panel per size."""
    sizes = found.answers.sizes
    figure, axes = plt.subplots(1, len(sizes), figsize=(3 * len(sizes), 3.2), squeeze=False, layout="constrained")
    for axis, size in zip(axes[0], sizes, strict=True):
        for shift, variant in ((-0.06, BASE), (0.0, SFT), (0.06, GRPO)):
            if cliff := found.cliffs.get((size, variant)):
                places, middle = np.arange(len(CLIFF)) + shift, [value.estimate for value in cliff.losses]
                axis.errorbar(places, middle, _reach(cliff.losses), marker="o", ms=3, capsize=2, label=variant)
        axis.set_xticks(range(len(CLIFF)), ["8", "4", "3", "2"])
        axis.set_xlabel("bits of the weights")
        axis.set_title(f"{size}, {found.answers.parameters[size] / 1e6:.3g} M", fontsize=9)
        axis.axhline(0, color="grey", lw=0.5)
        axis.axhline(CLIFF_LOSS, color="grey", lw=0.8, ls=":", label=f"a loss of {CLIFF_LOSS}")
    axes[0, 0].set_ylabel("accuracy lost to GPTQ (8 bits: w8a16)")
    axes[0, 0].legend(fontsize=7)
    figure.suptitle(title, fontsize=9)
    _saved(figure, out)


def _reach(values: Sequence[Estimate]) -> np.ndarray:
    """Return the distances to both ends of the intervals, as error bars take them."""
    return np.array([[value.estimate - value.low, value.high - value.estimate] for value in values]).T


def _saved(figure, out: Path) -> None:
    figure.savefig(out, dpi=150)
    plt.close(figure)
