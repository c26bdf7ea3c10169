"""Compare cells: from their runs, from a file of outcomes, or from counts."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qrl import figures, names
from qrl.compare import (
    Comparison,
    from_counts,
    from_questions,
    narrow,
    notes,
    ranking,
    read_counts,
    read_logs,
    read_questions,
    sizes,
)
from qrl.compare import missing as absent
from qrl.errors import BadInput, VerdictFailed
from qrl.files import tables
from qrl.recipe import Recipe
from qrl.stats.text import interval, percent_interval
from qrl.workspace import workspace, written

if TYPE_CHECKING:
    import pandas as pd

    from qrl.compare.convergence import Convergence

TABLE_FILES = f"{names.TABLE_MD}, {names.TABLE_JSON}, {names.FIGURES}/"
METHODS_FILES = f"{ranking.METHODS_MD}, {ranking.METHODS_JSON}, {names.FIGURES}/"


def compare(recipe: Recipe, cells: list[str], failing: Sequence[str] = ()) -> None:
    """Log the table of evaluated cells: table.md, table.json, questions.parquet, figures, metrics with intervals.

    Args:
        recipe: its `compare.margin` decides what counts as survival.
        cells: run ids of the cells' evaluations.
        failing: verdicts, as for `check_verdicts`, which is called last.
    """
    from qrl.steps import outcome  # imports MLflow, which takes a second
    from qrl.tracking import cells as evaluated
    from qrl.tracking import contents, keys, reuse, runs

    rows = evaluated.files(cells)
    frame = _answers(cells)
    comparison = from_questions(frame, margin=recipe.compare.margin)  # raises before a run is opened
    key = keys.comparison(recipe, cells)
    with (
        workspace(f"compare-{key[:16]}") as work,
        runs.step("compare", recipe, sections=("compare",), tags={names.TAG_CACHE_KEY: key}),
    ):
        tables.join(rows, work / names.QUESTIONS, {"scheme": names.scheme})
        found = [*notes_on(comparison), *notes.of_updates(_stored(cells))]
        text = write(comparison, work, found)
        if len(changed := comparison.changed_shown()):
            contents.log_table(changed, Path(names.CHANGED_JSON).stem)  # the folder's file; marks it as a table
        contents.log_folder(work)
        contents.log_scores(comparison.metrics())
        contents.describe(f"{comparison.markdown()}\n{notes.markdown(found)}")
        if not runs.is_launched():  # a study prints the table at its end
            click.echo(text)
            click.echo(f"Logged to run {runs.active_id()}: {TABLE_FILES}.", err=True)
            outcome.compared(recipe, cells)
        artifacts = sorted(path.name for path in work.iterdir())
        values = {"sentence": comparison.sentence(), "metrics": comparison.metrics()}
        reuse.record_outputs(artifacts=artifacts, values=values)
    check_verdicts(comparison, failing)


def notes_on(comparison: Comparison) -> list[str]:
    """Return a warning for each pair of variants that gave the same texts."""
    shown = {scheme: comparison.shown(scheme) for scheme in comparison.schemes}
    return notes.of_answers(notes.alike(comparison.answered), shown)


def _stored(cells: list[str]) -> list[notes.Stored]:
    """Return what the weights of each trained variant keep of their update, by the runs of full-precision cells."""
    from qrl.tracking import cells as evaluated
    from qrl.tracking import lineage

    found = {}
    for run_id in cells:
        with contextlib.suppress(BadInput):  # rows that somebody else logged
            cell = evaluated.read(run_id)
            if cell.variant == names.BASE or cell.scheme != names.FULL or not cell.model:
                continue
            if stored := lineage.kept(cell.model):
                step, kept = stored
                found[cell.variant, lineage.training_seed(cell.model)] = (kept, f"{step}.store_dtype=fp32")
    several = len({seed for _, seed in found}) > 1
    return [
        notes.Stored(variant, str(seed) if several else "", kept, setting)
        for (variant, seed), (kept, setting) in found.items()
    ]


def _answers(cells: list[str]) -> pd.DataFrame:
    """Return the rows of evaluated cells; of their columns, only those that a comparison computes with if possible."""
    from qrl.tracking import cells as evaluated

    frame = narrow([({}, path) for path in evaluated.files(cells)])
    return evaluated.rows(cells) if frame is None else frame


def files(
    recipe: Recipe,
    *,
    questions: str | None,
    logs: str | None,
    counts: str | None,
    cells: list[str],
    rank: bool,
    out: str,
    failing: Sequence[str],
    missing: str | None = None,
    **given: Any,
) -> None:
    """Write the table of `compare`, or of `methods` to `rank`, for files or cells of the store; log nothing.

    `given` are columns, where and reference, as for `read_questions`, and metric and filter, as for `read_logs`;
    `failing` as for `check_verdicts`, `missing` as for `from_questions`.
    """
    of_logs = {name: given.pop(name) for name in ("metric", "filter")}
    if questions:
        evidence = read_questions(questions, **given, whole=False)
    elif logs:
        evidence = read_logs(logs, reference=given["reference"], **of_logs, missing=missing)
    elif not counts:
        evidence = _answers(cells)
    margin = recipe.compare.margin
    comparison = None
    kept = notes.of_updates(_stored(cells)) if not (questions or logs or counts) else []
    if rank:
        text = write_methods(ranking.measure(absent.filled(evidence, missing)), Path(out))
    else:
        if counts:
            comparison = from_counts(read_counts(counts), margin=margin, reference=given["reference"])
        else:
            comparison = from_questions(evidence, margin=margin, missing=missing)
        text = write(comparison, Path(out), [*notes_on(comparison), *kept])
    click.echo(text)
    click.echo(f"Written to {out}: {METHODS_FILES if rank else TABLE_FILES}.", err=True)
    if comparison:
        check_verdicts(comparison, failing)


def check_verdicts(comparison: Comparison, failing: Sequence[str]) -> None:
    """Do nothing unless verdicts are named on which to fail, such as "lost".

    Raises:
        VerdictFailed: a scheme has such a verdict, or none is quantized and has a verdict.
    """
    if not failing:
        return
    if not (judged := comparison.judged()):
        raise VerdictFailed("--fail-on reads verdicts, but no scheme is quantized: give the cells of one that is.")
    failed = []
    for row, verdict, survival in judged:
        if verdict.verdict in failing:
            kept = f", {percent_interval(verdict.kept)} of the gain is kept" if verdict.kept else ""
            shown = f"gain survival {interval(survival)}{kept}"
            failed.append(f"{names.cell_name(row.variant, row.scheme)} is {verdict.verdict} ({shown})")
    if failed:
        raise VerdictFailed(f"--fail-on {','.join(failing)}: {'; '.join(failed)}.")


def methods(recipe: Recipe, cells: list[str]) -> None:
    """Log one row per cell against base and full precision: methods.md, methods.json, questions.parquet, a figure."""
    from qrl.steps import outcome
    from qrl.tracking import cells as evaluated
    from qrl.tracking import contents, runs

    measured = ranking.measure(_answers(cells))  # raises before a run is opened
    with (
        workspace("compare-methods", shared=True) as work,
        runs.step("compare", recipe, sections=("compare",), run_name="compare methods"),
    ):
        text = write_methods(measured, work)
        tables.join(evaluated.files(cells), work / names.QUESTIONS, {"scheme": names.scheme})
        if len(changed := measured.changed_shown()):
            contents.log_table(changed, Path(names.CHANGED_JSON).stem)
        contents.log_folder(work)
        contents.log_scores(ranking.metrics(measured))
        contents.describe(text)
        click.echo(text)
        click.echo(f"Logged to run {runs.active_id()}: {METHODS_FILES}, {names.QUESTIONS}.", err=True)
        outcome.compared(recipe, cells)


def write(comparison: Comparison, out: Path, found: Sequence[str] = ()) -> str:
    """Write table.md, table.json, notes.json, changed answers, figures; return the first's text.

    Args:
        comparison: of all cells.
        out: a folder.
        found: notes, which follow the tables.

    Raises:
        BadInput: `out` cannot be written to.
    """
    text = "\n".join(filter(None, (comparison.markdown(), notes.markdown(found))))
    document = json.dumps(comparison.table_json(), indent=2) + "\n"
    documents = {names.TABLE_MD: text, names.TABLE_JSON: document}
    if found:
        documents[names.NOTES_JSON] = json.dumps(list(found), indent=1, ensure_ascii=False) + "\n"
    if comparison.paired:  # as MLflow writes tables
        documents[names.CHANGED_JSON] = comparison.changed_shown().to_json(orient="split", index=False)
    with written(out, "comparison", documents) as drawn:
        figures.matrix(comparison, drawn / "matrix.png")
        if len(comparison.schemes) > 1:
            figures.survival(comparison, drawn / "survival.png")
    return text


def write_methods(
    measured: ranking.Methods, out: Path, converged: Sequence[Convergence] = (), failed: Sequence[str] = ()
) -> str:
    """Write methods.md, methods.json, changed answers and figures into a folder; return the first's text.

    Raises:
        BadInput: `out` cannot be written to.
    """
    text = ranking.markdown(measured, converged, failed)
    document = json.dumps(ranking.as_json(measured, converged, failed), indent=1) + "\n"
    title = ranking.findings(measured)[0] if measured.best else "No quantized method"
    changed = measured.changed_shown().to_json(orient="split", index=False)
    documents = {ranking.METHODS_MD: text, ranking.METHODS_JSON: document, names.CHANGED_JSON: changed}
    with written(out, "methods", documents) as drawn:
        figures.methods(measured, title, drawn / "methods.png")
        if any(found.changes.get("tokens") for found in measured.answers.values()):
            figures.lengths(measured, drawn / "lengths.png")
    return text


def write_sizes(measured: sizes.Sizes, out: Path, failed: Sequence[str], rewards: Sequence[str]) -> str:
    """Write sizes.md, sizes.json and figures/sizes.png into a folder; return the text of the first."""
    text = sizes.markdown(measured, failed, rewards)
    document = json.dumps(sizes.as_json(measured, failed), indent=1) + "\n"
    findings = sizes.findings(measured)
    with written(out, "sizes", {sizes.SIZES_MD: text, sizes.SIZES_JSON: document}) as drawn:
        figures.sizes(measured, findings[0].rstrip(".") if findings else "The loss by model size", drawn / "sizes.png")
    return text
