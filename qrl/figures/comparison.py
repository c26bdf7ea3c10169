"""Cells, verdicts and methods: accuracies with their intervals, gain survival against the margin."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from qrl.figures.canvas import BLUE, FAINT, GREEN, GREY, INK, ORANGE, PURPLE, RED, VARIANTS, canvas, finish
from qrl.names import FULL
from qrl.stats.text import interval, percent_interval

if TYPE_CHECKING:
    from qrl.compare import Cell, Comparison
    from qrl.compare.ranking import Methods
    from qrl.stats import Estimate
    from qrl.stats.verdict import Verdict

COLOURS = {"base": GREY, "grpo": BLUE, "qat": GREEN, "qad": PURPLE, "": ORANGE}  # by the prefix of a method's name
TOKENS = "tokens"  # a measure of answers
VERDICTS = {"survives": GREEN, "reduced": ORANGE, "lost": RED, "inconclusive": GREY}
MARKERS = {"survives": "o", "reduced": "D", "lost": "s", "inconclusive": "o"}  # a second cue beside the colour
LABEL = {"facecolor": "white", "edgecolor": "none", "pad": 1}


def matrix(comparison: Comparison, path: str | Path) -> None:
    """Draw the accuracy of every cell with its 95 % interval, variants side by side under each scheme."""
    schemes, variants = comparison.schemes, comparison.variants
    figure, axes = canvas(6.4 + 0.9 * max(0, len(schemes) - 3), 4.4)
    pair = len(variants) == 2
    spread = 0.24 if pair else 0.78 / len(variants)
    for i, variant in enumerate(variants):
        cells = [comparison.cells[variant, scheme] for scheme in schemes]
        x = np.arange(len(cells)) + (i - (len(variants) - 1) / 2) * spread
        y = [cell.estimate for cell in cells]
        errors = [[cell.estimate - cell.low for cell in cells], [cell.high - cell.estimate for cell in cells]]
        colour = VARIANTS[i % len(VARIANTS)]
        axes.errorbar(x, y, yerr=errors, fmt="o", ms=8, lw=2, capsize=4, color=colour, label=variant, zorder=3)
        style = {"xytext": (0, 4), "ha": "center", "va": "bottom"}
        if pair:  # labels beside the points, away from the other variant
            style = {"xytext": (-9 if i == 0 else 9, 0), "ha": "right" if i == 0 else "left", "va": "center"}
        style |= {"textcoords": "offset points", "color": colour, "size": 9, "bbox": LABEL}
        for px, cell in zip(x, cells, strict=True):
            axes.annotate(f"{cell.estimate:.3f}", (px, cell.estimate if pair else cell.high), **style)
    ticks = [comparison.shown(scheme).replace(" (groups", "\n(groups") for scheme in schemes]
    axes.set_xticks(range(len(schemes)), ticks, size=12)
    axes.set_xlim(-0.6, len(schemes) - 0.4)
    axes.margins(y=0.12)
    axes.set_ylabel("accuracy")
    axes.grid(axis="x", visible=False)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(variants), frameon=False, borderaxespad=0.2)
    gain = comparison.row(FULL)
    finish(figure, _gain_title(gain.variant, gain.delta), _matrix_note(comparison), path)


def _matrix_note(comparison: Comparison) -> str:
    shared = "the same for all" if comparison.paired else "counted per cell"
    note = f"n = {comparison.n} questions per cell, {shared}; bars are 95 % intervals of each cell (Wilson)"
    if len(comparison.runs) > 1:
        of_seeds = f"n = {comparison.n} questions, mean of {len(comparison.runs)} seeds"
        note = f"{of_seeds}; bars are 95 % intervals of each cell and include the spread between seeds"
    if comparison.paired:
        note += ".\nDifferences are paired, so most of their intervals are narrower than these bars suggest"
    return f"{note}."


def survival(comparison: Comparison, path: str | Path) -> None:
    """Draw gain survival of every quantized scheme as a forest plot, with the lines that decide on the verdict.

    Raises:
        ValueError: there is no quantized scheme.
    """
    rows = comparison.judged()
    if not rows:
        raise ValueError("There is no quantized scheme, so gain survival is not defined: expected one beside full.")
    figure, axes = canvas(8.4, 2.1 + 0.72 * len(rows))
    full_gains = [comparison.row(FULL, row.variant).delta for row, _, _ in rows]
    half_gains = [gain.estimate / 2 if gain.low > 0 else None for gain in full_gains]
    left, right = _limits(rows, half_gains)
    for y, ((_, verdict, value), half_gain) in enumerate(zip(rows, half_gains, strict=True)):
        if half_gain is not None:
            _shade_words(axes, y, -half_gain, -verdict.margin, (left, right))
        _forest_row(axes, y, verdict, value)
    several = len(comparison.variants) > 2
    shown = [(row.variant, comparison.shown(row.scheme)) for row, _, _ in rows]
    labels = [f"{variant} · {scheme}" if several else scheme for variant, scheme in shown]
    axes.axvline(0, color=INK, lw=1)
    axes.set_xlim(left, right)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), labels, size=12)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("gain survival: gain under the scheme − gain at full precision (accuracy)")
    if half_gains[0] is not None:
        _name_lines(axes, -half_gains[0], -rows[0][1].margin)
    finish(figure, _survival_title(rows, several), _survival_note(comparison), path)


def _limits(rows: Sequence[tuple], half_gains: Sequence[float | None]) -> tuple[float, float]:
    """Return the ends of the axis: every interval, every seed and every line are within."""
    places = [0.0, *(-half_gain for half_gain in half_gains if half_gain is not None)]
    for _, verdict, value in rows:
        places += [value.low, value.high, -verdict.margin]
        places += [run.estimate for run in value.runs.values] if value.runs else []
    room = 0.08 * (max(places) - min(places))
    return min(places) - room, max(places) + room


def _shade_words(axes, y: int, lost: float, margin: float, ends: tuple[float, float]) -> None:
    """Shade what a gain survival means: the gain is lost left of `lost`, survives right of `margin`, or is reduced."""
    left, right = ends
    regions = {"lost": (left, lost), "reduced": (lost, margin), "survives": (max(lost, margin), right)}
    for word, (begin, end) in regions.items():
        if begin < end:
            axes.fill_betweenx([y - 0.5, y + 0.5], begin, end, color=VERDICTS[word], alpha=0.1, lw=0)
    axes.plot([lost] * 2, [y - 0.5, y + 0.5], color=RED, lw=1.6, ls=":")
    axes.plot([margin] * 2, [y - 0.5, y + 0.5], color=GREEN, lw=1.4, ls=(0, (4, 2)))


def _name_lines(axes, lost: float, margin: float) -> None:
    """Name the two lines above the panel, each on the side that faces away from the other."""
    sides = ("right", "left") if lost < margin else ("left", "right")
    lines = (("half of the gain is lost", lost, RED), ("−margin", margin, GREEN))
    for (text, place, colour), side in zip(lines, sides, strict=True):
        beside = {"textcoords": "offset points", "ha": side, "size": 9.5, "color": colour}
        axes.annotate(text, (place, -0.5), (-3 if side == "right" else 3, 3), **beside)


def _survival_title(rows: Sequence[tuple], several: bool) -> str:
    return survival_finding([(row.scheme, verdict.verdict) for row, verdict, _ in rows], several, "Gain")


def _survival_note(comparison: Comparison) -> str:
    pairing = "paired" if comparison.paired else "independent cells"
    note = (
        f"n = {comparison.n} questions, {pairing}. Thin bar: 95 % interval. Thick bar: between the one-sided 95 % "
        "bounds; it decides:\nwholly left of the dotted line, the gain is lost; wholly right of the dashed line, it "
        "survives; else wholly left of 0, it is reduced;\nelse the study is inconclusive. Both lines are estimates; "
        "the verdict includes their error. Right: share of the gain kept, gain survival."
    )
    if len(comparison.runs) > 1:
        note += f"\nMean of {len(comparison.runs)} seeds, intervals include the spread between seeds. Ticks: each seed."
    return note


def _forest_row(axes, y: int, verdict: Verdict, value: Estimate) -> None:
    colour = VERDICTS[verdict.verdict]
    axes.plot([value.low, value.high], [y, y], color=colour, lw=2.2, solid_capstyle="butt")
    axes.plot([value.lower, value.upper], [y, y], color=colour, lw=7, solid_capstyle="butt")
    axes.plot(value.estimate, y, MARKERS[verdict.verdict], ms=6, color="white", mec=colour, mew=1.8)
    _draw_runs(axes, y, value)
    word = "lost, all of it" if verdict.all_lost else verdict.verdict
    kept = f": {percent_interval(verdict.kept)} kept" if verdict.kept else ""
    style = {"va": "center", "color": INK, "size": 10, "annotation_clip": False}
    axes.annotate(f"{word}{kept}\n{interval(value)}", (1.02, y), xycoords=("axes fraction", "data"), **style)


def methods(measured: Methods, title: str, path: str | Path) -> None:
    """Draw the accuracy of every method − that of GRPO at full precision, with 95 % intervals and a tick per run."""
    rows = [(row.cell, f"{row.accuracy.estimate:.3f}", row.error) for row in measured.rows if row.error is not None]
    _forest(
        measured, rows, "accuracy − accuracy of grpo at full precision", title, "Right: accuracy, difference.", path
    )


def lengths(measured: Methods, path: str | Path) -> None:
    """Draw the tokens an answer of every method − those of its reference, with 95 % intervals."""
    rows = [
        (cell, f"{found.means[TOKENS].estimate:.1f}", found.changes[TOKENS])
        for cell, found in measured.answers.items()
        if TOKENS in found.changes
    ]
    longer, shorter = sum(value.low > 0 for *_, value in rows), sum(value.high < 0 for *_, value in rows)
    title = f"Answers are longer than the reference's in {longer} of {len(rows)} methods, shorter in {shorter}"
    against = "tokens an answer − those of the reference, at full precision"
    _forest(measured, rows, against, title, "Right: tokens, difference.", path)


def _forest(
    measured: Methods, rows: list[tuple[Cell, str, Estimate]], axis: str, title: str, right: str, path: str | Path
) -> None:
    """Draw a difference per cell with its interval, and a text beside it."""
    figure, axes = canvas(8.4, 2.0 + 0.3 * len(rows))
    beside = {"xycoords": ("axes fraction", "data"), "va": "center", "color": INK, "size": 9, "annotation_clip": False}
    for y, (cell, text, value) in enumerate(rows):
        colour = next(colour for prefix, colour in COLOURS.items() if cell[0].startswith(prefix))
        axes.plot([value.low, value.high], [y, y], color=colour, lw=2.2, solid_capstyle="butt")
        axes.plot(value.estimate, y, "o", ms=7, color=colour)
        _draw_runs(axes, y, value)
        axes.annotate(f"{text}   {interval(value)}", (1.02, y), **beside)
    axes.axvline(0, color=INK, lw=1)
    axes.set_ylim(len(rows) - 0.5, -0.6)
    axes.set_yticks(range(len(rows)), [measured.shown(cell) for cell, *_ in rows], size=10)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(axis)
    runs = "one training run each"
    if measured.runs > 1:
        ticks = " (ticks)" if any(value.runs for *_, value in rows) else ""
        runs = f"mean of {measured.runs} training runs{ticks}, intervals include their spread"
    finish(figure, title, f"n = {rows[0][2].n} questions, paired; {runs}. Bars: 95 % intervals. {right}", path)


def _draw_runs(axes, y: float, value: Estimate) -> None:
    """Draw a tick for each training run below a row of a forest plot."""
    if value.runs:
        estimates = [run.estimate for run in value.runs.values]
        axes.plot(estimates, [y + 0.28] * len(estimates), "|", ms=8, mew=1.5, color=FAINT)


def _gain_title(variant: str, gain: Estimate) -> str:
    if gain.low > 0:
        return f"{variant} gains {interval(gain)} at full precision"
    if gain.high < 0:
        return f"{variant} loses at full precision, {interval(gain)}"
    return f"{variant}: no significant gain at full precision, {interval(gain)}"


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def survival_finding(rows: Sequence[tuple[str, str]], several: bool, gain: str) -> str:
    """Return the schemes of each verdict as a sentence.

    Args:
        rows: scheme and verdict of each.
        several: there are several trained variants, so that verdicts are only counted.
        gain: the first words of such a count.
    """
    by_verdict = {name: [scheme for scheme, verdict in rows if verdict == name] for name in VERDICTS}
    verdicts = {verdict: schemes for verdict, schemes in by_verdict.items() if schemes}
    if several:
        counts = ", ".join(f"{verdict} in {len(schemes)}" for verdict, schemes in verdicts.items())
        return f"{gain} under {len(rows)} variants and schemes: {counts}"
    sentences = {
        "survives": "{gain} survives {}",
        "reduced": "{gain} is reduced under {}",
        "lost": "{gain} is lost under {}",
        "inconclusive": "whether {gain} survives {} is inconclusive",
    }
    parts = [sentences[verdict].replace("{}", _listed(schemes)) for verdict, schemes in verdicts.items()]
    title = "; ".join(part.replace("{gain}", "it" if i else "the gain") for i, part in enumerate(parts))
    return title[0].upper() + title[1:]
