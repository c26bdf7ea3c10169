"""Cells, verdicts and methods: accuracies with their intervals, gain survival against the margin."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from qrl.figures.canvas import (
    BLUE,
    FAINT,
    GREEN,
    GREY,
    INK,
    LABEL_CHARACTERS,
    ORANGE,
    PURPLE,
    RED,
    TICK_CHARACTERS,
    VARIANTS,
    canvas,
    finish,
    shortened,
)
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
MARKERS = {"survives": "o", "reduced": "D", "lost": "s", "inconclusive": "o"}  # colour is not the only cue
LABEL = {"facecolor": "white", "edgecolor": "none", "pad": 1}


def matrix(comparison: Comparison, path: str | Path) -> None:
    """Draw the accuracy of every cell with its 95 % interval, variants side by side under each scheme."""
    schemes = comparison.schemes
    variants = comparison.variants
    figure, axes = canvas(6.4 + 0.9 * max(0, len(schemes) - 3), 4.4)
    is_pair = len(variants) == 2
    step = 0.24 if is_pair else 0.78 / len(variants)
    for i, variant in enumerate(variants):
        cells = [comparison.cells[variant, scheme] for scheme in schemes]
        x = np.arange(len(cells)) + (i - (len(variants) - 1) / 2) * step
        y = [cell.estimate for cell in cells]
        errors = [[cell.estimate - cell.low for cell in cells], [cell.high - cell.estimate for cell in cells]]
        colour = VARIANTS[i % len(VARIANTS)]
        label = shortened(variant)
        axes.errorbar(x, y, yerr=errors, fmt="o", ms=8, lw=2, capsize=4, color=colour, label=label, zorder=3)

        # Of two variants, each number is next to its point, away from the other variant; of more, above its bar.
        if not is_pair:
            position = {"xytext": (0, 4), "ha": "center", "va": "bottom"}
        elif i == 0:
            position = {"xytext": (-9, 0), "ha": "right", "va": "center"}
        else:
            position = {"xytext": (9, 0), "ha": "left", "va": "center"}
        style = {"textcoords": "offset points", "color": colour, "size": 9, "bbox": LABEL}
        for point_x, cell in zip(x, cells, strict=True):
            point_y = cell.estimate if is_pair else cell.high
            axes.annotate(f"{cell.estimate:.3f}", (point_x, point_y), **position, **style)

    axes.set_xticks(range(len(schemes)), [_tick(comparison.scheme_label(scheme)) for scheme in schemes], size=12)
    axes.set_xlim(-0.6, len(schemes) - 0.4)
    axes.margins(y=0.12)
    axes.set_ylabel("accuracy")
    axes.grid(axis="x", visible=False)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(variants), frameon=False, borderaxespad=0.2)
    gain = comparison.row(FULL)
    finish(figure, _gain_title(shortened(gain.variant), gain.delta), _matrix_note(comparison), path)


def _tick(scheme_label: str) -> str:
    """Return a scheme's label for an axis, its size of groups on a second line."""
    lines = scheme_label.replace(" (groups", "\n(groups").splitlines()
    return "\n".join(shortened(line, TICK_CHARACTERS) for line in lines)


def _matrix_note(comparison: Comparison) -> str:
    questions = "the same for all" if comparison.paired else "counted per cell"
    note = f"n = {comparison.n} questions per cell, {questions}; bars are 95 % intervals of each cell (Wilson)"
    if len(comparison.runs) > 1:
        note = (
            f"n = {comparison.n} questions, mean of {len(comparison.runs)} seeds; bars are 95 % intervals of each cell "
            "and include the spread between seeds"
        )
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
    # Shades and the line at half of the gain need a gain: where none is shown, they would say something about noise.
    for y, ((_, verdict, value), half_gain) in enumerate(zip(rows, half_gains, strict=True)):
        if half_gain is not None:
            _shade_verdicts(axes, y, -half_gain, -verdict.margin, (left, right))
        _forest_row(axes, y, verdict, value)

    has_several_variants = len(comparison.variants) > 2
    labels = []
    for row, _, _ in rows:
        label = shortened(comparison.scheme_label(row.scheme))
        labels.append(f"{shortened(row.variant)} · {label}" if has_several_variants else label)
    axes.axvline(0, color=INK, lw=1)
    axes.set_xlim(left, right)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), labels, size=12)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("gain survival: gain under the scheme − gain at full precision (accuracy)")
    if half_gains[0] is not None:
        _name_lines(axes, -half_gains[0], -rows[0][1].margin)
    finish(figure, _survival_title(rows, has_several_variants), _survival_note(comparison), path)


def _limits(rows: Sequence[tuple], half_gains: Sequence[float | None]) -> tuple[float, float]:
    """Return the ends of the axis: every interval, every seed and every line are within."""
    drawn_values = [0.0, *(-half_gain for half_gain in half_gains if half_gain is not None)]
    for _, verdict, value in rows:
        drawn_values += [value.low, value.high, -verdict.margin]
        if value.runs:
            drawn_values += [run.estimate for run in value.runs.values]
    padding = 0.08 * (max(drawn_values) - min(drawn_values))
    return min(drawn_values) - padding, max(drawn_values) + padding


def _shade_verdicts(axes, y: int, lost: float, margin: float, ends: tuple[float, float]) -> None:
    """Shade what a gain survival means: the gain is lost left of `lost`, survives right of `margin`, or is reduced."""
    left, right = ends
    regions = {"lost": (left, lost), "reduced": (lost, margin), "survives": (max(lost, margin), right)}
    for verdict, (begin, end) in regions.items():
        if begin < end:
            axes.fill_betweenx([y - 0.5, y + 0.5], begin, end, color=VERDICTS[verdict], alpha=0.1, lw=0)
    axes.plot([lost] * 2, [y - 0.5, y + 0.5], color=RED, lw=1.6, ls=":")
    axes.plot([margin] * 2, [y - 0.5, y + 0.5], color=GREEN, lw=1.4, ls=(0, (4, 2)))


def _name_lines(axes, lost: float, margin: float) -> None:
    """Name the two lines above the panel, each on the side that faces away from the other."""
    lost_side, margin_side = ("right", "left") if lost < margin else ("left", "right")
    _name_line(axes, "half of the gain is lost", lost, lost_side, RED)
    _name_line(axes, "−margin", margin, margin_side, GREEN)


def _name_line(axes, text: str, x: float, alignment: str, colour: str) -> None:
    offset = (-3, 3) if alignment == "right" else (3, 3)
    axes.annotate(text, (x, -0.5), offset, textcoords="offset points", ha=alignment, size=9.5, color=colour)


def _survival_title(rows: Sequence[tuple], has_several_variants: bool) -> str:
    verdicts = [(shortened(row.scheme), verdict.verdict) for row, verdict, _ in rows]
    return survival_finding(verdicts, has_several_variants, "Gain")


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
    """Draw one gain survival: both intervals, the seeds, and the verdict in words."""
    colour = VERDICTS[verdict.verdict]
    axes.plot([value.low, value.high], [y, y], color=colour, lw=2.2, solid_capstyle="butt")
    axes.plot([value.lower, value.upper], [y, y], color=colour, lw=7, solid_capstyle="butt")
    axes.plot(value.estimate, y, MARKERS[verdict.verdict], ms=6, color="white", mec=colour, mew=1.8)
    _draw_runs(axes, y, value)
    text = "lost, all of it" if verdict.all_lost else verdict.verdict
    if verdict.kept:
        text += f": {percent_interval(verdict.kept)} kept"
    _annotate_right(axes, y, f"{text}\n{interval(value)}", size=10)


def _annotate_right(axes, y: float, text: str, size: float) -> None:
    """Write a text to the right of a panel, at the height of a row."""
    axes.annotate(
        text, (1.02, y), xycoords=("axes fraction", "data"), va="center", color=INK, size=size, annotation_clip=False
    )


def methods(measured: Methods, title: str, path: str | Path) -> None:
    """Draw the accuracy of every method − that of GRPO at full precision, with 95 % intervals and a tick per run."""
    rows = [(row.cell, f"{row.accuracy.estimate:.3f}", row.error) for row in measured.rows if row.error is not None]
    _forest(
        measured, rows, "accuracy − accuracy of grpo at full precision", title, "Right: accuracy, difference.", path
    )


def lengths(measured: Methods, path: str | Path) -> None:
    """Draw the tokens an answer of every method − those of its reference, with 95 % intervals."""
    rows = [
        (cell, f"{answers.means[TOKENS].estimate:.1f}", answers.changes[TOKENS])
        for cell, answers in measured.answers.items()
        if TOKENS in answers.changes
    ]
    longer = sum(change.low > 0 for *_, change in rows)
    shorter = sum(change.high < 0 for *_, change in rows)
    title = f"Answers are longer than the reference's in {longer} of {len(rows)} methods, shorter in {shorter}"
    axis_label = "tokens an answer − those of the reference, at full precision"
    _forest(measured, rows, axis_label, title, "Right: tokens, difference.", path)


def _forest(
    measured: Methods,
    rows: list[tuple[Cell, str, Estimate]],
    axis_label: str,
    title: str,
    right_note: str,
    path: str | Path,
) -> None:
    """Draw a difference per cell with its interval, and to its right a text."""
    figure, axes = canvas(8.4, 2.0 + 0.3 * len(rows))
    for y, (cell, text, value) in enumerate(rows):
        variant, _ = cell
        colour = next(colour for prefix, colour in COLOURS.items() if variant.startswith(prefix))
        axes.plot([value.low, value.high], [y, y], color=colour, lw=2.2, solid_capstyle="butt")
        axes.plot(value.estimate, y, "o", ms=7, color=colour)
        _draw_runs(axes, y, value)
        _annotate_right(axes, y, f"{text}   {interval(value)}", size=9)
    axes.axvline(0, color=INK, lw=1)
    axes.set_ylim(len(rows) - 0.5, -0.6)
    labels = [shortened(measured.cell_label(cell), 2 * LABEL_CHARACTERS) for cell, *_ in rows]  # a variant and a scheme
    axes.set_yticks(range(len(rows)), labels, size=10)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(axis_label)

    runs = "one training run each"
    if measured.runs > 1:
        ticks = " (ticks)" if any(value.runs for *_, value in rows) else ""
        runs = f"mean of {measured.runs} training runs{ticks}, intervals include their spread"
    first_value = rows[0][2]
    note = f"n = {first_value.n} questions, paired; {runs}. Bars: 95 % intervals. {right_note}"
    finish(figure, title, note, path)


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
    """Return `a, b and c`."""
    *first_names, last_name = names
    if not first_names:
        return last_name
    return f"{', '.join(first_names)} and {last_name}"


def survival_finding(rows: Sequence[tuple[str, str]], has_several_variants: bool, gain: str) -> str:
    """Return the schemes of each verdict as a sentence.

    Args:
        rows: scheme and verdict of each.
        has_several_variants: verdicts are then only counted.
        gain: the first words of such a count.
    """
    schemes_of_verdict = {}
    for verdict in VERDICTS:
        schemes = [scheme for scheme, row_verdict in rows if row_verdict == verdict]
        if schemes:
            schemes_of_verdict[verdict] = schemes

    if has_several_variants:
        counts = ", ".join(f"{verdict} in {len(schemes)}" for verdict, schemes in schemes_of_verdict.items())
        return f"{gain} under {len(rows)} variants and schemes: {counts}"

    clauses = []
    for verdict, schemes in schemes_of_verdict.items():
        subject = "it" if clauses else "the gain"
        clauses.append(_SENTENCES[verdict].format(gain=subject, schemes=_listed(schemes)))
    title = "; ".join(clauses)
    return title[0].upper() + title[1:]


_SENTENCES = {
    "survives": "{gain} survives {schemes}",
    "reduced": "{gain} is reduced under {schemes}",
    "lost": "{gain} is lost under {schemes}",
    "inconclusive": "whether {gain} survives {schemes} is inconclusive",
}
