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
from qrl.figures.page import Section, axis, numbers, plotly_figure
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
    "Answers that quantization turned wrong or right, next to those at full precision; some of each, "
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
    head = page.html("weights_head", note=movement_note(weights))
    foot = page.html("small", note=interactive.READ)
    page.write("qrl: weights", head, interactive.sections(weights, stored, behaviour), path, foot)


def report(study: Study, path: str | Path) -> None:
    """Write the page of a whole study, an HTML file."""
    table = {scheme(name): entry for name, entry in study.table.items()}  # older tables say fp16
    rows = cards.rows_of(table)
    quantized = [row for row in rows if row.entry.get("gain_survival")]
    sections = [
        *_answer_sections(study, table, rows, quantized),
        Section("Accuracy of every cell", "", [_accuracies(table)], folded=True),
        *_training_sections(study.history),
    ]
    note = interactive.READ
    if len(study.weights):
        weight_sections = interactive.sections(study.weights, study.stored, study.behaviour)
        sections += [section._replace(folded=True) for section in weight_sections]
        note = f"{movement_note(study.weights)} {note}"

    is_older = any("headline" not in row.entry for row in quantized)
    how_to_read = f"{HOW_TO_READ} {OLDER}" if is_older else HOW_TO_READ
    foot = page.html("study_foot", how_to_read=how_to_read, note=note)
    page.write(f"qrl: {cards.headline(table)}", cards.heading(table, study.facts), sections, path, foot)


def _answer_sections(
    study: Study, table: Mapping[str, Any], rows: list[cards.Row], quantized: list[cards.Row]
) -> list[Section]:
    """Return the parts that answer the question: verdicts, cells, what they cost, and what the gates decided."""
    sections = [Section("Verdicts", "", [cards.verdicts(quantized, study.sizes)])]
    if study.notes:
        sections.append(Section("What the answers rest on", "", [page.html("notes", items=study.notes)]))
    sections.append(Section("Cells", "", [cards.cells_table(table, rows, study.sizes), forest(quantized, table)]))

    scales_table = cards.scales_table(table, quantized)
    if scales_table:
        sections.append(Section(cards.scales_question(quantized), "", [scales_table]))
    answers_table = cards.answers_table(table, rows)
    if answers_table:
        sections.append(Section("Answers", "", [answers_table]))
    if len(study.changed):
        sections.append(Section("Changed answers", CHANGED, [cards.changed_answers(study.changed)], folded=True))
    if study.gates:
        gates = page.html("gates", decisions=study.gates)
        sections.append(Section("Gates and versions", cards.gates_finding(study.gates), [gates]))
    return sections


def _accuracies(table: Mapping[str, Any]) -> dict:
    """Return the accuracy of every cell with its interval."""
    cells = {name: entry["cells"] for name, entry in table.items()}
    variants = next(iter(cells.values()))
    traces = []
    for number, variant in enumerate(variants):
        intervals = [
            (by_variant[variant]["accuracy"], by_variant[variant]["low"], by_variant[variant]["high"])
            for by_variant in cells.values()
        ]
        traces.append(interactive.bars(variant, number, list(cells), intervals))
    n = min(min(cell["n"] for cell in by_variant.values()) for by_variant in cells.values())
    title = f"Accuracy with its 95 % interval; n = {n:,} questions per cell"
    return plotly_figure(traces, title, 420, xaxis={"type": "category"}, yaxis=axis("accuracy"), scattermode="group")


def _training_sections(history: pd.DataFrame) -> list[Section]:
    """Return the training's curves; none without a measure that has values."""
    measures = [name for name in rewards.MEASURES if name in history and history[name].notna().any()]
    if not measures:
        return []
    measure = measures[0]
    curves = [_curve(history, column, title) for column, title in rewards.panel_titles(history, measure).items()]
    finding = f"{rewards.reward_finding(history, measure)}. {rewards.OF_STEPS}"
    return [Section("Training", finding, curves, folded=True)]


def _curve(history: pd.DataFrame, column: str, title: str) -> dict:
    """Return one measure of the training, each logged step and its running mean."""
    logged, running_mean = rewards.smoothed(history, column)
    style = {"type": "scatter", "x": numbers(logged["step"]), "showlegend": False}
    traces = [
        style | {"y": numbers(logged[column]), "mode": "markers", "marker": {"color": BLUE, "opacity": 0.4}},
        style | {"y": numbers(running_mean), "mode": "lines", "line": {"color": BLUE, "width": 3}},
    ]
    return plotly_figure(traces, title, 260, xaxis=axis("optimizer step"))
