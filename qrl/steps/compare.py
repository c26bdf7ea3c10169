"""Compare cells: from their runs, from a file of outcomes, or from counts.

`compare` and `methods` read runs and log to MLflow; `files` reads anything and writes a folder. They compute with
`qrl.compare` and write with the same functions, so that a table does not depend on where its outcomes came from.
MLflow is imported within functions, since it takes a second, and whoever compares files needs no store.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qrl import figures, names
from qrl.compare import (
    Comparison,
    from_counts,
    from_questions,
    notes,
    ranking,
    read_columns,
    read_counts,
    read_logs,
    read_questions,
    record,
    sizes,
    table,
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
    from qrl.steps import outcome
    from qrl.tracking import cells as evaluated
    from qrl.tracking import contents, keys, reuse, runs

    # Everything that can be wrong with the cells is raised here, before a run is opened.
    row_files = evaluated.files(cells)
    comparison = from_questions(_answers(cells), margin=recipe.compare.margin)
    key = keys.comparison(recipe, cells)

    with (
        workspace(f"compare-{key[:16]}") as work,
        runs.step("compare", recipe, sections=("compare",), tags={names.TAG_CACHE_KEY: key}),
    ):
        # The rows of all cells in one file, so that any other statistic can be computed without a GPU.
        tables.join(row_files, work / names.QUESTIONS, {"scheme": names.scheme})
        warnings = [*notes_on(comparison), *notes.notes_on_updates(_stored_updates(cells))]
        text = write(comparison, work, warnings)

        changed_answers = comparison.changed_sample()
        if len(changed_answers):
            contents.log_table(changed_answers, Path(names.CHANGED_JSON).stem)  # the folder's file; marks it as a table
        contents.log_folder(work)
        contents.log_scores(record.metrics(comparison))
        contents.describe(f"{table.markdown(comparison)}\n{notes.markdown(warnings)}")

        if not runs.is_launched():  # a study prints the table at its end
            click.echo(text)
            click.echo(f"Logged to run {runs.active_id()}: {TABLE_FILES}.", err=True)
            outcome.print_compared(recipe, cells)

        # What a later study finds instead of comparing the same cells again.
        artifacts = sorted(path.name for path in work.iterdir())
        values = {"sentence": table.sentence(comparison), "metrics": record.metrics(comparison)}
        reuse.record_outputs(artifacts=artifacts, values=values)
    check_verdicts(comparison, failing)


def notes_on(comparison: Comparison) -> list[str]:
    """Return a warning for each pair of variants that gave the same texts."""
    scheme_labels = {scheme: comparison.scheme_label(scheme) for scheme in comparison.schemes}
    return notes.notes_on_alike(notes.find_alike(comparison.answered), scheme_labels)


def _stored_updates(cells: list[str]) -> list[notes.Stored]:
    """Return what the weights of each trained variant keep of their update, by the runs of full-precision cells."""
    from qrl.tracking import cells as evaluated
    from qrl.tracking import lineage

    kept_by_training = {}
    for run_id in cells:
        with contextlib.suppress(BadInput):  # rows that somebody else logged
            cell = evaluated.read(run_id)
            if cell.variant == names.BASE or cell.scheme != names.FULL or not cell.model:
                continue
            stored_update = lineage.kept(cell.model)
            if stored_update:
                training = (cell.variant, lineage.training_seed(cell.model))
                kept_by_training[training] = stored_update

    # A seed is named only where it tells trainings apart.
    has_several_seeds = len({seed for _, seed in kept_by_training}) > 1
    stored_updates = []
    for (variant, seed), (step, kept) in kept_by_training.items():
        seed_label = str(seed) if has_several_seeds else ""
        stored_updates.append(notes.Stored(variant, seed_label, kept, f"{step}.store_dtype=fp32"))
    return stored_updates


def _answers(cells: list[str]) -> pd.DataFrame:
    """Return the rows of evaluated cells; of their columns, only those that a comparison computes with if possible."""
    from qrl.tracking import cells as evaluated

    frame = read_columns([({}, path) for path in evaluated.files(cells)])
    if frame is None:
        return evaluated.rows(cells)
    return frame


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
    columns: Mapping[str, str] | None = None,
    where: Mapping[str, str] | None = None,
    reference: str | None = None,
    metric: str | None = None,
    filter: str | None = None,
    missing: str | None = None,
) -> None:
    """Write the table of `compare`, or of `methods` to `rank`, for files or cells of the store; log nothing.

    Args:
        recipe: its `compare.margin` decides what counts as survival.
        questions, logs, counts, cells: the outcomes, in one of four forms.
        rank: write the table of `methods`.
        out: a folder.
        failing: as for `check_verdicts`.
        columns, where, reference: as for `read_questions`.
        metric, filter: as for `read_logs`.
        missing: as for `from_questions`.
    """
    margin = recipe.compare.margin
    warnings: list[str] = []
    if counts:  # without outcomes by question, so neither ranked nor searched for equal texts
        comparison = from_counts(read_counts(counts), margin=margin, reference=reference)
        _finish(comparison, out, notes_on(comparison), failing)
        return

    if questions:
        frame = read_questions(questions, columns=columns, where=where, reference=reference, whole=False)
    elif logs:
        frame = read_logs(logs, metric=metric, filter=filter, reference=reference, missing=missing)
    else:
        frame = _answers(cells)
        warnings = notes.notes_on_updates(_stored_updates(cells))

    if rank:
        text = write_methods(ranking.measure(absent.fill(frame, missing)), Path(out))
        click.echo(text)
        click.echo(f"Written to {out}: {METHODS_FILES}.", err=True)
        return
    comparison = from_questions(frame, margin=margin, missing=missing)
    _finish(comparison, out, [*notes_on(comparison), *warnings], failing)


def _finish(comparison: Comparison, out: str, warnings: Sequence[str], failing: Sequence[str]) -> None:
    """Write and print a comparison, then check its verdicts."""
    text = write(comparison, Path(out), warnings)
    click.echo(text)
    click.echo(f"Written to {out}: {TABLE_FILES}.", err=True)
    check_verdicts(comparison, failing)


def check_verdicts(comparison: Comparison, failing: Sequence[str]) -> None:
    """Do nothing unless verdicts are named on which to fail, such as "lost".

    Raises:
        VerdictFailed: a scheme has such a verdict, or none is quantized and has a verdict.
    """
    if not failing:
        return
    judged = comparison.judged()
    if not judged:
        raise VerdictFailed("--fail-on reads verdicts, but no scheme is quantized: give the cells of one that is.")

    failures = []
    for row, verdict, survival in judged:
        if verdict.verdict in failing:
            numbers = f"gain survival {interval(survival)}"
            if verdict.kept:
                numbers += f", {percent_interval(verdict.kept)} of the gain is kept"
            failures.append(f"{names.cell_name(row.variant, row.scheme)} is {verdict.verdict} ({numbers})")
    if failures:
        raise VerdictFailed(f"--fail-on {','.join(failing)}: {'; '.join(failures)}.")


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
        changed_answers = measured.changed_sample()
        if len(changed_answers):
            contents.log_table(changed_answers, Path(names.CHANGED_JSON).stem)
        contents.log_folder(work)
        contents.log_scores(ranking.metrics(measured))
        contents.describe(text)

        click.echo(text)
        click.echo(f"Logged to run {runs.active_id()}: {METHODS_FILES}, {names.QUESTIONS}.", err=True)
        outcome.print_compared(recipe, cells)


def write(comparison: Comparison, out: Path, warnings: Sequence[str] = ()) -> str:
    """Write table.md, table.json, notes.json, changed answers, figures; return the first's text.

    Args:
        comparison: of all cells.
        out: a folder.
        warnings: notes, which follow the tables.

    Raises:
        BadInput: `out` cannot be written to.
    """
    text = "\n".join(filter(None, (table.markdown(comparison), notes.markdown(warnings))))
    document = json.dumps(record.table_json(comparison), indent=2) + "\n"
    documents = {names.TABLE_MD: text, names.TABLE_JSON: document}
    if warnings:
        documents[names.NOTES_JSON] = json.dumps(list(warnings), indent=1, ensure_ascii=False) + "\n"
    if comparison.paired:
        # In the form in which MLflow writes tables, so that its UI shows the file as one.
        documents[names.CHANGED_JSON] = comparison.changed_sample().to_json(orient="split", index=False)

    with written(out, "comparison", documents) as figure_folder:
        figures.matrix(comparison, figure_folder / "matrix.png")
        if len(comparison.schemes) > 1:
            figures.survival(comparison, figure_folder / "survival.png")
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
    changed = measured.changed_sample().to_json(orient="split", index=False)
    documents = {ranking.METHODS_MD: text, ranking.METHODS_JSON: document, names.CHANGED_JSON: changed}

    with written(out, "methods", documents) as figure_folder:
        figures.methods(measured, title, figure_folder / "methods.png")
        has_lengths = any(cell_answers.changes.get("tokens") for cell_answers in measured.answers.values())
        if has_lengths:
            figures.lengths(measured, figure_folder / "lengths.png")
    return text


def write_sizes(measured: sizes.Sizes, out: Path, failed: Sequence[str], rewards: Sequence[str]) -> str:
    """Write sizes.md, sizes.json and figures/sizes.png into a folder; return the text of the first."""
    text = sizes.markdown(measured, failed, rewards)
    document = json.dumps(sizes.as_json(measured, failed), indent=1) + "\n"
    findings = sizes.findings(measured)
    title = findings[0].rstrip(".") if findings else "The loss by model size"

    with written(out, "sizes", {sizes.SIZES_MD: text, sizes.SIZES_JSON: document}) as figure_folder:
        figures.sizes(measured, title, figure_folder / "sizes.png")
    return text
