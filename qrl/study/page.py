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
    study = figures.Study(
        table,
        facts.head(recipe, launcher.run_id, table),
        {cell: size for cell, size in facts.cells(launcher).values() if size},
        gates,
        frame(launcher.result("train").run_id, names.HISTORY),
        *(frame(launcher.result("diagnose").run_id, name) for name in (names.WEIGHTS, names.STORED, names.BEHAVIOUR)),
        _changed(launcher),
        _notes(launcher),
    )
    figures.report(study, path)


def _read_table(launcher: Launcher) -> dict[str, Any]:
    path = contents.artifact(launcher.result("compare").run_id, names.TABLE_JSON)
    return json.loads(path.read_text(encoding="utf-8"))


def _changed(launcher: Launcher) -> pd.DataFrame:
    """Return the table of changed answers, empty where an older comparison made none."""
    import pandas as pd

    try:
        path = contents.artifact(launcher.result("compare").run_id, names.CHANGED_JSON)
    except BadInput:
        return pd.DataFrame()
    return pd.DataFrame(**json.loads(path.read_text(encoding="utf-8")))


def _notes(launcher: Launcher) -> list[str]:
    """Return the notes of the comparison, none where it made none."""
    try:
        path = contents.artifact(launcher.result("compare").run_id, names.NOTES_JSON)
    except BadInput:
        return []
    return json.loads(path.read_text(encoding="utf-8"))


def frame(run_id: str, name: str) -> pd.DataFrame:
    """Return a table among a run's artifacts, empty where the run made none."""
    import pandas as pd

    try:
        return pd.read_parquet(contents.artifact(run_id, name))
    except BadInput:
        return pd.DataFrame()


def gates(recipe: Recipe, launcher: Launcher, refused: str) -> list[Gate]:
    """Return what the gates decided in this study, in the order of its stages."""
    from qrl import registry
    from qrl.figures import Gate

    began = runs.opened(launcher.run_id).info.start_time // 1000
    name, decided = registry.registered_name(recipe), []
    for stage in (declared.stage for declared in recipe.promote.declared):
        try:
            version = registry.resolve(name, stage)
        except BadInput:
            continue
        record = version.gate(stage)
        # One decided before this study belongs to an earlier one.
        if record and record.time and datetime.fromisoformat(record.time).timestamp() >= began:
            reason = re.sub(r"^Stage \S+ passes: ", "", " ".join(record.reasons))
            cell = names.cell_name(version.variant, version.scheme)
            decided.append(Gate(stage, str(version.version), cell, "passed", reason))
    if refused:
        stage = re.match(r"Stage (\S+) is refused: ", refused)
        reason = refused[stage.end() :] if stage else refused
        decided.append(Gate(stage[1] if stage else "gate", "", "", "refused", reason))
    return decided


def description(launcher: Launcher, text: str, figures: list[str]) -> str:
    """Return the run's description: the finding and links first, since MLflow's UI folds it after a few lines."""
    from qrl.figures.cards import headline

    place = f"#/experiments/{runs.opened(launcher.run_id).info.experiment_id}/runs/{launcher.run_id}/artifacts"
    pictures = [f"{names.FIGURES}/{name}" for name in figures]
    links = [f"[{Path(file).stem if file in pictures else file}]({place}/{file})" for file in (*LINKED, *pictures)]
    files, drawn = (" · ".join(part) for part in (links[: len(LINKED)], links[len(LINKED) :]))
    top = f"**{headline(_read_table(launcher))}.**\n\n{files}\n\nFigures: {drawn}"
    runs_made = steps(launcher)
    if len(top) + len(text) + len(runs_made) > MAX_DESCRIPTION:  # the tables stay whole; the sentences are in table.md
        text = f"{text.partition('## Verdict')[0]}[{names.TABLE_MD}]({place}/{names.TABLE_MD}) gives the reasons."
    return f"{top}\n\n{text}\n\n{runs_made}"


def cut(text: str, runs_made: str) -> str:
    """Return a sweep's description: its tables, and the steps' runs as far as there is room for both."""
    whole = f"{text}\n\n{runs_made}"
    return whole if len(whole) <= MAX_DESCRIPTION else text[:MAX_DESCRIPTION].rpartition("\n")[0] or text


def steps(launcher: Launcher) -> str:
    """Return a list of the steps' runs, the reused ones marked."""
    experiment, models = runs.opened(launcher.run_id).info.experiment_id, facts.cells(launcher)
    lines = []
    for label, result in launcher.results:
        step, _, of = label.partition(" ")
        cell = models.get(result.outputs.models.get("model", ""), ("", None))[0] if step == "quantize" else ""
        title = step if of == step else f"{step} {cell or of}"
        reused = " (reused)" if result.reused else ""
        lines.append(f"- [{title}](#/experiments/{experiment}/runs/{result.run_id}){reused}")
    return "\n".join(["## Steps", "", *lines])
