"""Compare cells: from their runs, from a file of outcomes, or from counts."""

from __future__ import annotations

from pathlib import Path

import click

from qrl import compare as room
from qrl import names
from qrl.compare import ranking as table
from qrl.evaluate import groups
from qrl.recipe import Recipe
from qrl.tracking import cells as evaluated
from qrl.tracking import contents, keys, reuse, runs, store
from qrl.workspace import workspace


def compare(recipe: Recipe, cells: list[str]) -> None:
    """Logs the table of evaluated cells: table.md, table.json, questions.parquet, figures, metrics with intervals.

    Args:
        recipe: `compare.margin` decides what counts as survival.
        cells: run ids of the cells' evaluations.
    """
    store.prepare()
    frame = evaluated.rows(cells)
    comparison = room.from_questions(frame, margin=recipe.compare.margin)  # what cannot be compared leaves no run
    key = keys.comparison(recipe, cells)
    with (
        workspace(f"compare-{key[:16]}") as work,
        runs.step("compare", recipe, sections=("compare",), tags={names.TAG_CACHE_KEY: key}),
    ):
        frame.to_parquet(work / names.QUESTIONS)
        room.write(comparison, work)
        if by_group := groups.markdown(frame):
            with (work / names.TABLE_MD).open("a", encoding="utf-8") as file:
                file.write(f"\n{by_group}")
        contents.log_folder(work)
        contents.log_scores(comparison.metrics())
        contents.describe(comparison.markdown())
        if not runs.is_launched():  # a study prints it all at its end
            click.echo((work / names.TABLE_MD).read_text(encoding="utf-8"))
            click.echo(
                f"Logged to run {runs.active_id()}: {names.TABLE_MD}, {names.TABLE_JSON}, {names.FIGURES}/.", err=True
            )
        made = sorted(path.name for path in work.iterdir())
        reuse.record_outputs(
            artifacts=made, values={"sentence": comparison.sentence(), "metrics": comparison.metrics()}
        )


def compare_files(recipe: Recipe, *, questions: str | None, counts: str | None, cells: list[str], out: str) -> None:
    """The same table into a folder, for outcomes or counts of one's own or cells of the store; nothing is logged."""
    margin = recipe.compare.margin
    if questions or cells:
        frame = room.read_questions(questions) if questions else evaluated.rows(cells)
        comparison = room.from_questions(frame, margin=margin)
    else:
        comparison = room.from_counts(room.read_counts(counts), margin=margin)
    room.write(comparison, Path(out))
    click.echo(comparison.markdown())
    click.echo(f"Written to {out}: {names.TABLE_MD}, {names.TABLE_JSON}, {names.FIGURES}/.", err=True)


def methods(recipe: Recipe, cells: list[str]) -> None:
    """Logs one row a cell against base and full precision: methods.md, methods.json, questions.parquet, a figure, metrics.

    Args:
        cells: run ids of the cells' evaluations.
    """
    store.prepare()
    frame = evaluated.rows(cells)
    found = table.measure(frame)  # what cannot be compared leaves no run
    with (
        workspace("compare-methods", shared=True) as work,
        runs.step("compare", recipe, sections=("compare",), run_name="compare methods"),
    ):
        text = table.write(found, work)
        frame.to_parquet(work / names.QUESTIONS)
        contents.log_folder(work)
        contents.log_scores(table.metrics(found))
        contents.describe(text)
        click.echo(text)
        files = f"{table.METHODS_MD}, {table.METHODS_JSON}, {names.QUESTIONS}, {names.FIGURES}/"
        click.echo(f"Logged to run {runs.active_id()}: {files}.", err=True)


def methods_files(questions: str | None, cells: list[str], out: str) -> None:
    """The same table into a folder, for outcomes of one's own or cells of the store; nothing is logged."""
    frame = room.read_questions(questions) if questions else evaluated.rows(cells)
    click.echo(table.write(table.measure(frame), out))
    click.echo(f"Written to {out}: {table.METHODS_MD}, {table.METHODS_JSON}, {names.FIGURES}/.", err=True)
