"""Compare cells: from their runs, from a file of outcomes, or from counts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qrl import compare as room
from qrl import figures, names
from qrl.compare import ranking
from qrl.errors import BadInput
from qrl.evaluate import groups
from qrl.recipe import Recipe
from qrl.workspace import workspace, written_whole

if TYPE_CHECKING:
    import pandas as pd

    from qrl.compare.convergence import Convergence

TABLE_FILES = f"{names.TABLE_MD}, {names.TABLE_JSON}, {names.FIGURES}/"
METHODS_FILES = f"{ranking.METHODS_MD}, {ranking.METHODS_JSON}, {names.FIGURES}/"


def compare(recipe: Recipe, cells: list[str]) -> None:
    """Log the table of evaluated cells: table.md, table.json, questions.parquet, figures, metrics with intervals.

    Args:
        recipe: its `compare.margin` decides what counts as survival.
        cells: run ids of the cells' evaluations.
    """
    from qrl.tracking import keys, reuse, runs

    frame = _rows(None, cells)
    comparison = room.from_questions(frame, margin=recipe.compare.margin)  # raises before a run is opened
    key = keys.comparison(recipe, cells)
    with (
        workspace(f"compare-{key[:16]}") as work,
        runs.step("compare", recipe, sections=("compare",), tags={names.TAG_CACHE_KEY: key}),
    ):
        text = write(comparison, work, appendix=groups.markdown(frame))
        artifacts = _log(frame, work, comparison.metrics(), comparison.markdown())
        if not runs.is_launched():  # a study prints the table at its end
            click.echo(text)
            click.echo(f"Logged to run {runs.active_id()}: {TABLE_FILES}.", err=True)
        values = {"sentence": comparison.sentence(), "metrics": comparison.metrics()}
        reuse.record_outputs(artifacts=artifacts, values=values)


def compare_files(
    recipe: Recipe, out: str, *, questions: str | None, counts: str | None, cells: list[str], **given: Any
) -> None:
    """Write the same table into a folder, for files of the user or cells of the store; log nothing.

    `given` are columns, where and reference, as for `read_questions`.
    """
    margin = recipe.compare.margin
    if counts:
        comparison = room.from_counts(room.read_counts(counts), margin=margin, reference=given["reference"])
    else:
        comparison = room.from_questions(_rows(questions, cells, **given), margin=margin)
    click.echo(write(comparison, Path(out)))
    click.echo(f"Written to {out}: {TABLE_FILES}.", err=True)


def methods(recipe: Recipe, out: str | None, questions: str | None, cells: list[str], **given: Any) -> None:
    """Rank cells against base and full precision: methods.md, methods.json, a figure.

    They are written to `out`, or logged with questions.parquet to a run of their own. `given` as in `compare_files`.
    """
    frame = _rows(questions, cells, **given)
    measured = ranking.measure(frame)  # raises before a run is opened
    if out:
        click.echo(write_methods(measured, Path(out)))
        click.echo(f"Written to {out}: {METHODS_FILES}.", err=True)
        return
    from qrl.tracking import runs

    with (
        workspace("compare-methods", shared=True) as work,
        runs.step("compare", recipe, sections=("compare",), run_name="compare methods"),
    ):
        text = write_methods(measured, work)
        _log(frame, work, ranking.metrics(measured), text)
        click.echo(text)
        click.echo(f"Logged to run {runs.active_id()}: {METHODS_FILES}, {names.QUESTIONS}.", err=True)


def _rows(questions: str | None, cells: list[str], **given: Any) -> pd.DataFrame:
    if questions:
        return room.read_questions(questions, **given)
    from qrl.tracking import cells as evaluated  # imports MLflow, which takes a second

    return evaluated.rows(cells)


def _log(frame: pd.DataFrame, work: Path, metrics: dict[str, float], text: str) -> list[str]:
    """Log a folder with the compared rows, metrics and the description of the active run; return the folder's names."""
    from qrl.tracking import contents

    frame.to_parquet(work / names.QUESTIONS)
    contents.log_folder(work)
    contents.log_scores(metrics)
    contents.describe(text)
    return sorted(path.name for path in work.iterdir())


def write(comparison: room.Comparison, out: Path, *, appendix: str = "") -> str:
    """Write table.md, with Markdown to add at its end, table.json and figures/*.png; return the text of the first.

    Raises:
        BadInput: `out` cannot be written to.
    """
    text = f"{comparison.markdown()}\n{appendix}" if appendix else comparison.markdown()
    document = json.dumps(comparison.table_json(), indent=2) + "\n"
    with written(out, "comparison", {names.TABLE_MD: text, names.TABLE_JSON: document}) as drawn:
        figures.matrix(comparison, drawn / "matrix.png")
        if len(comparison.schemes) > 1:
            figures.survival(comparison, drawn / "survival.png")
    return text


def write_methods(
    measured: ranking.Methods, out: Path, converged: Sequence[Convergence] = (), failed: Sequence[str] = ()
) -> str:
    """Write methods.md, methods.json and figures/methods.png into a folder; return the text of the first.

    Raises:
        BadInput: `out` cannot be written to.
    """
    text = ranking.markdown(measured, converged, failed)
    document = json.dumps(ranking.as_json(measured, converged, failed), indent=1) + "\n"
    title = ranking.findings(measured)[0] if measured.best else "No quantized method"
    with written(out, "methods", {ranking.METHODS_MD: text, ranking.METHODS_JSON: document}) as drawn:
        figures.methods(measured, title, drawn / "methods.png")
    return text


@contextmanager
def written(out: Path, what: str, texts: dict[str, str]) -> Iterator[Path]:
    """Write each text to its file, whole or not at all; yield the folder for figures.

    Raises:
        BadInput: the file system refuses to write.
    """
    try:
        (out / names.FIGURES).mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            with written_whole(out / name) as path:
                path.write_text(text, encoding="utf-8")
        yield out / names.FIGURES
    except OSError as error:
        raise BadInput(
            f"The {what} cannot be written to {out} ({error.strerror or error}): "
            "give a folder that is writable and has space."
        ) from None
