"""A study as one page to send to a colleague: does the gain survive, at what size, and how do we know?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from qrl.figures import cards, interactive, page, rewards
from qrl.figures.canvas import BLUE
from qrl.figures.cards import Gate
from qrl.figures.forest import forest
from qrl.figures.heatmaps import movement_note
from qrl.figures.page import Section, axis, laid, numbers
from qrl.names import scheme

HOW_TO_READ = (
    "Square brackets and bars are 95 % intervals. Accuracy is the share of held-out questions answered correctly. "
    "The gain is the accuracy of the trained model minus that of the base model. Gain survival is the gain under a "
    "quantization scheme minus the gain at full precision: 0 means that no gain is lost. Gain kept is their ratio. "
    "The verdict is the first of these that is shown by one-sided 95 % bounds. Lost: more than half of the gain is "
    "lost. Survives: gain survival is above minus the margin, and there is a gain under the scheme. Reduced: gain "
    "survival is below 0. Inconclusive: none of these. Without a setting the margin is a tenth of the gain, at least "
    "0.01. Accuracy kept is the accuracy under the scheme divided by that at full precision. A model with a higher "
    "accuracy has more points to lose, so compare the trained model and the base on both scales."
)
OLDER = (
    "The table behind this page is of an older version. There the margin was half of the gain, lost meant that the "
    "loss is larger than the margin, and reduced did not exist: run compare again for the present verdicts."
)
CHANGED = (
    "Answers that quantization turned wrong or right, beside those at full precision; some of each, "
    "all of them are in questions.parquet."
)


@dataclass(frozen=True)
class Study:
    """What the page shows. Whatever is missing or empty is left out."""

    table: Mapping[str, Any]  # as `table.json` holds it
    facts: Mapping[str, str] = field(default_factory=dict)  # the head of the page, label → text
    sizes: Mapping[str, int] = field(default_factory=dict)  # bytes of weights by `variant:scheme`
    gates: Sequence[Gate] = ()
    history: pd.DataFrame = field(default_factory=pd.DataFrame)  # a row per training step
    weights: pd.DataFrame = field(default_factory=pd.DataFrame)  # this and the next two are what `diagnose` writes
    stored: pd.DataFrame = field(default_factory=pd.DataFrame)
    behaviour: pd.DataFrame = field(default_factory=pd.DataFrame)
    changed: pd.DataFrame = field(default_factory=pd.DataFrame)  # as changed_answers.json holds them
    notes: Sequence[str] = ()  # as notes.json holds them: what the answers rest on


def weights_page(weights: pd.DataFrame, stored: pd.DataFrame, behaviour: pd.DataFrame, path: str | Path) -> None:
    """Write what `diagnose` measured as an HTML page of its own; the last two tables may be empty."""
    head, foot = page.html("weights_head", note=movement_note(weights)), page.html("small", note=interactive.READ)
    page.write("qrl: weights", head, interactive.sections(weights, stored, behaviour), path, foot)


def report(study: Study, path: str | Path) -> None:
    """Write the page of a whole study, an HTML file."""
    table = {scheme(name): entry for name, entry in study.table.items()}  # older tables say fp16
    rows = cards.rows_of(table)
    quantized = [row for row in rows if row.entry.get("gain_survival")]
    sections = [Section("Verdicts", "", [cards.verdicts(quantized, study.sizes)])]
    if study.notes:
        sections.append(Section("What the answers rest on", "", [page.html("notes", items=study.notes)]))
    cells = [cards.cells_table(table, rows, study.sizes), forest(quantized, table)]
    sections.append(Section("Cells", "", cells))
    if on_scales := cards.scales_table(quantized):
        sections.append(Section(cards.scales_question(quantized), "", [on_scales]))
    if answers := cards.answers_table(table, rows):
        sections.append(Section("Answers", "", [answers]))
    if len(study.changed):
        sections.append(Section("Changed answers", CHANGED, [cards.changed_answers(study.changed)], folded=True))
    if study.gates:
        sections.append(
            Section("Gates and versions", cards.gates_finding(study.gates), [page.html("gates", decisions=study.gates)])
        )
    sections += [Section("Accuracy of every cell", "", [_matrix(table)], folded=True), *_training(study.history)]
    if len(study.weights):
        parts = interactive.sections(study.weights, study.stored, study.behaviour)
        sections += [part._replace(folded=True) for part in parts]
    note = f"{movement_note(study.weights)} {interactive.READ}" if len(study.weights) else interactive.READ
    older = any("headline" not in row.entry for row in quantized)
    how_to_read = f"{HOW_TO_READ} {OLDER}" if older else HOW_TO_READ
    foot = page.html("study_foot", how_to_read=how_to_read, note=note)
    page.write(f"qrl: {cards.headline(table)}", cards.heading(table, study.facts), sections, path, foot)


def _matrix(table: Mapping[str, Any]) -> dict:
    cells = {name: entry["cells"] for name, entry in table.items()}
    drawn = []
    for number, variant in enumerate(next(iter(cells.values()))):
        ends = [(cell[variant]["accuracy"], cell[variant]["low"], cell[variant]["high"]) for cell in cells.values()]
        drawn.append(interactive.bars(variant, number, list(cells), ends))
    n = min(cell["n"] for by_variant in cells.values() for cell in by_variant.values())
    axes = {"xaxis": {"type": "category"}, "yaxis": axis("accuracy"), "scattermode": "group"}
    return laid(drawn, f"Accuracy with its 95 % interval; n = {n:,} questions per cell", 420, **axes)


def _training(history: pd.DataFrame) -> list[Section]:
    measure = next((name for name in rewards.MEASURES if name in history and history[name].notna().any()), None)
    if not measure:
        return []
    curves = [_curve(history, column, title) for column, title in rewards.shown(history, measure).items()]
    found = f"{rewards.reward_found(history, measure)}. {rewards.OF_STEPS}"
    return [Section("Training", found, curves, folded=True)]


def _curve(history: pd.DataFrame, column: str, title: str) -> dict:
    """Return one measure of the training, each logged step and its running mean."""
    part, smooth = rewards.smoothed(history, column)
    look = {"type": "scatter", "x": numbers(part["step"]), "showlegend": False}
    drawn = [
        look | {"y": numbers(part[column]), "mode": "markers", "marker": {"color": BLUE, "opacity": 0.4}},
        look | {"y": numbers(smooth), "mode": "lines", "line": {"color": BLUE, "width": 3}},
    ]
    return laid(drawn, title, 260, xaxis=axis("optimizer step"))
