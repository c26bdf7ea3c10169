"""The real model's figure: what each scheme costs the base and trained models, in points and as a share kept."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from evidence import BASE, FULL, GRPO, SFT, accuracy_kept
from study import MODEL, NAMED, RATE, Study, power
from summary import PRIMARY, RTN_INT4, SAME_RATE, SCHEMES

from qrl import names
from qrl.figures import canvas as drawing
from qrl.stats import Estimate

COLOURS = {BASE: drawing.GREY, SFT: drawing.ORANGE, SAME_RATE: drawing.RED, GRPO: drawing.BLUE}
MARKERS = {BASE: "s", SFT: "D", SAME_RATE: "^", GRPO: "o"}  # colour is not the only cue
STEP = 0.23  # between the variants of a scheme
ABOVE = 0.1  # from a mean to its seeds
GROUPS = {  # of schemes, from the top
    "4 bits": (PRIMARY, RTN_INT4, names.NVFP4A16, names.AWQ_CT, names.GPTQ),
    "8 bits": (names.INT8, names.FP8),
    "3, 2 bits": (names.GPTQ_INT3, names.GPTQ_INT2),
}


class Panel(NamedTuple):
    """One scale.

    Attributes:
        label: of its axis.
        value: of a variant under a scheme; None if it was not evaluated.
        single: the same in one seed, from accuracies at full precision and under the scheme.
        ends: beyond which intervals are cut off.
        neutral: where nothing is lost.
    """

    label: str
    value: Callable[[str, str], Estimate | None]
    single: Callable[[float, float], float]
    ends: tuple[float, float]
    neutral: float


def draw(study: Study, title: str, out: Path) -> None:
    """Draw both scales beside each other: means with 95 % intervals, and a tick for each seed."""
    from matplotlib.figure import Figure

    present = {scheme for scheme in SCHEMES if study.cost(GRPO, scheme) is not None}
    places = _places(present)
    panels = (
        Panel("accuracy lost, in points (0: none)", study.cost, lambda full, kept: full - kept, (-1.0, 1.0), 0.0),
        Panel(
            "share of accuracy kept, % (100: all)",
            lambda variant, scheme: _percent(accuracy_kept(study.evidence, variant, scheme)),
            lambda full, kept: 100 * kept / full,
            (0.0, 110.0),
            100.0,
        ),
    )
    figure = Figure(figsize=(10.5, 1.9 + 0.62 * max(places.values())), layout="constrained", facecolor="white")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, panel in zip(axes, panels, strict=True):
        drawing.dress(axis)
        _draw(axis, panel, study, places)
    labels = [f"{scheme}\n(primary)" if scheme == PRIMARY else scheme for scheme in places]
    axes[0].set_yticks(list(places.values()), labels, size=11)
    axes[0].set_ylim(max(places.values()) + 0.55, -0.55)
    _name_groups(axes[1], places)
    marks, labels = axes[0].get_legend_handles_labels()
    half = -(-len(marks) // 2)  # all of them are wider than a panel
    for axis, part in zip(axes, (slice(half), slice(half, None)), strict=True):
        axis.legend(marks[part], labels[part], ncols=2, fontsize=11, handletextpad=0.1, **drawing.LEGEND)
    counts = sorted(set(study.evidence.asked((GRPO, FULL)).values()))
    n = " to ".join(f"{count:,}" for count in dict.fromkeys((counts[0], counts[-1])))
    note = (
        f"{MODEL}, sums, n = {n} questions a seed. Large marks: means of {_seeds(study)} seeds with 95 % intervals "
        "over seeds and questions; ticks: single seeds."
    )
    drawing.finish(figure, title, note, out)


def _seeds(study: Study) -> str:
    """Return how many seeds the variants have under the primary scheme."""
    cells = [(variant, PRIMARY) for variant in COLOURS]
    counts = sorted({len(study.evidence.seeds[cell]) for cell in cells if cell in study.evidence.seeds})
    return " or ".join(map(str, counts))


def _places(present: set[str]) -> dict[str, float]:
    """Return the height of each scheme, with a gap between groups."""
    found, place = {}, 0.0
    for schemes in GROUPS.values():
        own = [scheme for scheme in schemes if scheme in present]
        for scheme in own:
            found[scheme] = place
            place += 1.0
        place += 0.35 if own else 0.0
    return found


def _draw(axis, panel: Panel, study: Study, places: Mapping[str, float]) -> None:
    for place in list(places.values())[::2]:
        axis.axhspan(place - 0.5, place + 0.5, color=drawing.GRID, alpha=0.45, lw=0, zorder=0)
    variants = [variant for variant in COLOURS if (variant, FULL) in study.evidence.cells]
    for position, variant in enumerate(variants):
        shift = STEP * (position - (len(variants) - 1) / 2)
        rate = study.setting(variant, RATE)
        label: str | None = f"{NAMED[variant]}, {power(rate)}" if rate else NAMED[variant]
        for scheme, place in places.items():
            value = panel.value(variant, scheme)
            if value is None:
                continue
            height, colour = place + shift, COLOURS[variant]
            axis.plot(np.clip([value.low, value.high], *panel.ends), [height] * 2, color=colour, lw=2, zorder=2)
            full, kept = (study.evidence.by_seed((variant, under)) for under in (FULL, scheme))
            single = [panel.single(full[seed], kept[seed]) for seed in sorted(set(full) & set(kept)) if full[seed]]
            axis.plot(single, [height - ABOVE] * len(single), "|", ms=6, color=colour, mew=1.4, zorder=3)
            style = {"ms": 7, "color": colour, "mec": "white", "mew": 0.6, "label": label, "ls": "none"}
            axis.plot(value.estimate, height, MARKERS[variant], zorder=4, **style)
            label = None  # once in the legend
    axis.axvline(panel.neutral, color=drawing.INK, lw=1)
    axis.margins(x=0.03)
    axis.set_xlabel(panel.label, size=11)
    axis.grid(axis="y", visible=False)


def _name_groups(axis, places: Mapping[str, float]) -> None:
    """Write the bits of each group of schemes to the right of a panel."""
    for name, schemes in GROUPS.items():
        own = [places[scheme] for scheme in schemes if scheme in places]
        if own:
            at = {"xycoords": ("axes fraction", "data"), "va": "center", "annotation_clip": False}
            axis.annotate(name, (1.02, sum(own) / len(own)), color=drawing.FAINT, size=10, **at)


def _percent(share: Estimate | None) -> Estimate | None:
    return None if share is None else share.scaled(100.0)
