"""What a study tells at its end: in the terminal, in its run's artifacts, metrics and description."""

from __future__ import annotations

import shutil

import click

from qrl import names
from qrl.launch import Launcher, Result
from qrl.recipe import Recipe
from qrl.tracking import projects, runs
from qrl.workspace import workspace


def show(recipe: Recipe, launcher: Launcher, compared: Result, diagnosed: Result, trained: Result) -> None:
    """Gathers the study's artifacts from its steps' runs, and prints the table and the verdict."""
    with workspace(f"study-{launcher.run_id}") as work:
        _gather(work, compared, diagnosed, trained)
        (work / names.RECIPE).write_text(recipe.dump())
        table = (work / names.TABLE_MD).read_text()
        runs.log_folder(work)
    runs.log_scores(compared.outputs.values["metrics"])
    runs.describe(f"{compared.outputs.values['sentence']}\n\n{table}\n\n{_links(launcher)}")
    click.echo(f"\n{table}\n{compared.outputs.values['sentence']}\n")


def close(recipe: Recipe, launcher: Launcher, seconds: float) -> None:
    """Says where things lie, what to type next, and what the time went into."""
    from qrl import registry

    name = registry.registered_name(recipe)
    overhead = seconds - launcher.seconds
    runs.log_scores({"study/seconds": seconds, "study/outside_steps_s": overhead})
    here = projects.artifact_place(launcher.run_id)
    click.echo(
        f"Artifacts   {here}: table.md, table.json, questions.parquet, recipe.yaml, figures/\n"
        f"Look        mlflow ui                                   then http://127.0.0.1:5000\n"
        f'Load        python -c \'import qrl; model, tokenizer = qrl.load("{name}", stage="awq")\'\n'
        f"Serve       mlflow run . -e serve -P stage=awq --env-manager uv\n"
        f"Took        {seconds:.0f} s, of which {overhead:.0f} s outside of steps"
    )


def _gather(work, compared: Result, diagnosed: Result, trained: Result) -> None:
    for file in (names.TABLE_MD, names.TABLE_JSON, names.QUESTIONS):
        shutil.copy(runs.artifact(compared.run_id, file), work / file)
    for result in (compared, diagnosed, trained):
        shutil.copytree(runs.artifact(result.run_id, names.FIGURES), work / names.FIGURES, dirs_exist_ok=True)


def _links(launcher: Launcher) -> str:
    """A list of the steps' runs, the reused ones marked."""
    experiment = projects.experiment_id(launcher.run_id)
    lines = [
        f"- [{label}](#/experiments/{experiment}/runs/{result.run_id}){' (reused)' if result.reused else ''}"
        for label, result in launcher.results
    ]
    return "Steps:\n\n" + "\n".join(lines)
