"""The page of a study: report.html, and the description that MLflow's UI shows above the run."""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qrl import names
from qrl.errors import BadInput
from qrl.recipe import Recipe
from qrl.study import facts
from qrl.study.launch import Launcher
from qrl.tracking import contents, runs

if TYPE_CHECKING:
    import pandas as pd

    from qrl.figures import Gate

MAX_DESCRIPTION = 7900  # characters; MLflow cuts what is longer
LINKED = (names.REPORT, names.TABLE_MD, names.TABLE_JSON, names.QUESTIONS, names.RECIPE)


def write(path: Path, recipe: Recipe, launcher: Launcher, gates: list[Gate]) -> None:
    """Write the study as one page."""
    from qrl import figures

    table = _read_table(launcher)
    sizes = {cell: size_bytes for cell, size_bytes in facts.cells(launcher).values() if size_bytes}
    diagnosis_run = launcher.result("diagnose").run_id
    study = figures.Study(
        table,
        facts.head(recipe, launcher.run_id, table),
        sizes,
        gates,
        frame(launcher.result("train").run_id, names.HISTORY),
        frame(diagnosis_run, names.WEIGHTS),
        frame(diagnosis_run, names.STORED),
        frame(diagnosis_run, names.BEHAVIOUR),
        _changed_answers(launcher),
        _notes(launcher),
    )
    figures.report(study, path)


def _read_table(launcher: Launcher) -> dict[str, Any]:
    path = contents.artifact(launcher.result("compare").run_id, names.TABLE_JSON)
    return json.loads(path.read_text(encoding="utf-8"))


def _changed_answers(launcher: Launcher) -> pd.DataFrame:
    """Return the table of changed answers, empty if an older comparison made none."""
    import pandas as pd

    try:
        path = contents.artifact(launcher.result("compare").run_id, names.CHANGED_JSON)
    except BadInput:
        return pd.DataFrame()
    return pd.DataFrame(**json.loads(path.read_text(encoding="utf-8")))


def _notes(launcher: Launcher) -> list[str]:
    """Return the notes of the comparison, none if it made none."""
    try:
        path = contents.artifact(launcher.result("compare").run_id, names.NOTES_JSON)
    except BadInput:
        return []
    return json.loads(path.read_text(encoding="utf-8"))


def frame(run_id: str, name: str) -> pd.DataFrame:
    """Return a table among a run's artifacts, empty if the run made none."""
    import pandas as pd

    try:
        return pd.read_parquet(contents.artifact(run_id, name))
    except BadInput:
        return pd.DataFrame()


def gates(recipe: Recipe, launcher: Launcher, refused: str) -> list[Gate]:
    """Return what the gates decided in this study, in the order of its stages.

    Args:
        recipe: declares the stages.
        launcher: of the study.
        refused: the sentence of the gate that refused; empty if none did.
    """
    from qrl import registry
    from qrl.figures import Gate

    study_start_s = runs.opened(launcher.run_id).info.start_time // 1000
    registered_name = registry.registered_name(recipe)
    decisions = []
    for declared in recipe.promote.declared:
        stage = declared.stage
        try:
            version = registry.resolve(registered_name, stage)
        except BadInput:
            continue
        record = version.gate(stage)
        if not record or not record.time:
            continue
        # A decision from before this study belongs to an earlier one.
        if datetime.fromisoformat(record.time).timestamp() >= study_start_s:
            reason = re.sub(r"^Stage \S+ passes: ", "", " ".join(record.reasons))
            cell = names.cell_name(version.variant, version.scheme)
            decisions.append(Gate(stage, str(version.version), cell, "passed", reason))
    if refused:
        prefix = re.match(r"Stage (\S+) is refused: ", refused)
        stage = prefix[1] if prefix else "gate"
        reason = refused[prefix.end() :] if prefix else refused
        decisions.append(Gate(stage, "", "", "refused", reason))
    return decisions


def headline(launcher: Launcher) -> str:
    """Return the study's finding in one clause: `The gain survives nf4; it is lost under awq`."""
    from qrl.figures import cards

    return cards.headline(_read_table(launcher))


def description(launcher: Launcher, text: str, figures: list[str]) -> str:
    """Return the run's description: the finding and links first, since MLflow's UI folds it after a few lines.

    Args:
        launcher: of the study.
        text: the comparison's tables and verdicts.
        figures: names of the files in the folder of figures.
    """
    experiment = runs.opened(launcher.run_id).info.experiment_id
    artifacts = f"#/experiments/{experiment}/runs/{launcher.run_id}/artifacts"
    file_links = [f"[{file}]({artifacts}/{file})" for file in LINKED]
    figure_links = [f"[{Path(name).stem}]({artifacts}/{names.FIGURES}/{name})" for name in figures]
    top = f"**{headline(launcher)}.**\n\n{' · '.join(file_links)}\n\nFigures: {' · '.join(figure_links)}"
    step_list = steps(launcher)
    if len(top) + len(text) + len(step_list) > MAX_DESCRIPTION:  # the tables stay whole; the sentences are in table.md
        tables = text.partition("## Verdict")[0]
        text = f"{tables}[{names.TABLE_MD}]({artifacts}/{names.TABLE_MD}) gives the reasons."
    return f"{top}\n\n{text}\n\n{step_list}"


def cut(text: str, step_list: str) -> str:
    """Return a sweep's description: its tables, and the steps' runs as far as there is room for both."""
    whole = f"{text}\n\n{step_list}"
    if len(whole) <= MAX_DESCRIPTION:
        return whole
    whole_lines = text[:MAX_DESCRIPTION].rpartition("\n")[0]
    return whole_lines or text


def steps(launcher: Launcher) -> str:
    """Return a list of the steps' runs, the reused ones marked."""
    experiment = runs.opened(launcher.run_id).info.experiment_id
    cells = facts.cells(launcher)
    lines = ["## Steps", ""]
    for step, label, result in launcher.results:
        title = step if label == step else f"{step} {label}"
        address = result.outputs.models.get("model", "")
        if step == "quantize" and address in cells:  # labels are a study's variants; the model's params name its cell
            cell, _ = cells[address]
            title = f"{step} {cell}"
        reused = " (reused)" if result.reused else ""
        lines.append(f"- [{title}](#/experiments/{experiment}/runs/{result.run_id}){reused}")
    return "\n".join(lines)
